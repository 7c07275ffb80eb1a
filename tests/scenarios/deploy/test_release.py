"""What a release is made of: notes, checksums, an SBOM, a source archive that builds, a page that an index can show."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ROOT / "deploy" / "kubernetes"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture(scope="module")
def release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_notes_are_the_section_of_the_version(release: Any) -> None:
    changes = "# Changes\n\n## 0.2.0 (2027-01-02)\n\n- new\n\n## 0.1.0 (2026-12-01)\n\n- first\n"
    assert release.notes(changes, "0.2.0") == "- new\n"
    assert release.notes(changes, "0.1.0") == "- first\n"
    with pytest.raises(SystemExit, match=r"no section '## 0\.1'"):
        release.notes(changes, "0.1")
    with pytest.raises(SystemExit, match="not released yet"):
        release.notes("## 0.1.0 (not released yet)\n\n- first\n", "0.1.0")


def test_the_changelog_has_a_section_of_the_version() -> None:
    assert re.search(rf"(?m)^## {re.escape(PROJECT['version'])} ", (ROOT / "CHANGELOG.md").read_text("utf-8"))


def test_checksums_are_those_of_sha256sum(release: Any, tmp_path: Path) -> None:
    for name in ("b.whl", "a.tar.gz"):
        (tmp_path / name).write_text(name)
    (tmp_path / "sums").write_text(release.checksums(tmp_path.glob("*.*")))
    done = subprocess.run(["sha256sum", "--check", "--strict", "sums"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "a.tar.gz: OK\nb.whl: OK\n", done.stderr


@pytest.mark.heavy
def test_the_bill_of_materials_names_every_locked_version(release: Any, tmp_path: Path) -> None:
    release.bill_of_materials(tmp_path / "sbom.json")
    found = json.loads((tmp_path / "sbom.json").read_text("utf-8"))
    locked = dict(re.findall(r"(?m)^([a-z0-9-]+)==(\S+)", release.LOCK.read_text("utf-8")))
    assert found["bomFormat"] == "CycloneDX" and found["metadata"]["component"]["name"] == "rootgraft"
    assert {each["name"]: each["version"] for each in found["components"]} == locked


@pytest.mark.heavy
def test_the_source_archive_has_all_files_of_a_build_and_a_page_for_an_index(release: Any, tmp_path: Path) -> None:
    archive = release.source_archive(tmp_path)
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = re.compile(r"(api|engine|fleet|grammar|kernels|lora|programs|radix|tenancy)/")
    wanted = {name for name in tracked.split("\0") if folders.match(name)}
    assert {name for name in wanted if not (source / name).is_file()} == set()
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", str(archive)], check=True)
    page = (source / "PKG-INFO").read_text("utf-8")
    assert re.findall(r"\]\((?![a-z]+:|#)", page) == [], "links of a package index lead to no file"
    assert f"]({PROJECT['urls']['Source']}/blob/v{PROJECT['version']}/docs/reference/options.md)" in page
    assert f"]({PROJECT['urls']['Source']}/raw/v{PROJECT['version']}/docs/guide/ui.png)" in page


def test_kustomizations_name_files_that_exist() -> None:
    for path in KUBERNETES.rglob("kustomization.yaml"):
        found = yaml.safe_load(path.read_text("utf-8"))
        assert set(found) == {"apiVersion", "kind", "resources"}
        assert all((path.parent / name).is_file() for name in found["resources"])


def test_a_monitor_scrapes_the_service_under_the_job_of_the_alerts() -> None:
    (service,) = (
        each
        for each in yaml.safe_load_all((KUBERNETES / "rootgraft.yaml").read_text("utf-8"))
        if each["kind"] == "Service"
    )
    monitor = yaml.safe_load((KUBERNETES / "monitoring" / "servicemonitor.yaml").read_text("utf-8"))
    (endpoint,) = monitor["spec"]["endpoints"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    (scrape,) = yaml.safe_load((ROOT / "deploy" / "grafana" / "scrape.yml").read_text("utf-8"))["scrape_configs"]
    alerts = (ROOT / "deploy" / "grafana" / "alerts.yml").read_text("utf-8")
    job = service["metadata"]["labels"][monitor["spec"]["jobLabel"]]
    assert job == scrape["job_name"] and f'job="{job}"' in alerts
    assert endpoint["path"] == scrape["metrics_path"] == "/metrics"


def test_a_clone_without_an_environment_is_told_how_to_make_one() -> None:
    made = subprocess.run(["make", "release", "PYTHON=/no/python"], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 2 and made.stdout == ""
    assert 'There is no /no/python. Make it with "python3 -m venv .venv && .venv/bin/pip install' in made.stderr
