"""Three ranks round KV to 8 bits as one does: their answers differ only as far as their sums do.

A sum in another order moves a key by a last bit. Where that crosses a rounding step the key moves by a step, 1/127 of
its head's largest number, and keys of all later layers round anew. So answers of a model whose sums are rounded say
nothing about a fault. Here each output of the products that are added over the ranks is one product alone, which any
order adds exactly: everything else, such as a scale of another head, would show in the bits of a logprob.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engine.mixed_answers import mixed_answers
from support.engine.tiny_llm import make_model, open_llm, write_adapter, write_model
from transformers import LlamaForCausalLM

pytestmark = pytest.mark.heavy

# A pool in which the requests push one another out.
OPTIONS = {"threads": 1, "num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_loras": 2}
ADDED = ("o_proj.weight", "down_proj.weight")


def exact_model(kv_heads: int) -> LlamaForCausalLM:
    """Return a model whose products that are split by their inputs have one term for each output."""
    model = make_model(num_key_value_heads=kv_heads, head_dim=16)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(ADDED):
                kept = torch.randint(parameter.shape[1], (len(parameter), 1), generator=generator)
                parameter.mul_(torch.zeros_like(parameter).scatter_(1, kept, 4.0))
    return model


@pytest.mark.parametrize("kv_heads", [3, 1])
def test_three_ranks_answer_bit_for_bit_where_sums_are_exact(kv_heads: int, tmp_path: Path) -> None:
    """With KV heads of their own or one on all ranks, an adapter, lookups, preemption; then over prefixes."""
    write_model(tmp_path / "model", exact_model(kv_heads))
    write_adapter(tmp_path / "small", 1, exact_model(kv_heads))
    found = []
    for size in (1, 3):
        options = OPTIONS | {"kv_cache_dtype": "int8", "tensor_parallel_size": size}
        llm = open_llm(tmp_path / "model", lora_dir=str(tmp_path), **options)
        try:
            found.append([mixed_answers(llm, ["small"], count=24) for _ in range(2)])
        finally:
            llm.close()
    assert found[1] == found[0]
