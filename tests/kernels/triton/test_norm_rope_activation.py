"""The GPU's kernels for norms, rotation, activation and copies, interpreted, against the oracle."""

from __future__ import annotations

import pytest
import torch
from support.kernels.ragged_batches import assert_close

from rootgraft.kernels import ops, reference
from rootgraft.kernels.layouts import kv_forms
from rootgraft.kernels.layouts.attention_arguments import RopeParams
from rootgraft.kernels.triton import activation, layer_norm, norm, pages, rope

pytestmark = pytest.mark.usefixtures("interpreted")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", activation.KINDS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 1040), (0, 16)])
def test_gated_activation(dtype, kind, tokens, width):
    x = (torch.randn(tokens, 2 * width) * torch.tensor([30.0, 1.0]).repeat_interleave(width)).to(dtype)
    assert activation.takes(x)
    assert_close(activation.gated_activation(x, kind), reference.gated_activation(x, kind))
    assert_close(activation.activation(x, kind), reference.activation(x, kind))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "offset"), [(1, 16, 0.0), (3, 1040, 1.0), (0, 64, 0.0)])
def test_norms(dtype, tokens, width, offset):
    x, weight, residual = torch.randn(tokens, width).to(dtype), torch.randn(width).to(dtype), torch.randn(tokens, width)
    for value in (x, residual):
        assert norm.takes(value, weight, dtype)
        out = norm.rms_norm(value, weight, 1e-5, offset, dtype)
        assert_close(out, reference.rms_norm(value, weight, 1e-5, offset, dtype))
    expected_residual = residual.clone()
    assert norm.takes_sum(x, residual, weight)
    out = norm.add_rms_norm(x, residual, weight, 1e-5, offset)
    assert_close(out, reference.add_rms_norm(x, expected_residual, weight, 1e-5, offset))
    assert torch.equal(residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width", "offset", "biased"), [(1, 16, 0.0, True), (3, 1040, 1.0, False)])
def test_layer_norm(dtype, tokens, width, offset, biased):
    x, weight = 3 + torch.randn(tokens, width), torch.randn(width).to(dtype)
    bias = torch.randn(width).to(dtype) if biased else None
    assert layer_norm.takes(x, weight, bias, dtype)
    out = layer_norm.layer_norm(x, weight, bias, 1e-5, offset, dtype)
    assert_close(out, reference.layer_norm(x, weight, bias, 1e-5, offset, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("norm", "is_last", "interleaved", "rotary"),
    [
        ("head", True, False, 48),
        ("head", False, True, 32),
        ("projection", False, False, 64),
        ("centred", False, True, 64),
        ("biased", False, False, 32),
    ],
)
def test_rope_store_kv_of_other_families(dtype, norm, is_last, interleaved, rotary):
    tokens, heads, kv_heads, dim = 3, 4, 2, 64
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    caches = torch.randn(2, 5, kv_heads, 4, dim).to(dtype)
    expected_caches = caches.clone()
    positions, loc = torch.tensor([3, 9, 0]), torch.tensor([7, 0, 19])
    shapes = {
        "head": lambda _: (dim,),
        "projection": lambda count: (count * dim,),
        "centred": lambda count: (count, dim),
        "biased": lambda _: (2, dim),
    }
    norms = (torch.randn(*shapes[norm](count)).to(dtype) for count in (heads, kv_heads))
    params = RopeParams(heads, kv_heads, torch.randn(10, rotary), *norms, 1e-6, 0.0, norm, is_last, interleaved)
    assert rope.takes(qkv, *caches, params) == (norm == "head")
    q = ops.rope_store_kv(qkv, positions, loc, *caches, params)
    expected = reference.rope_store_kv(qkv, positions, loc, *expected_caches, params)
    # Norms of a kind of their own are rounded to the type of qkv, before the rotation.
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if norm != "head" and dtype is not torch.float32 else {}
    if tolerance:
        torch.testing.assert_close(q, expected, **tolerance)
        torch.testing.assert_close(caches, expected_caches, **tolerance)
    else:
        assert_close(q, expected)
        assert_close(caches, expected_caches)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary", "page_size", "is_normed"),
    [
        (4, 2, 64, 64, 16, False),
        (6, 1, 128, 128, 1, True),
        (3, 3, 80, 32, 16, False),
        (5, 1, 96, None, 4, True),
        (2, 1, 256, 256, 16, True),
        (9, 3, 80, 80, 16, False),
    ],
)
def test_rope_store_kv(dtype, heads, kv_heads, dim, rotary, page_size, is_normed):
    tokens = 5
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim).to(dtype)
    caches = torch.randn(2, 20, kv_heads, page_size, dim).to(dtype)
    expected_caches = caches.clone()
    positions, loc = torch.randint(0, 50, (tokens,)), torch.randperm(20 * page_size)[:tokens]
    table = None if rotary is None else torch.randn(50, rotary)
    norms = tuple(torch.randn(2, dim).to(dtype)) if is_normed else (None, None)
    scale = torch.randn(50) if dtype is torch.float32 or heads % 2 == 0 else None
    params = RopeParams(heads, kv_heads, table, *norms, 1e-6, 1.0, query_scale=scale)
    assert rope.takes(qkv, *caches, params)
    q = rope.rope_store_kv(qkv, positions, loc, *caches, params)
    expected = reference.rope_store_kv(qkv, positions, loc, *expected_caches, params)
    assert_close(q, expected)
    assert_close(caches, expected_caches)
    assert torch.equal(caches[1], expected_caches[1])


