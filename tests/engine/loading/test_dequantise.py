"""Block formats against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from rootgraft.engine.checkpoint.gguf import TENSOR_TYPES
from rootgraft.engine.loading import dequantise as module
from rootgraft.engine.loading.dequantise import dequantise

TYPES = [name for name, _, _ in TENSOR_TYPES.values()]
# Where the fp16 scales lie in a block: random bits there would often be infinite or not a number.
SCALES = {"Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,)}
SCALES |= {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "F32": (), "F16": (), "BF16": ()}
SCALES |= {"MXFP4": (), "NVFP4": ()}  # its scale is a power of two, in the first byte
SCALES |= {"Q2_K": (80, 82), "Q3_K": (108,), "IQ4_NL": (0,), "IQ4_XS": (0,), "TQ1_0": (52,), "TQ2_0": (64,)}
SCALES |= dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)) | {"IQ1_M": ()}


def random_blocks(type_name: str, num_blocks: int) -> np.ndarray:
    """Blocks [N, bytes] of any content but for their scales, which are small numbers."""
    rng = np.random.default_rng(3)
    block, block_bytes = next(entry[1:] for entry in TENSOR_TYPES.values() if entry[0] == type_name)
    if block == 1:
        values = rng.standard_normal((num_blocks, 1), dtype=np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]).view(np.uint8)
    blocks = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
    for at in SCALES[type_name]:
        blocks[:, at : at + 2] = rng.normal(0, 0.1, (num_blocks, 1)).astype(np.float16).view(np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(90, 160, num_blocks)
    if type_name == "NVFP4":
        blocks[:, :4] %= 0x7F
    if type_name == "IQ1_M":  # its scale is in the upper four bits of four words, the highest in the last
        blocks[:, 55] &= 0x3F
    return blocks


@pytest.mark.parametrize("type_name", TYPES)
def test_same_as_the_gguf_package(type_name: str) -> None:
    blocks = random_blocks(type_name, 60)
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name]).reshape(4, -1)
    out = torch.empty(expected.shape)
    dequantise(blocks.reshape(-1), type_name, out)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("type_name", ["Q4_1", "Q6_K", "F16"])
def test_in_chunks_and_other_types(type_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = random_blocks(type_name, 60)
    elements = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[type_name])
    monkeypatch.setattr(module, "_CHUNK", 512)
    out = torch.empty(elements.size, dtype=torch.bfloat16)
    dequantise(blocks.reshape(-1), type_name, out)
    torch.testing.assert_close(out, torch.from_numpy(elements.reshape(-1)).bfloat16(), rtol=1e-2, atol=1e-6)


def test_a_read_only_file_is_no_warning() -> None:
    blocks = random_blocks("Q8_0", 2).reshape(-1)
    blocks.flags.writeable = False
    dequantise(blocks, "Q8_0", torch.empty(64))
