"""Compare the project's lower bounds and the images' locked versions with known advisories: needs no network.

python deploy/audit.py
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
ADVISORIES = ROOT / "deploy" / "advisories.toml"
LOCK = ROOT / "deploy" / "requirements.lock"
_LOCKED = re.compile(r"(?m)^([a-z0-9-]+)==(\S+)")


def lower_bounds(project: Mapping[str, Any]) -> Iterator[tuple[str, Version]]:
    """Yield the packages that a project depends on, its extras included, with the oldest version that it takes."""
    for text in (*project["dependencies"], *chain.from_iterable(project["optional-dependencies"].values())):
        requirement = Requirement(text)
        bounds = [Version(each.version) for each in requirement.specifier if each.operator in (">=", "==", "~=")]
        yield requirement.name, max(bounds, default=Version("0"))


def locked(text: str) -> dict[str, Version]:
    """Return the versions of a lock file by package."""
    return {name: Version(version) for name, version in _LOCKED.findall(text)}


def faults(
    advisories: list[Mapping[str, Any]], bounds: list[tuple[str, Version]], lock: Mapping[str, Version]
) -> list[str]:
    """Return a sentence for each version that an advisory names."""
    found = []
    for advisory in advisories:
        name, fixed, ids = advisory["package"], Version(advisory["fixed"]), ", ".join(advisory["ids"])
        places = [("pyproject.toml allows", each) for package, each in bounds if package == name]
        places += [("deploy/requirements.lock has", lock[name])] if name in lock else []
        found += [f"{place} {name} {each}: {ids} is fixed in {fixed}." for place, each in places if each < fixed]
    return found


def main() -> int:
    """Print what is wrong. Returns the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    advisories = tomllib.loads(ADVISORIES.read_text("utf-8"))["advisory"]
    wrong = faults(advisories, list(lower_bounds(project)), locked(LOCK.read_text("utf-8")))
    print("\n".join(wrong) or f"None of {len(advisories)} known advisories applies.")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
