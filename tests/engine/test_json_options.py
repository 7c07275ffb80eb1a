"""``--target-ttft-ms``: a number or JSON by priority class, each from 1 to 60000 milliseconds, 0 for none."""

from __future__ import annotations

import pytest

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.types import Priority


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("0", {}),
        ("1", dict.fromkeys(Priority, 0.001)),
        ("60000", dict.fromkeys(Priority, 60.0)),
        ('{"realtime": 500, "interactive": 2000}', {Priority.REALTIME: 0.5, Priority.INTERACTIVE: 2.0}),
        ('{"batch": 0}', {}),
    ],
)
def test_a_class_that_is_not_named_has_no_target(given: str, wanted: dict[Priority, float]) -> None:
    assert EngineConfig(target_ttft_ms=given).target_ttft.seconds == wanted
    assert EngineConfig().target_ttft.seconds == {}


@pytest.mark.parametrize("given", ["0.5", "60001", "-1", "soon", "true", '{"batch": 60001}', '{"bulk": 5}', "[1]"])
def test_other_targets_are_refused_by_name(given: str) -> None:
    with pytest.raises(ConfigError, match="--target-ttft-ms"):
        EngineConfig(target_ttft_ms=given)
