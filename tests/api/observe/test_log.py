"""The log in a terminal and elsewhere."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rootgraft.api.observe.log import ACCESS, FIELDS, set_up_log

REQUEST = {"request_id": "r1", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0.5}
GENERATED = {
    **REQUEST,
    "model": "support",
    "adapter": "support@2",
    "prompt_tokens": 512,
    "cached_tokens": 488,
    "completion_tokens": 64,
    "first_token_seconds": 0.05,
    "tokens_per_second": 140.25,
    "finished": {"stop": 1, "length": 2},
}


class Screen(io.StringIO):
    """Standard error of a terminal."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@contextmanager
def log_on(monkeypatch: pytest.MonkeyPatch, screen: Screen, level: str, form: str, asked: bool) -> Iterator[None]:
    """Set up the log on a screen, without the handlers that pytest adds for each phase of a test."""
    root, access = logging.getLogger(), logging.getLogger(ACCESS)
    handlers, levels = root.handlers[:], (root.level, access.level)
    root.handlers[:] = []
    try:
        monkeypatch.setattr(sys, "stderr", screen)
        set_up_log(level, form, log_requests=asked)
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(levels[0])
        access.setLevel(levels[1])


def tell(fields: dict[str, object], level: int = logging.INFO) -> None:
    logging.getLogger(ACCESS).log(level, "{}", extra={FIELDS: fields})


@pytest.mark.parametrize(
    "is_terminal, form, asked, level, is_logged",
    [
        (True, "text", False, "info", False),
        (True, "text", True, "info", True),
        (True, "text", False, "debug", True),
        (True, "json", False, "info", True),
        (False, "text", False, "info", True),
        (False, "text", True, "warning", False),
    ],
)
def test_requests_are_left_out_of_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool, form: str, asked: bool, level: str, is_logged: bool
) -> None:
    with log_on(monkeypatch, screen := Screen(is_terminal), level, form, asked):
        tell(REQUEST)
        assert bool(screen.getvalue()) is is_logged
        tell(REQUEST | {"status": 500, "error": "internal_error"}, logging.WARNING)
    assert "internal_error" in screen.getvalue(), "an error of the server is always told"


def test_a_request_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with log_on(monkeypatch, screen := Screen(False), "info", "text", False):
        tell(GENERATED)
        tell(REQUEST | {"status": 404, "error": "model_not_found"})
    first, second = screen.getvalue().splitlines()
    assert first.endswith(
        "INFO rootgraft.access: POST /v1/completions 200 in 0.50 s, model support, adapter support@2, 512 prompt "
        "tokens (488 cached), 64 tokens, first after 0.05 s, 140.2 tokens/s, stop, 2 length, id r1"
    )
    assert second.endswith("POST /v1/completions 404 in 0.50 s, error model_not_found, id r1")