@pytest.mark.parametrize("kv", kv_forms.ROW_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_stores_rows_by_static_scales(dtype, kv):
    """Values have the bytes of torch's division and cast, those beyond the range of the type saturate."""
    tokens, heads, kv_heads, dim = 5, 2, 2, 64
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim) * torch.logspace(-4, 3, dim)).to(dtype)
    caches, expected = (torch.zeros(2, 2, kv_heads, 16, dim + 4, dtype=torch.uint8).view(kv) for _ in range(2))
    loc, positions = torch.tensor([3, 31, 0, 17, 18]), torch.arange(tokens)
    scales = kv_forms.StaticScales("int8" if kv is torch.int8 else "fp8", torch.tensor([[0.7, 0.11], [0.013, 0.9]]))
    params = RopeParams(heads, kv_heads, torch.randn(50, dim), kv_scales=scales)
    q = rope.rope_store_kv(qkv.flatten(1), positions, loc, *caches, params)
    assert_close(q, reference.rope_store_kv(qkv.flatten(1), positions, loc, *expected, params))
    assert torch.equal(caches[1].view(torch.uint8), expected[1].view(torch.uint8))
    found, meant = (kv_forms.keys(each)[loc // 16, :, loc % 16] for each in (caches[0], expected[0]))
    step = (
        scales.values[0][:, None]
        if kv is torch.int8
        else torch.maximum(meant.abs() / 8, scales.values[0][:, None] / 512)
    )
    assert bool(((found - meant).abs() <= 1.01 * step).all())
    assert float((found != meant).float().mean()) < 0.1


@pytest.mark.parametrize("kv", kv_forms.ROW_DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_stores_rows_of_8_bits(dtype, kv):
    """Each number is the nearest of its type; of E4M3 torch's own cast is the oracle, over its whole range."""
    tokens, heads, kv_heads, dim, page_size = 6, 4, 2, 80, 16
    qkv = (torch.randn(tokens, heads + 2 * kv_heads, dim) * torch.logspace(-6, 3, dim)).to(dtype)
    qkv[1] = 0
    caches, expected = (torch.zeros(2, 5, kv_heads, page_size, dim + 4, dtype=torch.uint8).view(kv) for _ in range(2))
    loc = torch.tensor([3, 79, 0, 17, -1, 18])
    params = RopeParams(heads, kv_heads, torch.randn(50, 64))
    positions = torch.arange(tokens)
    assert rope.takes(qkv.flatten(1), *caches, params)
    q = rope.rope_store_kv(qkv.flatten(1), positions, loc, *caches, params)
    some = loc >= 0
    wanted_q = reference.rope_store_kv(qkv.flatten(1)[some], positions[some], loc[some], *expected, params)
    assert_close(q[some], wanted_q)
    for cache, wanted in zip(caches, expected, strict=True):
        found, meant = kv_forms.keys(cache), kv_forms.keys(wanted)
        # Another last digit of the rotation may be another step of 8 bits; that of the largest number, another scale.
        largest = meant.abs().amax(-1, keepdim=True)
        assert bool(((found - meant).abs() <= largest / (127 if kv is torch.int8 else 14) * 1.5 + 1e-9).all())
        assert float((found != meant).float().mean()) < 0.1
    assert torch.equal(caches[1].view(torch.uint8), expected[1].view(torch.uint8))


def test_a_key_that_is_no_number_is_shown():
    qkv, caches = torch.randn(2, 3 * 64), torch.zeros(2, 3, 1, 4, 68, dtype=torch.int8)
    qkv[0, 70] = float("nan")
    params = RopeParams(1, 1, torch.randn(9, 64))
    rope.rope_store_kv(qkv, torch.tensor([3, 0]), torch.tensor([5, 2]), *caches, params)
    assert kv_forms.keys(caches[0])[1, 0, 1].isnan().all()
    assert not kv_forms.keys(caches[0])[0].isnan().any() and not kv_forms.keys(caches[1]).isnan().any()


def test_a_token_that_pads_a_batch_is_not_stored():
    qkv, caches = torch.randn(2, 3 * 64), torch.zeros(2, 3, 1, 4, 64)
    params = RopeParams(1, 1, torch.randn(9, 64))
    rope.rope_store_kv(qkv, torch.tensor([3, 0]), torch.tensor([5, -1]), *caches, params)
    assert caches[1].nonzero()[:, :3].unique(dim=0).tolist() == [[1, 0, 1]]
    assert caches[0].nonzero()[:, :3].unique(dim=0).tolist() == [[1, 0, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_pages_goes_in_list_order(dtype):
    cache = torch.randn(2, 3, 5, 2, 16, 80).to(dtype)
    expected = cache.clone()
    copies = ([0, 1, 4, 2], [1, 2, 1, 2], [3, 2, 16, 0])
    assert pages.takes(*cache)
    pages.copy_pages(*cache, *copies)
    reference.copy_pages(*expected, *copies)
    assert torch.equal(cache, expected)
