"""An error of the operating system that ends a command is one line."""

from __future__ import annotations

import errno
import subprocess
import sys
import tempfile
from subprocess import PIPE
from typing import Any

import pytest

from rootgraft.api.cli import main
from rootgraft.api.cli.machine import server_list
from rootgraft.api.http.run_record import run_folder

NO_FOLDER = "no folder for temporary files is writable. Try: TMPDIR=FOLDER with a writable folder"


def no_temporary_folder() -> str:
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp', '/var/tmp', '/']")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/a/b"), "rootgraft ps: Read-only file system: /a/b\n"),
        (OSError(errno.EMFILE, "Too many open files"), "rootgraft ps: Too many open files\n"),
        (
            None,
            "rootgraft ps: no folder for temporary files is writable. Try: TMPDIR=FOLDER with a writable folder\n",
        ),
    ],
)
def test_one_line_and_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Any, error: OSError, line: str) -> None:
    def fail(*options: Any) -> int:
        if error is None:
            no_temporary_folder()
        raise error

    monkeypatch.setattr(server_list, "list_servers", fail)
    assert main.main(["ps"]) == 1
    assert capsys.readouterr().err == line


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    """As ``head`` has; what a command prints before its end may be more than a buffer holds."""
    with subprocess.Popen([sys.executable, "-m", "rootgraft", "search"], stdout=PIPE, stderr=PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_a_record_needs_no_folder_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", no_temporary_folder)
    assert run_folder().parent.as_posix() == "/tmp"
