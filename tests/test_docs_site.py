"""The documentation site builds, every link in it leads somewhere, and it needs no other host."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import headgate
from build_docs import SECTIONS, mkdocs_problems, publish, write_config
from diagrams import parse, svg
from doc_pages import PAGES, ROOT, blocks_of, name_of

VERSION = headgate.__version__
BUILD = ROOT / "scripts/build_docs.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a site that was just built; a link that leads nowhere fails it."""
    folder = tmp_path_factory.mktemp("docs")
    command = [
        sys.executable,
        str(BUILD),
        "--site",
        f"{folder}/site",
        "--staged",
        f"{folder}/pages",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_the_start_of_the_site_leads_to_this_version(site: Path) -> None:
    for page, target in (("index.html", VERSION), ("latest/index.html", f"../{VERSION}")):
        assert f'url={target}/index.html"' in (site / page).read_text()
    assert f'"version":"{VERSION}"' in (site / "versions.json").read_text()
    assert f"Headgate {VERSION}" in (site / VERSION / "index.html").read_text()


def test_sites_of_other_versions_stay_and_the_latest_is_found(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0"):
        (tmp_path / version / "search").mkdir(parents=True)
    (tmp_path / "latest").mkdir()
    publish(tmp_path, "0.10.0")
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in listed] == [
        ("0.10.0", ["latest"]),
        ("0.9.0", []),
    ]


def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    for name in SECTIONS.values():
        (pages / name).mkdir()
        (pages / name / "README.md").write_text(f"# {name}\n\n## Here\n")
    start = pages / "index.md"
    start.write_text("# Start\n\n[here](reference/README.md#here)\n")
    config = write_config(pages, tmp_path / "site")
    assert mkdocs_problems(config) == ""
    start.write_text("# Start\n\n[there](reference/README.md#there) [nowhere](nowhere.md)\n")
    problems = mkdocs_problems(config)
    assert "#there" in problems
    assert "nowhere.md" in problems


def test_every_page_of_the_documentation_is_in_the_site(site: Path) -> None:
    pages = [page.relative_to(ROOT / "docs") for page in PAGES if (ROOT / "docs") in page.parents]
    names = [
        path.with_name("index.html") if path.stem == "README" else path.with_suffix(".html")
        for path in pages
    ]
    assert [name for name in names if not (site / VERSION / name).is_file()] == []


def test_the_reference_is_filled_in_and_found_by_search(site: Path) -> None:
    index = (site / VERSION / "search/search_index.json").read_text()
    for page in (site / VERSION / "reference").glob("*.html"):
        assert "<!-- reference:" not in page.read_text()
    for words in ("headgate budget set", "max_queue_size", "task_retention_seconds"):
        assert words in index
    assert (site / VERSION / "reference/openapi.json").is_file()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=[\"']?(https?:)?//", re.IGNORECASE
    )
    found = {
        page.name: match[0]
        for page in (site / VERSION).rglob("*.html")
        if (match := loads.search(page.read_text()))
    }
    assert found == {}


DIAGRAMS = [
    (f"{name_of(page)} {at}", block.body)
    for page in PAGES
    for at, block in enumerate(blocks_of(page.read_text()))
    if block.language == "mermaid"
]


@pytest.mark.parametrize("text", [text for _, text in DIAGRAMS], ids=[name for name, _ in DIAGRAMS])
def test_every_arrow_of_a_diagram_is_drawn(text: str) -> None:
    diagram = parse(text)
    drawn = svg(text)
    assert drawn.count('class="arrow') == len(diagram.edges)
    assert drawn.count('class="box') == len(diagram.nodes)
    words = re.sub(r"<[^>]+>", " ", drawn)
    for edge in diagram.edges:
        assert all(word in words for word in edge.text.replace("<br/>", " ").split())


def test_a_line_that_is_not_understood_is_an_error() -> None:
    for text in ("flowchart LR\n    a ==> b", "stateDiagram-v2\n    note left of a"):
        with pytest.raises(ValueError, match="not understood"):
            svg(text)
