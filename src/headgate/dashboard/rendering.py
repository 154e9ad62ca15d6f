"""Drawing a page, or one region of it, from its template.

A region is a block of the template, named as the element that holds it; a page that is open fetches
its regions anew, and nothing around them is drawn then. Rule: everything is escaped, and a name
that a template does not know is a fault, not an empty text.
"""

from __future__ import annotations

import secrets
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

import headgate
from headgate.core.text import ago, coming, relative
from headgate.dashboard import formats
from headgate.dashboard.formats import reset_words
from headgate.dashboard.page import Page, View
from headgate.dashboard.static_files import StaticFiles

MACROS = "macros.html"
FRAME = "base.html"
CSRF_MARK = f"csrf-{secrets.token_hex(16)}"
"""Stands for the secret of a form while a page is drawn, so that one drawing serves everybody.

Nobody outside can know it, so no text of theirs can stand for the secret.
"""
ONCE_MARK = f"once-{secrets.token_hex(16)}"
"""Stands for the number of the forms of one answer."""


class Rendering:
    """The templates, with all that they may use."""

    def __init__(self, static: StaticFiles) -> None:
        self._templates = Environment(
            loader=PackageLoader("headgate.dashboard", "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            # An upgrade changes files under a service that runs, which has the old code.
            auto_reload=False,
        )
        self._templates.filters.update(formats.FILTERS)
        self._templates.globals.update(
            static=static.url,
            ago=ago,
            coming=coming,
            relative=relative,
            reset_words=reset_words,
            csrf_mark=CSRF_MARK,
            once_mark=ONCE_MARK,
            version=headgate.__version__,
        )
        # Macros are a global, because a region is drawn without the top of its template.
        self.macros: Any = self._templates.get_template(MACROS).module
        self._templates.globals["m"] = self.macros
        self._frame = frozenset(self._templates.get_template(FRAME).blocks)

    def page(self, view: View, page: Page, *, flash: tuple[str, bool] = ("", False)) -> str:
        """Return a whole page; `flash` is what the last action said, and whether it failed."""
        template = self._templates.get_template(page.template)
        return template.render(_context(view, page), flash=flash)

    def region(self, view: View, page: Page, name: str) -> str | None:
        """Return the inside of a region; None if the page has no such region."""
        template = self._templates.get_template(page.template)
        wanted = name.replace("-", "_")
        block = template.blocks.get(wanted)
        # The blocks of the frame are whole parts of a page, with what their template has around.
        if block is None or wanted in self._frame:
            return None
        return "".join(block(template.new_context(_context(view, page))))


def _context(view: View, page: Page) -> dict[str, Any]:
    return {**page.context, "view": view, "title": page.title}
