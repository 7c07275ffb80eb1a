"""Engine template: a process that has imported the engine and loaded the weights, and forks engine processes::

    python -P -m rootgraft.engine.core.engine_template FD PARENT PATH OPTIONS

FD: descriptor of its end of a ``ForkServer``'s socket. PARENT, PATH, OPTIONS: as in ``engine_process``. The forked
engine processes share the memory of the weights, because no process writes to it. If the template cannot load the
model, it exits without a message. An engine process is then started without a template, and reports the error.
"""

from __future__ import annotations

import socket
import sys
from functools import partial
from pathlib import Path

from ...grammar.parent_death import end_with_parent
from ..serving.fork_server import EXIT_UNABLE, serve_forks
from .engine_process import parse_config, run, set_up_process


def main(arguments: list[str]) -> int:
    """Run the template process. Returns its exit code."""
    fd, parent, path, options = arguments
    end_with_parent(int(parent))
    set_up_process()
    config, end = parse_config(options), socket.socket(fileno=int(fd))
    try:
        from ..executor.load_weights import load_for_forks

        weights = load_for_forks(config, Path(path))
    except Exception:
        return EXIT_UNABLE
    if weights is None:
        return EXIT_UNABLE
    return serve_forks(end, partial(run, config=config, path=Path(path), weights=weights))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
