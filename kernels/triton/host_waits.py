"""Which op of a pass makes the host wait for a GPU: such a pass cannot be captured in a CUDA graph.

The host waits where it reads a value, where the shape of a result depends on values, and where memory that is not
pinned is copied. A capture would fail there, at the start of the server. So a pass is run once with each op looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING: Final = frozenset(
    (
        *("item", "_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "bincount"),
        *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
    )
)
_INDEXED: Final = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
_COPIES: Final = frozenset(("to", "_to_copy", "copy_", "copy"))
_FLAGS: Final = (torch.bool, torch.uint8)
_MADE: Final = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class HostWaitError(RuntimeError):
    """An op for which the host waits; the text is its name."""


class _WithoutWaits(TorchDispatchMode):
    """Raises HostWaitError before an op on a GPU for which the host would wait."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, target = list(_tensors((*args, *(kwargs or {}).values()))), _target(args, kwargs)
        if target not in (None, "cpu") or any(not each.is_cpu for each in given):
            _check(func, args, kwargs or {}, given, target)
        return func(*args, **(kwargs or {}))


class _WithoutValues(TorchFunctionMode):
    """Raises HostWaitError before values of the host become a tensor on a GPU, which no op shows."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        own = next((each.device.type for each in args if isinstance(each, Tensor)), None)
        if func in _MADE and (_target(args, kwargs) or own) not in (None, "cpu"):
            raise HostWaitError(func.__name__)
        return func(*args, **(kwargs or {}))


def host_wait(forward: Callable[[], object]) -> str | None:
    """Run a pass, up to the first op for which the host would wait. Returns the op's name; None if there is none."""
    try:
        with _WithoutValues(), _WithoutWaits():
            forward()
    except HostWaitError as error:
        return str(error)
    return None


def _check(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], given: list[Tensor], target: str | None
) -> None:
    """Raise HostWaitError if the host waits for an op with the tensors ``given``, to the type ``target`` of device."""
    name = func._schema.name.rpartition(":")[2]
    by_flags = name in _INDEXED and any(each.dtype in _FLAGS for each in _tensors(args[1:2]))
    is_counted = name == "repeat_interleave" and "Tensor" in func._overloadname and kwargs.get("output_size") is None
    # A number on the host is an argument of the kernel, unless it is copied.
    is_copied = name in _COPIES and (any(each.is_cpu for each in given) or target == "cpu")
    if name in _WAITING or by_flags or is_counted or is_copied or any(each.is_cpu and each.dim() for each in given):
        raise HostWaitError(name)


def _target(args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> str | None:
    """Return the type of the device that a call names; None if it names none."""
    named = (kwargs or {}).get("device")
    found = next((each for each in (*args, named) if isinstance(each, torch.device)), named)
    return None if found is None else torch.device(found).type


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
