"""Events of ``/v1/stream`` from the chunks of a chat."""

from __future__ import annotations

from rootgraft.api.exact_json import dumps_exact, loads_exact
from rootgraft.api.sockets.stream_answer import StreamAnswer


def test_values_of_fields_are_exact() -> None:
    """An enum may have integers of any length, and an event tells the probability of the one that was chosen."""
    fields = [{"path": "/n", "kind": "value", "value": 12345678901234567890123, "probability": 0.5}]
    choice = {"index": 0, "delta": {"content": "x"}, "field_probabilities": fields}
    (event,) = StreamAnswer("a").take(dumps_exact({"id": "c", "choices": [choice]}))
    assert loads_exact(event)["field_probabilities"] == fields
