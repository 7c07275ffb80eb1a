"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.inputs import PromptType, TextPrompt, TokensPrompt

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]
