"""Which replies exceptions become."""

from __future__ import annotations

import errno

import orjson
import pytest

from rootgraft.api.errors import error_code, reply_to


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (MemoryError(), 503),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), 503),
        (RuntimeError("can't start new thread"), 503),
        (orjson.JSONDecodeError("Not enough memory to allocate buffer for parsing", "", 0), 503),
        (orjson.JSONDecodeError("unexpected end of data", "", 0), 500),
        (OSError(errno.EIO, "Input/output error"), 500),
        (RuntimeError("a bug"), 500),
    ],
)
def test_a_machine_without_memory_is_not_the_clients_fault(error: Exception, status: int) -> None:
    reply = reply_to(error)
    assert reply.status == status
    assert (error_code(error) == "server_overloaded") == (status == 503)
    assert ("try again" in reply.message) == ("retry-after" in reply.headers) == (status == 503)
