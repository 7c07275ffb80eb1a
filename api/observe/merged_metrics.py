"""Merged metrics: the metrics of several base models as one exposition. The series differ in ``model_name``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from ...engine.metric_tables import MODEL_INFOS
from .metrics import Metrics


class _MergedRegistry:
    """Collects the metric families of several registries. Series without a model's label belong to the whole server."""

    def __init__(self, server: Metrics, models: Sequence[Metrics]) -> None:
        self._server = server
        self._models = models

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for part, of_models in ((self._server, False), *((each, True) for each in self._models)):
            for found in part.registry.collect():
                samples = found.samples
                if found.name.endswith(MODEL_INFOS):
                    samples = [_of_model(each, part.model_name) for each in samples]
                samples = [each for each in samples if ("model_name" in each.labels) is of_models]
                if found.name not in families:
                    families[found.name] = Metric(found.name, found.documentation, found.type, found.unit)
                families[found.name].samples += samples
        yield from families.values()


def _of_model(sample: Sample, model_name: str) -> Sample:
    """Return a sample with the label ``model_name``. On a server with one model some samples lack it, as in vLLM."""
    return sample._replace(labels={**sample.labels, "model_name": model_name})


def exposition(server: Metrics, models: Sequence[Metrics], accept: str) -> tuple[bytes, str]:
    """Return the metrics of a server and its models in a format that the Accept header allows, and the content type."""
    if list(models) == [server]:
        return server.exposition(accept)
    encode, content_type = choose_encoder(accept)
    return encode(_MergedRegistry(server, models)), content_type
