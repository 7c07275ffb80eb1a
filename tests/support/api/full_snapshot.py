"""The largest snapshot that the engine sends to the live page."""

from __future__ import annotations

from rootgraft.engine.core import debug_snapshot
from rootgraft.engine.snapshot import EngineSnapshot, NamespaceView, NodeView, SequenceView, SlotView
from rootgraft.engine.types import AdapterInfo


def full_snapshot() -> EngineSnapshot:
    """As large as one can be, but for the number of slots."""
    large = 10**9
    return EngineSnapshot(
        16,
        {f"some_counter_{number}": 1e9 / 7 for number in range(60)},
        tuple(NamespaceView("a" * 60 + str(i), "t" * 64, True) for i in range(debug_snapshot.MOST_NODES)),
        tuple(NodeView(large + i, i // 3 - 1, i, *[large] * 4, True) for i in range(debug_snapshot.MOST_NODES)),
        large,
        tuple(
            SequenceView(large + i, i, *[large] * 8, "a" * 64, "t" * 64, True, 1e9 / 7, large)
            for i in range(debug_snapshot.MOST_SEQUENCES)
        ),
        tuple(
            AdapterInfo("a" * 64, "p" * 64, "draining", "device", large) for _ in range(debug_snapshot.MOST_ADAPTERS)
        ),
        tuple(SlotView("a" * 64, True, large, True) for _ in range(16)),
    )
