"""Tasks as child processes: one process a task, of a command that the configuration names.

Rule: nothing that a client sent becomes part of a command line. A task comes as JSON on standard
input and as variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from headgate.core.tasks.outcomes import Outcome
from headgate.errors import InvalidSettingError
from headgate.executor import WorkOrder
from headgate.executors.child import OWN_PREFIX, PASSED_ON, Child, Children, variables_of
from headgate.executors.environment import Environment, SlotKeys, no_slot_keys
from headgate.executors.order_view import order_json
from headgate.executors.slot_texts import SlotText, uses_slot
from headgate.executors.targets import CommandTarget, has_slot
from headgate.providers.prices import PriceList

_TEMPLATE = re.compile(
    r"\{(?:tabId|agentId|projectId|taskId|action|resolved|(?:params|env|slot)\.[^{}]*)\}"
)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class CommandExecutor:
    """Runs the command of one target once for each task."""

    def __init__(
        self,
        name: str,
        target: CommandTarget,
        *,
        environ: Mapping[str, str],
        prices: PriceList,
        slot_keys: SlotKeys = no_slot_keys,
    ) -> None:
        _check_command(target.command, setting=f"targets.{name}.command")
        self._target = target
        self._environment = Environment(environ, has_slot=has_slot(target), slot_keys=slot_keys)
        self._children = Children(prices=prices, hidden=self._environment)
        self._slot_variables: dict[str, SlotText] = {}
        self._variables = self._variables_of(target, environ, f"targets.{name}.env")

    async def open(self) -> None:
        """See whether children can be made to end with the service."""
        await self._children.open()

    async def close(self) -> None:
        """Do nothing: the children of different tasks share nothing."""

    async def execute(self, order: WorkOrder) -> Outcome:
        """Run the command; a cancellation ends its whole group before it goes on."""
        try:
            child = self._child(order)
        except InvalidSettingError as error:
            return self._children.not_started(str(error), is_transient=True)
        return await self._children.run(child)

    def _child(self, order: WorkOrder) -> Child:
        variables = self._variables
        for name, text in self._slot_variables.items():
            variables = variables | {name: text.filled(order)}
        return Child(
            command=self._target.command,
            environ=variables | variables_of(order),
            cwd=self._target.cwd,
            stdin=order_json(order),
            max_output_bytes=self._target.max_output_bytes,
            kill_grace_seconds=self._target.kill_grace_seconds,
        )

    def _variables_of(
        self, target: CommandTarget, environ: Mapping[str, str], setting: str
    ) -> dict[str, str]:
        variables = {name: environ[name] for name in PASSED_ON if name in environ}
        for name in target.pass_env:
            if name in environ:
                variables[name] = self._environment.value(name, setting=f"{setting}.{name}")
        for name, value in target.env.items():
            check_variable(name, setting=f"{setting}.{name}")
            self._put_variable(variables, name, value, f"{setting}.{name}")
        return variables

    def _put_variable(self, variables: dict[str, str], name: str, value: str, setting: str) -> None:
        if uses_slot(value):
            text = SlotText(value, setting=setting, environment=self._environment)
            self._slot_variables[name] = text
        else:
            variables[name] = self._environment.filled(value, setting=setting)


def check_variable(name: str, *, setting: str) -> None:
    """Refuse a name that no variable can have, or that is set for every task."""
    if not _VARIABLE.fullmatch(name):
        raise InvalidSettingError(setting, "is not the name of a variable")
    if name.startswith(OWN_PREFIX):
        raise InvalidSettingError(setting, f"names with {OWN_PREFIX} are set for every task")


def _check_command(command: tuple[str, ...], *, setting: str) -> None:
    if not command[0]:
        raise InvalidSettingError(setting, "must begin with the name of a program")
    for argument in command:
        if "\0" in argument:
            raise InvalidSettingError(setting, "an argument cannot contain a NUL character")
        if found := _TEMPLATE.search(argument):
            problem = f"{found[0]} is not filled in a command"
            advice = "the task comes as JSON on standard input"
            raise InvalidSettingError(setting, f"{problem}; {advice}")
