"""Adapter bodies: request bodies of vLLM's routes that load and unload LoRA adapters, and of ``/v1/admin/models``."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from .adapter_parts import MAX_MODEL_NAME
from .base import StrictModel

MAX_PATH = 4096
MAX_SOURCE = 2048
MAX_VERSION = 71  # Length of "sha256:" and 64 digits.


class LoadAdapterRequest(StrictModel):
    """Body of a request that loads an adapter.

    ``lora_path`` is relative to ``--lora-dir``, and ``base_model_name`` selects the base model.
    """

    lora_name: str = Field(min_length=1, max_length=MAX_MODEL_NAME)
    lora_path: str = Field(min_length=1, max_length=MAX_PATH)
    load_inplace: bool = False
    base_model_name: str | None = Field(default=None, max_length=MAX_MODEL_NAME)


class UnloadAdapterRequest(StrictModel):
    """Body of a request that unloads an adapter."""

    ignored: ClassVar[frozenset[str]] = frozenset({"lora_int_id"})

    lora_name: str = Field(min_length=1, max_length=MAX_MODEL_NAME)


class AddVersionRequest(StrictModel):
    """Add a version of a model.

    ``digest`` is the SHA-256 that the version's content must have; ``model`` is its base model.
    """

    name: str = Field(min_length=1, max_length=256)
    source: str = Field(min_length=1, max_length=MAX_SOURCE)
    digest: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    model: str | None = Field(default=None, max_length=MAX_MODEL_NAME)


class PromoteRequest(StrictModel):
    """Promote a version, so that it gets all new requests.

    The request names the version by its digest or by the digest's first digits.
    """

    version: str = Field(min_length=1, max_length=MAX_VERSION)


class CanaryRequest(StrictModel):
    """Send a percentage of new requests to a version."""

    version: str = Field(min_length=1, max_length=MAX_VERSION)
    weight: int = Field(ge=1, le=99)


class RollbackRequest(StrictModel):
    """Undo the last change of the versions' shares of requests."""


class RemoveRequest(StrictModel):
    """Remove a version. Without ``version``, remove the name with all its versions."""

    version: str | None = Field(default=None, min_length=1, max_length=MAX_VERSION)
