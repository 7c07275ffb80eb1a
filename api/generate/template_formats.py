"""Template formats: how a tokenizer's chat template writes tool calls and marks thoughts, each found out once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from ...engine.errors import RequestError
from ...engine.text.chat_template import TemplateStopped, rendered
from ..config import ServerConfig
from ..structured.reasoning_formats import ReasoningFormat, reasoning_format_of
from ..structured.tool_dialects import Dialect, dialect_of

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer


class TemplateFormats:
    """Formats of the model's tokenizer and of those of adapters.

    Args:
        options: may name parsers, and variables of the template.
    """

    def __init__(self, options: ServerConfig) -> None:
        self._options = options
        self._dialects: WeakKeyDictionary[Tokenizer, Dialect] = WeakKeyDictionary()
        self._reasoning: WeakKeyDictionary[Tokenizer, ReasoningFormat | None] = WeakKeyDictionary()
        self._stopped: WeakKeyDictionary[Tokenizer, str] = WeakKeyDictionary()

    async def prepare(self, tokenizer: Tokenizer) -> None:
        """Find out what the other methods return, on another thread, and in another process if the template takes long.

        Raises:
            RequestError: the template was ended at a limit, now or before.
        """
        if tokenizer in self._dialects:
            return
        if (reason := self._stopped.get(tokenizer)) is None:
            try:
                # Some dozens of renders, each of which may take milliseconds.
                await rendered(lambda: self.dialect(tokenizer), at_once=False)
                return
            except TemplateStopped as error:
                reason = self._stopped[tokenizer] = str(error)
        raise RequestError(reason, param="model")

    def dialect(self, tokenizer: Tokenizer) -> Dialect:
        """Return the tool call format, read from the chat template at the first call."""
        if tokenizer not in self._dialects:
            found = dialect_of(tokenizer, self._options.tool_call_parser)
            self._dialects[tokenizer] = replace(found, defaults=self._options.template_kwargs)
        return self._dialects[tokenizer]

    def reasoning_format(self, tokenizer: Tokenizer) -> ReasoningFormat | None:
        """Return how thoughts are marked, read from the chat template at the first call."""
        if tokenizer not in self._reasoning:
            self._reasoning[tokenizer] = reasoning_format_of(tokenizer, self._options.reasoning_parser)
        return self._reasoning[tokenizer]
