"""What a GPU gets is asked by what kernels need: products of bfloat16, tensor cores, and NVIDIA's driver."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.device import choose_device, choose_dtype
from rootgraft.kernels import ops
from rootgraft.kernels.triton import launch

CUDA = torch.device("cuda", 0)
CARDS = {"T4": (7, 5), "V100": (7, 0), "A100": (8, 0), "A10": (8, 6), "L40S": (8, 9), "H200": (9, 0), "5090": (12, 0)}


@pytest.fixture
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """A CUDA that names this card, and says as torch's does that every GPU has bfloat16, by emulation if need be."""
    capability = CARDS[request.param]
    launch._capability.cache_clear()
    request.addfinalizer(launch._capability.cache_clear)

    def has_bf16(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    fakes: dict[str, Any] = {
        "is_available": lambda: True,
        "is_bf16_supported": has_bf16,
        "get_device_capability": lambda _device=None: capability,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    return capability


@pytest.mark.parametrize("card", CARDS, indirect=True)
def test_number_format_and_kernels_by_card(card: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "DEVICE_TYPES", frozenset(("cuda",)))
    is_new = card >= (8, 0)
    assert choose_device(EngineConfig()).type == "cuda"
    assert choose_dtype(EngineConfig(), CUDA) is (torch.bfloat16 if is_new else torch.float16)
    assert choose_dtype(EngineConfig(dtype="bfloat16"), CUDA) is torch.bfloat16, "what is named is taken"
    assert ops.on_triton(CUDA) is launch.serves(CUDA) is is_new
    status = ops.triton_status(CUDA)
    assert status.startswith("GPU kernels: Triton") if is_new else "plain torch, slower" in status and "sm_80" in status


def test_torch_for_rocm_is_no_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"built for ROCm, and AMD's GPUs are not supported\. Use --device cpu"):
        choose_device(EngineConfig(device="cuda"))
    assert choose_device(EngineConfig()).type == "cpu" and "AMD's GPUs" in capsys.readouterr().err
