"""Offline model: finds the options, files and tokenizer of a model from the keyword arguments of ``LLM``."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from ..checkpoint.config_overrides import resolve_served_model
from ..config import EngineConfig
from ..peer_options import engine_keywords
from ..text.tokenizer import Tokenizer

logger = logging.getLogger("rootgraft.llm")


def read_config(model: str | None, keywords: dict[str, Any]) -> EngineConfig:
    """Convert the keyword arguments of ``LLM``, some of which are vLLM's, to the engine's options.

    Raises ConfigError.
    """
    options, notes = engine_keywords({"model": model} | keywords)
    for note in notes:
        logger.info("%s", note)
    return EngineConfig(**options)


@dataclass(frozen=True, slots=True)
class OfflineModel:
    """A model whose files were found, but whose weights are not loaded yet.

    Attributes:
        config: options of the engine.
        path: the model's folder or file.
        name: the name that was given, or the name of the default model.
        tokenizer: the model's tokenizer, or the tokenizer that the options name.
    """

    config: EngineConfig
    path: Path
    name: str
    tokenizer: Tokenizer

    @classmethod
    def find(cls, model: str | None, options: dict[str, Any]) -> Self:
        """Find the model that the keyword arguments of ``LLM`` name.

        Raises:
            ModelError: the model does not exist, or has no tokenizer.
            ConfigError: options do not exist, are out of bounds or contradict each other.
        """
        config = read_config(model, options)
        files = resolve_served_model(config)
        tokenizer = Tokenizer.load(
            files.path,
            tokenizer_path=Path(config.tokenizer) if config.tokenizer is not None else None,
            chat_template=config.chat_template,
        )
        return cls(config, files.path, config.model or files.name, tokenizer)
