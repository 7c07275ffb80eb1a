"""Nothing waits for a follower that has ended, whatever the others do, in a start or in a step."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from support.machine.waits import wait_until

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, EngineDead
from rootgraft.engine.executor import followers as followers_module
from rootgraft.engine.executor.followers import Followers
from rootgraft.engine.executor.tensor_parallel import identity


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


class DeviceGroup:
    """A group whose calls wait for a rank that is gone until they are aborted, as on devices."""

    def __init__(self, *_: object, **__: object) -> None:
        self.aborted = threading.Event()

    def add(self) -> str:
        self.aborted.wait()
        return "no sum of anything"

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.abort()


class GroupThatWaits(DeviceGroup):
    """A group that does not come about: a rank has ended on the way to it."""

    made: threading.Event

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()
        followers()[0].kill()
        self.made.wait()


def start(folder: Path) -> Followers:
    config = EngineConfig(device="cpu", tensor_parallel_size=2, load_format="dummy")
    (folder / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16, '
        '"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, '
        '"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}'
    )
    return Followers(config, folder, identity(config, folder), [torch.device("cpu")] * 2)


@pytest.mark.heavy
def test_a_rank_that_ends_before_it_joins_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    GroupThatWaits.made = threading.Event()
    monkeypatch.setattr(followers_module, "ProcessGroup", GroupThatWaits)
    with pytest.raises(ConfigError, match=r"--tensor-parallel-size: .*Rank 1 of 2 has ended: ending all ranks"):
        start(tmp_path)
    GroupThatWaits.made.set()
    assert not followers()


@pytest.mark.heavy
def test_a_sum_on_a_device_whose_other_rank_is_gone_ends_and_is_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followers_module, "ProcessGroup", DeviceGroup)
    ranks = start(tmp_path)
    ranks.started()
    followers()[0].kill()
    with pytest.raises(EngineDead, match="Rank 1 of 2 has ended: ending all ranks"):
        ranks.together(ranks.group.add)
    ranks.close()
    assert not followers()
