"""Which of several test processes gets which files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[3]


class FilesByServer(LoadFileScheduling):
    """Whole files to whichever process is free, but those that share something that takes long to one process.

    All that ask ``real_server`` start it once; all that read the sources, in the folder of the tests itself, parse them
    once.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "real_server" if _asks_real_server(file) else "sources" if file.count("/") == 1 else file


@cache
def _asks_real_server(file: str) -> bool:
    return "real_server: RealServer" in (ROOT / file).read_text("utf-8")
