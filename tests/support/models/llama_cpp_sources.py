"""Source package of llama-cpp-python: vocabularies with the ids of texts, and published chat templates."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

_WANTED = ("/vendor/llama.cpp/models/ggml-vocab-", "/vendor/llama.cpp/models/templates/")
_RELEASE = "llama-cpp-python==0.3.36"


def models_of_llama_cpp(folder: Path) -> Path:
    """Download the package (77 MB) into ``folder`` and return the folder ``models`` of llama.cpp's sources.

    ``LLAMA_CPP_MODELS`` names such a folder that is there already. If the package cannot be downloaded, the test is
    skipped.
    """
    if (given := os.environ.get("LLAMA_CPP_MODELS")) is not None:
        return Path(given)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    done = subprocess.run([*command, "-d", str(folder), _RELEASE], capture_output=True, text=True)
    archives = list(folder.glob("llama_cpp_python-*.tar.gz"))
    if done.returncode or not archives:
        pytest.skip(f"the source package {_RELEASE} cannot be downloaded: {done.stderr[-200:]}")
    with tarfile.open(archives[0]) as archive:
        wanted = [file for file in archive if any(part in file.name for part in _WANTED)]
        archive.extractall(folder, wanted, filter="data")
    return next(folder.rglob("ggml-vocab-gpt-2.gguf")).parent
