"""The one error of this package."""

from __future__ import annotations

_MOST_CHARACTERS = 600


class AdapterError(Exception):
    """An adapter that is not computed exactly, is malformed, does not fit the base model, or cannot be had now.

    The text names what is wrong and what would be right, and holds no path: a user may read it.

    Args:
        message: the text.
        option: the key of ``adapter_config.json`` that is refused, the tensor, or the field of the request.
    """

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(_safe(message))
        self.option = None if option is None else _safe(option)


def _safe(text: str) -> str:
    """Names from a stranger's file may be long, or be no text that can be encoded."""
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."
    return short.encode("utf-8", "backslashreplace").decode()
