"""The KV pool: its size, its memory, and copies of parts of pages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.kernels import meta_gpu

from rootgraft.engine.batch import PageCopy, PageLoad
from rootgraft.engine.checkpoint.hf_config import model_config
from rootgraft.engine.checkpoint.model_config import KvShape, ModelConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.executor.device import choose_kv_dtype
from rootgraft.engine.models import kv_pool
from rootgraft.engine.models.kv_pool import KvPool, bytes_per_page
from rootgraft.kernels.layouts import int8_kv_layout

FLOAT8 = torch.float8_e4m3fn
CPU = torch.device("cpu")


@pytest.fixture
def config() -> ModelConfig:
    return model_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": 24,
            "intermediate_size": 8,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 10,
            "max_position_embeddings": 32,
            "rms_norm_eps": 1e-6,
        }
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_size_of_a_page(config: ModelConfig, dtype: torch.dtype) -> None:
    pool = KvPool(config, 5, 16, dtype, CPU)
    assert pool.caches[0].k.shape == pool.caches[0].v.shape == (3, 5, 2, 16, 6)
    assert bytes_per_page(config, 16, dtype) * 5 == pool.caches[0].k.nbytes + pool.caches[0].v.nbytes
    assert bytes_per_page(replace(config, layers=config.layers[:1]), 16, dtype) * 3 == bytes_per_page(config, 16, dtype)


def test_a_page_of_8_bits_takes_its_bytes_and_its_scales(config: ModelConfig) -> None:
    pool = KvPool(config, 5, 16, int8_kv_layout.DTYPE, CPU)
    assert pool.caches[0].k.shape == pool.caches[0].v.shape == (3, 5, 2, 16, 6 + 4)
    assert bytes_per_page(config, 16, int8_kv_layout.DTYPE) * 5 == pool.caches[0].k.nbytes + pool.caches[0].v.nbytes


def test_8_bits_are_refused_by_name_where_they_are_not_computed(config: ModelConfig) -> None:
    int8, config = EngineConfig(kv_cache_dtype="int8"), replace(config, head_dim=16)
    assert choose_kv_dtype(int8, config, CPU, torch.bfloat16) is int8_kv_layout.DTYPE
    assert choose_kv_dtype(replace(int8, block_size=32), config, CPU, torch.bfloat16) is int8_kv_layout.DTYPE
    assert choose_kv_dtype(EngineConfig(), config, CPU, torch.float32) is torch.float32
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8 needs a GPU\. Try: .* --kv-cache-dtype int8"):
        choose_kv_dtype(EngineConfig(kv_cache_dtype="fp8"), config, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="--block-size of a multiple of 16, not 8"):
        choose_kv_dtype(replace(int8, block_size=8), config, CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="heads of a multiple of 16 dimensions; this model's have 24"):
        choose_kv_dtype(int8, replace(config, head_dim=24), CPU, torch.bfloat16)
    with pytest.raises(ConfigError, match="kv-cache-dtype"):
        EngineConfig(kv_cache_dtype="fp8_e5m2")


def test_8_bits_on_a_gpu_are_rows(config: ModelConfig) -> None:
    config = replace(config, head_dim=64)
    with meta_gpu.posing_gpu():
        for name, dtype in {"int8": torch.int8, "fp8": FLOAT8, "fp8_e4m3": FLOAT8}.items():
            options = EngineConfig(kv_cache_dtype=name, block_size=8)
            assert choose_kv_dtype(options, config, meta_gpu.GPU, torch.bfloat16) is dtype
            assert bytes_per_page(config, 8, dtype) == 3 * 2 * 2 * 8 * (64 + 4)
            for other, number in ((config, torch.float32), (replace(config, head_dim=512), torch.bfloat16)):
                with pytest.raises(ConfigError, match=f"--kv-cache-dtype {name} on a GPU needs the Triton kernels"):
                    choose_kv_dtype(options, other, meta_gpu.GPU, number)


def test_a_pool_tells_its_form(config: ModelConfig) -> None:
    dtypes = (torch.bfloat16, torch.float32, int8_kv_layout.DTYPE, torch.int8, FLOAT8)
    forms = [KvPool(config, 2, 16, dtype, CPU).form for dtype in dtypes]
    names = [form.partition(" k,v 3x2x16x")[0] for form in forms]
    assert names == ["bfloat16", "float32", "int8", "int8 rows", "fp8 rows"] and len(set(forms)) == len(forms)


@pytest.fixture
def mixed(config: ModelConfig) -> ModelConfig:
    """Layers with two kinds of heads; the third reads the K and V of the first."""
    own, other = config.layers[0], replace(config.layers[0], kv_heads=KvShape(1, 16))
    return replace(config, layers=(own, other, replace(own, kv_source=0), other))


def test_layers_may_have_other_heads_or_none(mixed: ModelConfig) -> None:
    pool = KvPool(mixed, 5, 4, torch.float32, CPU)
    assert [caches.k.shape for caches in pool.caches] == [(1, 5, 2, 4, 6), (2, 5, 1, 4, 16)]
    assert pool.page_bytes * 5 == sum(tensor.nbytes for caches in pool.caches for tensor in caches.tensors)
    assert [layer.shape[1:] for layer in pool.k_layers] == [(2, 4, 6), (1, 4, 16), (2, 4, 6), (1, 4, 16)]
    assert pool.k_layers[2].data_ptr() == pool.k_layers[0].data_ptr()
    assert pool.v_layers[2].data_ptr() == pool.v_layers[0].data_ptr() != pool.k_layers[0].data_ptr()
    assert pool.form == "float32 k,v 1x2x4x6+2x1x4x16"
    assert pool.form != KvPool(replace(mixed, layers=mixed.layers[:3]), 5, 4, torch.float32, CPU).form


def test_pages_of_all_kinds_of_layers_are_copied_and_read(mixed: ModelConfig) -> None:
    pool = KvPool(mixed, 3, 4, torch.float32, CPU)
    written = [each for index in (0, 1, 3) for each in (pool.k_layers[index], pool.v_layers[index])]
    for number, layer in enumerate(written, 1):
        layer[0] = number
    page = pool.read_page(0)
    assert page.nbytes == pool.page_bytes
    pool.copy([PageCopy(0, 1, 3), PageLoad(2, bytes(page))])
    for number, layer in enumerate(written, 1):
        assert (layer[1, :, :3] == number).all() and not layer[1, :, 3].any()
        assert (layer[2] == number).all()


@pytest.mark.parametrize("dtype", [torch.int8, FLOAT8])
def test_pages_of_rows_are_copied_whole(config: ModelConfig, dtype: torch.dtype) -> None:
    pool = KvPool(replace(config, head_dim=16), 3, 16, dtype, CPU)
    pool.caches[0].k.view(torch.uint8)[:, 1] = 7
    pool.copy([PageCopy(1, 2, 3)])
    assert torch.equal(pool.caches[0].k.view(torch.uint8)[:, 2], pool.caches[0].k.view(torch.uint8)[:, 1])
    assert not pool.caches[0].k.view(torch.uint8)[:, 0].any()


def test_layers_are_views(config: ModelConfig) -> None:
    pool = KvPool(config, 5, 4, torch.float32, CPU)
    pool.k_layers[2][3] = 7.0
    assert pool.caches[0].k[2, 3].min() == 7 and pool.caches[0].k.sum() == 7 * 2 * 4 * 6
    assert pool.caches[0].v.sum() == 0


def test_copies_in_order(config: ModelConfig) -> None:
    pool = KvPool(config, 4, 4, torch.float32, CPU)
    pool.caches[0].k.copy_(torch.arange(4.0).view(1, 4, 1, 1, 1).expand_as(pool.caches[0].k))
    pool.caches[0].v.copy_(-pool.caches[0].k)
    pool.copy([PageCopy(3, 0, 2), PageCopy(0, 1, 3), PageCopy(2, 3, 4)])
    for values in (pool.caches[0].k, -pool.caches[0].v):
        cells = values.amax(dim=(0, 2, 4))
        assert torch.equal(cells, values.amin(dim=(0, 2, 4)))
        assert cells.tolist() == [[3, 3, 0, 0], [3, 3, 0, 1], [2, 2, 2, 2], [2, 2, 2, 2]]


def test_copy_outside_the_pool(config: ModelConfig) -> None:
    pool = KvPool(config, 4, 4, torch.float32, CPU)
    for copy in (PageCopy(4, 0, 1), PageCopy(0, -1, 1), PageCopy(0, 1, 5)):
        with pytest.raises(IndexError):
            pool.copy([copy])


def test_memory_of_pages_is_taken_and_values_stay(config: ModelConfig, monkeypatch) -> None:
    pool = KvPool(config, 40, 16, torch.float32, CPU)
    pool.caches[0].k[:, 3] = 5
    assert pool.populate(0) == 40
    assert (
        (pool.caches[0].k[:, 3] == 5).all()
        and pool.caches[0].k.sum() == pool.caches[0].k[:, 3].sum()
        and not pool.caches[0].v.any()
    )
    taken = []
    monkeypatch.setattr(kv_pool, "populate", lambda part: taken.append((part.data_ptr(), part.nbytes)))
    page = pool.k_layers[0][0].nbytes
    monkeypatch.setattr(kv_pool, "_POPULATED_AT_ONCE", 16 * page)
    assert [pool.populate(first) for first in (8, 24)] == [24, 40]
    layers = (*pool.k_layers, *pool.v_layers)
    assert taken == [(layer[first].data_ptr(), 16 * page) for first in (8, 24) for layer in layers]


def test_where_memory_cannot_be_taken_nothing_happens(config: ModelConfig, monkeypatch) -> None:
    def refuse(part: torch.Tensor) -> None:
        raise OSError("not here")

    pool = KvPool(config, 40, 16, torch.float32, CPU)
    monkeypatch.setattr(kv_pool, "populate", refuse)
    assert pool.populate(20) == 40
    assert not pool.caches[0].k.any()
