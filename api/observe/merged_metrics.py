"""Metrics of several base models as one exposition: series of one family stand together, apart by ``model_name``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from .metrics import Metrics


class _MergedRegistry:
    """Collects the families of several registries. What has no label of a model is the first one's, for all."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for number, part in enumerate(self._parts):
            for found in part.collect():
                samples = [each for each in found.samples if not number or "model_name" in each.labels]
                if found.name not in families:
                    families[found.name] = Metric(found.name, found.documentation, found.type, found.unit)
                families[found.name].samples += samples
        yield from families.values()


def exposition(parts: Sequence[Metrics], accept: str) -> tuple[bytes, str]:
    """Return the metrics of all models in a format of the Accept header, and its content type."""
    if len(parts) == 1:
        return parts[0].exposition(accept)
    encode, content_type = choose_encoder(accept)
    return encode(_MergedRegistry([part.registry for part in parts])), content_type  # type: ignore[arg-type]
