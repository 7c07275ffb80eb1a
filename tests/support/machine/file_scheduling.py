"""Which of several test processes gets which files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[3]


class FilesByServer(LoadFileScheduling):
    """Whole files to whichever process is free, but all that ask ``real_server`` to one, which starts it once."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "real_server" if _asks_real_server(file) else file


@cache
def _asks_real_server(file: str) -> bool:
    return "real_server: RealServer" in (ROOT / file).read_text("utf-8")
