"""An application with a fake engine, whose other parts are real ones on a store in memory."""

from __future__ import annotations

from pathlib import Path

from api.fake_engine import FakeEngine
from headgate.api.app import App
from headgate.api.submission import SubmissionParser
from headgate.app import build_app, build_service
from headgate.config import load_settings


def fake_app(
    engine: FakeEngine | None = None, submission_parser: SubmissionParser | None = None
) -> App:
    """Return an application over an engine; its store is not open."""
    settings = load_settings(
        None, {}, {"store.url": "memory:", "dashboard.mode": "off", "webhooks.enabled": False}
    )
    app = build_app(build_service(settings, data=Path(), environ={}))
    app.api.engine = engine or FakeEngine()
    app.api.submission_parser = submission_parser or SubmissionParser(
        targets={"x": None}, default_target="x"
    )
    return app
