"""The documentation as data: its pages, their fenced blocks, and what running a block prints.

Blocks of one page run in order and share their names. With UPDATE_DOCS=1 in the environment the
tests write what they found into the pages instead of comparing it.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

from headgate.cli.main import run

ROOT = Path(__file__).parent.parent
UPDATING = bool(os.environ.get("UPDATE_DOCS"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted(ROOT.glob("docs/**/*.md")),
]
OUTPUT_LANGUAGES = ("text", "output")
ANY_LINES = "..."
ANY_TEXT = "…"

_FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
_NOT_RUN = re.compile(r"<!-- not run: \S[^>]* -->\s*\Z")
_GENERATED = re.compile(
    r"(?P<head><!-- generated: (?P<name>[\w.]+) -->\n).*?(?P<tail><!-- end of generated -->)",
    re.DOTALL,
)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#+ (?P<text>.+)$", re.MULTILINE)


class Block(NamedTuple):
    """One fenced block: where its body lies in the page, and whether the page excuses it."""

    language: str
    body: str
    start: int
    end: int
    is_excused: bool


class Output(NamedTuple):
    """What a page shows of a block's output, what was printed, and which part of the page it is.

    A block without output has no span: it must print nothing.
    """

    shown: str
    printed: str
    span: slice | None = None

    @property
    def is_right(self) -> bool:
        """Whether the page shows what was printed.

        A line of `...` stands for any lines, and `…` for any text within a line.
        """
        if ANY_LINES not in self.shown.split("\n") and ANY_TEXT not in self.shown:
            return self.shown == self.printed
        parts = [_pattern(part) for part in self.shown.split(f"{ANY_LINES}\n")]
        return re.fullmatch(r"(?:.*\n)*?".join(parts), self.printed) is not None


def _pattern(shown: str) -> str:
    return ".*".join(re.escape(part) for part in shown.split(ANY_TEXT))


def name_of(page: Path) -> str:
    """Return the path of a page as the documentation names it."""
    return page.relative_to(ROOT).as_posix()


def blocks_of(text: str) -> list[Block]:
    """Return the fenced blocks of a page in order."""
    return [
        Block(
            match["language"],
            match["body"],
            match.start("body"),
            match.end("body"),
            bool(_NOT_RUN.search(text[: match.start()])),
        )
        for match in _FENCE.finditer(text)
    ]


def prose_of(text: str) -> str:
    """Return a page without its fenced blocks."""
    return _FENCE.sub("", text)


def run_page(page: Path) -> list[Output]:
    """Run the Python and console blocks of a page; pair what they show with what they print."""
    text = page.read_text()
    names: dict[str, object] = {"__name__": "documentation"}
    outputs: list[Output] = []
    blocks = blocks_of(text)
    for position, block in enumerate(blocks):
        if block.is_excused:
            continue
        if block.language == "python":
            code = "\n" * text.count("\n", 0, block.start) + block.body
            printed = _printed_by_python(code, name_of(page), names)
            outputs.append(_output_after(text, blocks, position, printed))
        elif block.language == "console":
            span = slice(block.start, block.end)
            outputs.append(Output(block.body, _console(block.body), span))
    return outputs


def write_outputs(page: Path, outputs: list[Output]) -> None:
    """Replace what a page shows by what was printed."""
    text = page.read_text()
    for output in reversed(outputs):
        if not output.is_right and output.span is not None:
            text = text[: output.span.start] + output.printed + text[output.span.stop :]
    page.write_text(text)


def regenerated(text: str) -> str:
    """Return a page with the parts that the code draws drawn afresh."""
    return _GENERATED.sub(lambda match: match["head"] + _drawn(match["name"]) + match["tail"], text)


def generated_names(text: str) -> list[str]:
    """Return the functions that parts of a page are drawn by."""
    return [match["name"] for match in _GENERATED.finditer(text)]


def links_of(text: str) -> list[str]:
    """Return the targets of a page's links."""
    return [match["target"] for match in _LINK.finditer(prose_of(text))]


def anchors_of(text: str) -> set[str]:
    """Return the anchors that a page's headings make."""
    headings = (match["text"].lower() for match in _HEADING.finditer(prose_of(text)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def rows_under(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table rows in the section of a heading, without code marks."""
    section = re.split(rf"^#+ {re.escape(heading)}$", text, maxsplit=1, flags=re.MULTILINE)[1]
    section = re.split(r"^#+ ", section, maxsplit=1, flags=re.MULTILINE)[0]
    lines = [line for line in section.split("\n") if line.startswith("| ")][2:]
    cells = (re.split(r"(?<!\\)\|", line.strip("|")) for line in lines)
    return [[cell.strip().strip("`").replace(r"\|", "|") for cell in row] for row in cells]


def _output_after(text: str, blocks: list[Block], position: int, printed: str) -> Output:
    end = blocks[position].end + len("```\n")
    following = blocks[position + 1] if position + 1 < len(blocks) else None
    if following is not None and following.language in OUTPUT_LANGUAGES:
        between = text[end : following.start - len(f"```{following.language}\n")]
        if not between.strip():
            return Output(following.body, printed, slice(following.start, following.end))
    return Output("", printed)


def _printed_by_python(code: str, file_name: str, names: dict[str, object]) -> str:
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, file_name, "exec", dont_inherit=True), names)
    return printed.getvalue()


def _console(session: str) -> str:
    """Return the session as it goes now: each command, then what it prints."""
    lines: list[str] = []
    code = 0
    shown = re.split(r"^\$ (.*)\n", session, flags=re.MULTILINE)
    for command, old_output in zip(shown[1::2], shown[2::2], strict=True):
        if command == "echo $?":
            printed = f"{code}\n"
        else:
            code, printed = _run_command(command)
        kept = Output(old_output, printed)
        lines += [f"$ {command}\n", old_output if kept.is_right else printed]
    return "".join(lines)


def _run_command(command: str) -> tuple[int, str]:
    program, *arguments = shlex.split(command)
    assert program == "headgate", f"only headgate runs in a console block, not {command!r}"
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with redirect_stdout(terminal), redirect_stderr(terminal):
        code = run(arguments)
    terminal.seek(0)
    return code, terminal.read()


def _drawn(name: str) -> str:
    module, _, function = name.rpartition(".")
    drawn = str(getattr(importlib.import_module(module), function)())
    return f"```mermaid\n{drawn}\n```\n" if drawn.startswith("stateDiagram") else f"{drawn}\n"
