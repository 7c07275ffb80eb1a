"""What the branch of a captured pass asks of CUDA, which is played by a list of what was asked."""

from __future__ import annotations

import threading

from support.kernels.fake_streams import FakeStream, fake_streams

from rootgraft.kernels.triton.graph_branch import branching, start_beside


def test_launches_beside_others_wait_for_those_before_and_are_waited_for() -> None:
    log: list[str] = []
    with fake_streams(log, FakeStream(log, "main")), branching(FakeStream(log, "side")):  # type: ignore[arg-type]
        wait = start_beside(lambda: log.append("shrink"))
        log.append("product")
        wait()
        log.append("expand")
    expected = ["side waits for main", "on side", "shrink", "on main again", "product", "main waits for side", "expand"]
    assert log == expected


def test_elsewhere_launches_are_in_turn() -> None:
    """After a capture, and on another thread during one, which may serve steps meanwhile."""
    log: list[str] = []
    with branching(FakeStream(log, "side")):  # type: ignore[arg-type]
        other = threading.Thread(target=lambda: start_beside(lambda: log.append("another thread's"))())
        other.start()
        other.join()
    start_beside(lambda: log.append("after it"))()
    assert log == ["another thread's", "after it"]
