"""The documentation agrees with the house: generated pages are current, paths exist, pages keep their length."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.module_map import PACKAGES, page

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
MOST_LINES = {"README.md": 170, "docs/architecture.md": 250, "docs/performance.md": 150}
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks", "examples", "deploy")
PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]+")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_map_of_modules_is_current() -> None:
    made = (ROOT / "docs" / "modules.md").read_text("utf-8")
    assert made == page(), "run python tests/support/module_map.py > docs/modules.md"


def test_each_module_has_a_line_in_the_map() -> None:
    empty = [line for line in page().splitlines() if line.startswith("- ") and line.endswith(": ")]
    assert not empty


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_what_a_page_names_exists(path: Path) -> None:
    text = path.read_text("utf-8")
    code = " ".join(re.findall(r"`([^`\n]+)`", text))
    gone = [name for name in PATH.findall(code) if not any(ROOT.glob(name.rstrip("/."))) and not _is_module(name)]
    assert not gone
    broken = [link for link in LINK.findall(text) if not (path.parent / link).exists()]
    assert not broken


def _is_module(name: str) -> bool:
    """Whether it is a module written without its suffix, or one followed by a name in it."""
    path = ROOT / name
    return path.with_suffix(".py").is_file() or any(path.parent.glob(f"{path.name}.*"))


@pytest.mark.parametrize("name", MOST_LINES)
def test_pages_keep_their_length(name: str) -> None:
    assert len((ROOT / name).read_text("utf-8").splitlines()) <= MOST_LINES[name]


def test_the_glossary_names_a_module_for_each_word() -> None:
    rows = re.findall(
        r"^\| (?!word|-)([^|]+)\|([^|]+)\|([^|]+)\|$", (ROOT / "docs/glossary.md").read_text("utf-8"), re.M
    )
    assert 30 <= len(rows) <= 50
    assert all(re.search(r"`[^`]+`", module) for _, _, module in rows)
    words = [word.split(",")[0].strip().lower() for word, _, _ in rows]
    assert words == sorted(words)


def test_results_are_few_and_in_the_index() -> None:
    folder = ROOT / "benchmarks" / "results"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    assert len(files) <= 16
    assert sum(len(path.read_text("utf-8").splitlines()) for path in files) <= 6_000
    index = (folder / "README.md").read_text("utf-8")
    assert all(path.name in index for path in files if path.name != "README.md")
