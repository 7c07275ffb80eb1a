"""Collectives of one rank are identities, and a model on one device makes no process group."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from rootgraft.kernels.collectives import ALONE, ProcessGroup

PROGRAM = """
import sys
from pathlib import Path
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
import torch.distributed
core = EngineCore.load(EngineConfig(device="cpu", load_format="dummy", num_gpu_blocks_override=8), Path(sys.argv[1]))
core.close()
print(torch.distributed.is_initialized(), "rootgraft.engine.executor.follower_process" in sys.modules)
"""


def test_one_rank_is_its_own_sum() -> None:
    part = torch.tensor([1.0, 2.0])
    assert ALONE.add(part) is part
    assert ALONE.gather(part) == [part]
    assert ALONE.least(7) == 7
    assert (ALONE.rank, ALONE.size) == (0, 1)


def test_the_plain_path_makes_no_process_group(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32, "hidden_size": 16, '
        '"intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, '
        '"max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": true}'
    )
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout == "False False\n", done.stderr


def test_a_group_between_cpus_needs_no_abort_and_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    before = dict(os.environ)
    group = ProcessGroup(0, 1, tmp_path / "store", torch.device("cpu"), 60.0, may_end=False)
    group.abort()
    part = torch.tensor([1.0, 2.0])
    assert group.add(part).tolist() == [1.0, 2.0]
    group.close()
    assert not torch.distributed.is_initialized()
    assert {name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"} == {
        name: value for name, value in before.items() if name != "GLOO_SOCKET_IFNAME"
    }
