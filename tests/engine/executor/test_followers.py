"""The start of followers ends with the first one that has ended, whatever the others do."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from support.machine.waits import wait_until

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.followers import Followers


def followers() -> list[psutil.Process]:
    """The followers of this process, in the order of their ranks."""
    children = psutil.Process(os.getpid()).children()
    return sorted((each for each in children if "follower_process" in str(each.cmdline())), key=lambda each: each.pid)


def test_a_rank_that_ends_is_heard_while_another_one_hangs(tmp_path: Path) -> None:
    """Nobody else would: the thread of the signs of life waits for what each rank says."""
    seen = []

    def strike() -> None:
        wait_until(lambda: len(followers()) == 2)
        seen.extend(followers())
        seen[0].suspend()
        seen[1].kill()

    striker = threading.Thread(target=strike)
    striker.start()
    with pytest.raises(ConfigError, match="--tensor-parallel-size: rank 2 has ended with code -9"):
        Followers(EngineConfig(device="cpu", tensor_parallel_size=3), tmp_path, [], [torch.device("cpu")] * 3)
    striker.join()
    assert not followers() and not any(each.is_running() for each in seen)
