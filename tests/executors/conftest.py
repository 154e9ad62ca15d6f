"""Tests of executors may be async functions; those that ask for `loop_factory` choose the loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import cast

import pytest

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an async test on a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    test = pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names})
    factory = cast("LoopFactory | None", pyfuncitem.funcargs.get("loop_factory"))
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(test)
    return True


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_factory(request: pytest.FixtureRequest) -> LoopFactory:
    """Give each of the loops that the service may run on."""
    if request.param == "asyncio":
        return asyncio.new_event_loop
    uvloop = pytest.importorskip("uvloop")
    return cast("LoopFactory", uvloop.new_event_loop)
