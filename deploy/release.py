"""Make the files of a release in dist/: wheel of all CPU levels, source archive, SBOM, locked versions, notes, sums.

python deploy/release.py
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LOCK = ROOT / "deploy" / "requirements.lock"
SUMS = "SHA256SUMS"


def notes(changes: str, version: str) -> str:
    """Return the section of a version in CHANGELOG.md, without its heading.

    Raises:
        SystemExit: the page has no such section, or says that the version is not released yet.
    """
    found = re.search(rf"(?ms)^## {re.escape(version)}(?P<rest>(?: [^\n]*)?)\n(?P<text>.*?)(?=^## |\Z)", changes)
    if found is None:
        raise SystemExit(f"CHANGELOG.md has no section '## {version}'.")
    if "not released" in found["rest"]:
        raise SystemExit(f"CHANGELOG.md says that {version} is not released yet: enter the date, and commit it.")
    return found["text"].strip() + "\n"


def checksums(files: Iterable[Path]) -> str:
    """Return lines that ``sha256sum --check`` reads."""
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(files))


def bill_of_materials(output: Path) -> None:
    """Write an SBOM (CycloneDX 1.6, JSON) of the locked versions, the same for the same lock."""
    command = ["requirements", str(LOCK), "--pyproject", str(ROOT / "pyproject.toml"), "--spec-version", "1.6"]
    _run("cyclonedx_py", *command, "--output-reproducible", "--output-format", "JSON", "--output-file", str(output))


def source_archive(folder: Path) -> Path:
    """Build the sdist into a folder, and return it."""
    _run("build", "--sdist", "--outdir", str(folder), str(ROOT))
    (archive,) = folder.glob("*.tar.gz")
    return archive


def main() -> None:
    """Make all files, from a checkout without changes."""
    if changed := subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True).stdout:
        raise SystemExit(f"A release needs a clean work tree, but there are uncommitted changes:\n{changed}")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    text = notes((ROOT / "CHANGELOG.md").read_text("utf-8"), version)
    shutil.rmtree(DIST, ignore_errors=True)
    subprocess.run(["make", "wheel", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    source_archive(DIST)
    _run("twine", "check", "--strict", *(str(path) for path in DIST.iterdir()))
    bill_of_materials(DIST / f"rootgraft-{version}.cdx.json")
    shutil.copy(LOCK, DIST / f"rootgraft-{version}-requirements.lock")
    (DIST / "NOTES.md").write_text(text, "utf-8")
    (DIST / SUMS).write_text(checksums(DIST.iterdir()), "utf-8")


def _run(module: str, *words: str) -> None:
    subprocess.run([sys.executable, "-m", module, *words], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
