"""Two ranks with half of the layers each answer as one does, over gloo, and end together."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from support.engine.mixed_answers import assert_same, mixed_answers
from support.engine.tiny_llm import open_llm, write_model

from rootgraft import SamplingParams
from rootgraft.engine.errors import EngineDead

pytestmark = pytest.mark.heavy

# A pool in which the requests push one another out.
OPTIONS = {"threads": 1, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "enable_lora": False}


def test_mixed_requests_get_the_answers_of_one_rank(tmp_path: Path) -> None:
    """Draws, scores and schemas, with preemption and drafts; twice, so that prefixes are hit. Then a rank is killed."""
    write_model(tmp_path)
    one = open_llm(tmp_path, **OPTIONS)
    try:
        expected = mixed_answers(one)
    finally:
        one.close()
    two = open_llm(tmp_path, pipeline_parallel_size=2, **OPTIONS)
    try:
        for _ in range(2):
            assert_same(mixed_answers(two), expected)
        [follower] = [
            each for each in psutil.Process(os.getpid()).children() if "follower_process" in str(each.cmdline())
        ]
        follower.kill()
        with pytest.raises(EngineDead, match="all ranks end"):
            while True:
                two.generate(["ab"], SamplingParams(max_tokens=4), use_tqdm=False)
    finally:
        two.close()
    assert not follower.is_running()
