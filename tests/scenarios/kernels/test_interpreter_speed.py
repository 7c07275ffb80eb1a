"""What makes Triton's interpreter faster changes nothing that it computes with."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import triton.language as tl
from support.kernels import interpreter_speed
from triton.language import core
from triton.runtime import interpreter

ELEMENTS = (tl.int1, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32, tl.pointer_type(tl.float32))
SHAPES = ([8], [1, 16], tl.tuple([4, 1, 2]), [tl.constexpr(16), 1])


@pytest.fixture(scope="module", autouse=True)
def hastened() -> None:
    interpreter_speed.hasten()


def comparable(value: Any) -> Any:
    """What tells two objects of Triton apart, whose own comparison is by name, or none."""
    if isinstance(value, (core.base_value, core.base_type)):
        return type(value), {name: comparable(each) for name, each in vars(value).items()}
    return [comparable(each) for each in value] if isinstance(value, (list, tuple)) else (type(value), value)


def made(kind: type, *arguments: Any, original: bool) -> Any:
    maker: Any = kind.__init__
    self = kind.__new__(kind)
    (maker.__wrapped__ if original else maker)(self, *arguments)
    return self


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_types_and_tensors_are_those_of_triton(element: Any) -> None:
    """The first of a shape and the second, which is kept."""
    numpy_type: Any = interpreter._get_np_dtype
    for shape, _ in itertools.product(SHAPES, range(2)):
        expected = made(core.block_type, element, shape, original=True)
        block = made(core.block_type, element, shape, original=False)
        assert comparable(block) == comparable(expected) and block.element_ty is element
        for of in (element, block):
            assert numpy_type(of) == numpy_type.__wrapped__(of)
            ours, theirs = (made(core.tensor, None, of, original=original) for original in (False, True))
            assert comparable(ours) == comparable(theirs)


@pytest.mark.parametrize(
    ("shape", "error"), [([], TypeError), ([8.0], TypeError), ([3], ValueError), ((8,), AssertionError)]
)
def test_what_is_no_block_is_refused(shape: Any, error: type[Exception]) -> None:
    core.block_type(tl.int32, [8])
    for _ in range(2):
        with pytest.raises(error):
            core.block_type(tl.int32, shape)


@pytest.mark.parametrize("value", [3, 2.5, True, None, "x", tl.constexpr(4), [tl.constexpr(4), 1], (tl.constexpr(4),)])
def test_constants_are_unwrapped_as_by_triton(value: Any) -> None:
    unwrapped: Any = core._unwrap_if_constexpr
    assert comparable(unwrapped(value)) == comparable(unwrapped.__wrapped__(value))
