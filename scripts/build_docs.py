"""Build the documentation site into build/site/VERSION: `make docs`.

The pages of `docs` are copied to build/docs, with the parts that are made from the code filled in
and the diagrams drawn, and MkDocs makes the site of them. It reports every link that leads nowhere
as an error. `build/site/latest` leads to the newest version, and the sites of other versions stay.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import yaml

import headgate
from diagrams import svg
from headgate.api.app import ROUTES
from headgate.api.openapi import openapi
from headgate.gateway.gateway import ROUTES as CALL_ROUTES
from reference_pages import expanded

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
STAGED = ROOT / "build/docs"
SITE = ROOT / "build/site"
FILES = "files"
"""Where files of the repository lie in the site that a page links to."""

SECTIONS = {
    "Tutorials": "tutorials",
    "How-to guides": "how-to",
    "Reference": "reference",
    "Explanation": "explanation",
    "Decisions": "decisions",
}
_DIAGRAM = re.compile(r"^```mermaid\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>!?\[[^\]]+\])\((?P<target>[^)\s#:]+)(?P<anchor>#[\w-]*)?\)")
_REDIRECT = """<!doctype html>
<meta charset="utf-8">
<meta http-equiv="refresh" content="0; url={where}">
<title>Headgate</title>
<a href="{where}">Headgate {version}</a>
"""


def main() -> None:
    """Build the site, and say where it is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--site", type=Path, default=SITE, help="the folder of all versions")
    parser.add_argument("--staged", type=Path, default=STAGED, help="where pages are prepared")
    given = parser.parse_args()
    version = headgate.__version__
    stage(given.staged)
    config = write_config(given.staged, given.site / version)
    problems = mkdocs_problems(config)
    if problems:
        sys.exit(problems)
    publish(given.site, version)
    sys.stdout.write(f"{given.site / version / 'index.html'}\n")
    sys.stdout.write(f"python3 -m http.server --directory {given.site} serves it, with search\n")


def mkdocs_problems(config: str) -> str:
    """Have MkDocs make the site; return what it warned of, empty if all is well.

    Quiet, it would count no warnings, and so take a link that leads nowhere.
    """
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", config]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(  # noqa: S603
        command, check=False, cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if not done.returncode:
        return ""
    lines = (done.stdout + done.stderr).splitlines()
    return "\n".join(line for line in lines if not line.startswith("INFO"))


def stage(folder: Path) -> None:
    """Copy the pages to a folder, with what is made from the code in its place."""
    shutil.rmtree(folder, ignore_errors=True)
    for path in sorted(DOCS.rglob("*")):
        copied = folder / path.relative_to(DOCS)
        if path.suffix == ".md":
            copied.parent.mkdir(parents=True, exist_ok=True)
            copied.write_text(staged_page(path, folder))
        elif path.is_file() and "__pycache__" not in path.parts:
            copied.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copied)
    document = msgspec.json.encode(openapi(ROUTES, CALL_ROUTES))
    (folder / "reference/openapi.json").write_bytes(msgspec.json.format(document, indent=1))


def staged_page(path: Path, folder: Path) -> str:
    """Return a page as the site has it; files of the repository that it links to are copied."""
    count = 0

    def drawn(match: re.Match[str]) -> str:
        nonlocal count
        count += 1
        name = f"{path.stem}-{count}.svg"
        target = folder / path.relative_to(DOCS).parent / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(svg(match["text"]))
        return f"![Diagram {count} of this page]({name})"

    def linked(match: re.Match[str]) -> str:
        target = (path.parent / match["target"]).resolve()
        if target.is_relative_to(DOCS) or not target.is_file():
            return match[0]
        place = folder / FILES / target.relative_to(ROOT)
        if place.suffix == ".md":
            place = place.with_suffix(".md.txt")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, place)
        here = folder / path.relative_to(DOCS).parent
        return f"{match['text']}({os.path.relpath(place, here)})"

    text = _DIAGRAM.sub(drawn, path.read_text())
    return expanded(_LINK.sub(linked, text))


def write_config(folder: Path, site: Path) -> str:
    """Write the configuration of MkDocs for this build, and return its path."""
    settings = {
        "INHERIT": str(ROOT / "mkdocs.yml"),
        "site_name": f"Headgate {headgate.__version__}",
        "docs_dir": str(folder.resolve()),
        "site_dir": str(site.resolve()),
        "nav": navigation(folder),
    }
    path = folder.parent / "mkdocs.yml"
    path.write_text(yaml.safe_dump(settings, sort_keys=False, allow_unicode=True))
    return str(path)


def navigation(folder: Path) -> list[object]:
    """Return the pages of each folder: its README first, the others as the index lists them."""
    beside = sorted(path.name for path in folder.glob("*.md") if path.name != "index.md")
    links = [link["target"] for link in _LINK.finditer((DOCS / "index.md").read_text())]
    found: list[object] = ["index.md"]
    for title, name in SECTIONS.items():
        pages = {page.relative_to(folder).as_posix() for page in (folder / name).glob("*.md")}
        listed = [f"{name}/README.md", *links, *sorted(pages)]
        listed = [page for page in dict.fromkeys(listed) if page in pages]
        found.append({title: listed + (beside if name == "explanation" else [])})
    return found


def publish(site: Path, version: str) -> None:
    """List the versions, and have the start of the site and `latest` lead to this one."""
    built = (path.name for path in site.iterdir() if (path / "search").is_dir())
    versions = sorted(built, key=_order, reverse=True)
    listed = [
        {"version": one, "title": one, "aliases": ["latest"] if one == version else []}
        for one in versions
    ]
    (site / "versions.json").write_bytes(msgspec.json.encode(listed))
    (site / "index.html").write_text(
        _REDIRECT.format(where=f"{version}/index.html", version=version)
    )
    latest = site / "latest"
    latest.mkdir(exist_ok=True)
    (latest / "index.html").write_text(
        _REDIRECT.format(where=f"../{version}/index.html", version=version)
    )


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"[0-9]+", version)]


if __name__ == "__main__":
    main()
