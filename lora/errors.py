"""Errors of adapters: ``AdapterError`` and ``AdapterLimit``."""

from __future__ import annotations

_MOST_CHARACTERS = 600


class AdapterError(Exception):
    """An adapter is malformed, unsupported, does not fit the base model, or is not available now.

    The text is for users: it names the fault and the remedy, and contains no path.

    Args:
        message: the text.
        option: the key of ``adapter_config.json`` that is refused, the tensor, or the field of the request.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(_safe(message))
        self.option = None if option is None else _safe(option)


class AdapterLimit(AdapterError):
    """There is no room for another adapter now. It may be loaded when other adapters are gone."""


def _safe(text: str) -> str:
    """Shorten and escape a text, because names from an untrusted file may be long or not encodable."""
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
    return short.encode("utf-8", "backslashreplace").decode()
