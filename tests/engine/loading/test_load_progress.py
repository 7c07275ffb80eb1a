"""The bar of a model's load: shown in a terminal alone, and full when all layers have been read."""

from __future__ import annotations

import io
import sys
import threading

import pytest

from rootgraft.engine.loading.load_progress import LoadProgress

SIZES = {
    "model.embed_tokens.weight": 5_000,
    "model.layers.0.mlp.up_proj.weight": 20_000,
    "model.layers.1.mlp.up_proj.weight": 20_000,
    "model.layers.1.input_layernorm.weight": 1_000,
    "lm_head.weight": 4_000,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shows"), [(Terminal(), True), (io.StringIO(), False)])
def test_bytes_of_layers_are_counted(stream: io.StringIO, shows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    with LoadProgress(SIZES) as progress:
        for layer in (None, 0, 1):
            progress.read(layer)
    text = stream.getvalue()
    assert ("Loading weights: 100%" in text) is shows
    assert ("50.0k/50.0k" in text) is shows
    assert shows or not text


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()], ids=["terminal", "pipe"])
def test_no_thread_is_started(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked from one that has loaded a model."""
    monkeypatch.setattr(sys, "stderr", stream)
    before = set(threading.enumerate())
    with LoadProgress(SIZES) as progress:
        progress.read(0)
        assert before.issuperset(threading.enumerate())  # those of earlier tests may end meanwhile


def test_a_load_that_fails_leaves_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(ValueError, match="damaged"), LoadProgress(SIZES) as progress:
        progress.read(None)
        raise ValueError("damaged")
    assert sys.stderr.getvalue().endswith("\n")
