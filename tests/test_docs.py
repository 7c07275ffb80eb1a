"""The documentation agrees with the house: generated pages are current, paths exist, and pages have few words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.module_map import PACKAGES, page

ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
# Pages of reference, and those for people who change the code. All other pages are for users.
REFERENCE_PAGES = {
    *("adding-a-model", "api", "architecture", "decisions", "glossary", "metrics", "models", "modules", "options"),
    *("performance", "schema-keywords"),
}
MOST_WORDS = 1_200
MOST_README_WORDS = 700
# Pages of more words, a ratchet: an entry may go or become smaller; none may grow or be added.
LONG_PAGES = {
    "docs/guide/fleet.md": 3470,
    "docs/guide/keys-and-limits.md": 1777,
    "docs/guide/programs.md": 1424,
    "docs/guide/structured-outputs.md": 2318,
}
FOLDERS = (*PACKAGES, "tests", "docs", "benchmarks", "examples", "deploy")
# With a slash before it a name is that of a route, such as /api/chat.
PATH = re.compile(rf"(?<!/)\b(?:{'|'.join(FOLDERS)})/[\w./-]+")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_map_of_modules_is_current() -> None:
    made = (ROOT / "docs" / "internals" / "modules.md").read_text("utf-8")
    assert made == page(), "run python tests/support/module_map.py > docs/internals/modules.md"


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


def anchors(path: Path) -> set[str]:
    """The names by which links find a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", path.read_text("utf-8"), flags=re.M | re.S)
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        name = base = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        number = 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_links_to_headings_find_them(path: Path) -> None:
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", path.read_text("utf-8"))
    targets = [(path.parent / file if file else path, name) for file, name in links]
    assert not [(file.name, name) for file, name in targets if file.suffix == ".md" and name not in anchors(file)]


def _is_module(name: str) -> bool:
    """Whether it is a module written without its suffix, or one followed by a name in it."""
    path = ROOT / name
    return path.with_suffix(".py").is_file() or any(path.parent.glob(f"{path.name}.*"))


def _is_user_page(path: Path) -> bool:
    return path.is_relative_to(ROOT / "docs") and "notebook" not in path.parts and path.stem not in REFERENCE_PAGES


def test_user_pages_keep_to_their_number_of_words() -> None:
    pages = [path for path in PAGES if path == ROOT / "README.md" or _is_user_page(path)]
    words = {name_of(path): len(path.read_text("utf-8").split()) for path in pages}
    bounds = {name: MOST_README_WORDS if name == "README.md" else MOST_WORDS for name in words}
    too_many = {name: count for name, count in words.items() if count > LONG_PAGES.get(name, bounds[name])}
    assert not too_many, f"at most {MOST_WORDS:,} words, the README {MOST_README_WORDS}"
    mended = [name for name in LONG_PAGES if words.get(name, 0) <= bounds.get(name, 0)]
    assert not mended, "these keep the bound now: remove them from the list"


def test_the_glossary_names_a_module_for_each_word() -> None:
    rows = re.findall(
        r"^\| (?!word|-)([^|]+)\|([^|]+)\|([^|]+)\|$", (ROOT / "docs/reference/glossary.md").read_text("utf-8"), re.M
    )
    assert 30 <= len(rows) <= 50
    assert all(re.search(r"`[^`]+`", module) for _, _, module in rows)
    words = [word.split(",")[0].strip().lower() for word, _, _ in rows]
    assert words == sorted(words)


def test_results_are_in_the_index() -> None:
    folder = ROOT / "benchmarks" / "results"
    files = sorted(path for path in folder.iterdir() if path.is_file())
    index = (folder / "README.md").read_text("utf-8")
    assert all(path.name in index for path in files if path.name != "README.md")
