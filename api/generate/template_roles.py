"""Roles of messages: the usual ones, and those that the model's chat template renders."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...engine.errors import RequestError

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer

_USUAL = ("system", "developer", "user", "assistant", "tool")


def with_known_roles(messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """Return the messages with roles of the chat template.

    ``developer`` is OpenAI's newer name of ``system``: it becomes that where the template does not treat it by name.

    Raises:
        RequestError: the template does not render a role; names those that it does.
    """
    roles = {message["role"] for message in messages}
    for role in sorted(roles.difference(_USUAL)):
        if not tokenizer.renders_role(role):
            _refuse(role, messages, tokenizer)
    if "developer" not in roles:
        return list(messages)
    if "developer" in tokenizer.named_roles and tokenizer.renders_role("developer"):
        return list(messages)
    return [{**message, "role": "system"} if message["role"] == "developer" else message for message in messages]


def _refuse(role: str, messages: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> None:
    number = next(number for number, message in enumerate(messages) if message["role"] == role)
    named = [name for name in sorted(tokenizer.named_roles - set(_USUAL)) if tokenizer.renders_role(name)]
    known = ", ".join(f"'{name}'" for name in (*_USUAL, *named))
    param = f"messages[{number}].role"
    raise RequestError(
        f"'{param}' must be one of {known}: the model's chat template does not render '{role}'.", param=param
    )
