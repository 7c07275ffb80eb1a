"""Tokenizer face: what ``LLM.get_tokenizer`` returns, the engine's tokenizer with the method names of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..text.tokenizer import Tokenizer
from .conversations import read_conversations


class TokenizerFace:
    """Wraps a ``Tokenizer`` with the names of transformers. All other names are looked up in the ``Tokenizer``.

    Attributes:
        eos_token_id: the tokenizer's end token, or else the first token that ends an answer; None if there is none.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = next(iter(self.encode(self.eos_token or "", add_special_tokens=False)), None)
        if self.eos_token_id is None:
            self.eos_token_id = next(iter(tokenizer.eos_ids), None)
        self.all_special_ids = sorted(tokenizer.special_ids)

    def __getattr__(self, name: str) -> Any:
        """Return a special token's text, or an attribute of ``Tokenizer``."""
        if name.startswith("_"):
            raise AttributeError(name)
        if name.endswith("_token") and name in self._tokenizer.special_tokens:
            return self._tokenizer.special_tokens[name]
        return getattr(self._tokenizer, name)

    def __len__(self) -> int:
        return self._tokenizer.vocab_size

    def __call__(self, text: str | Sequence[str], *, add_special_tokens: bool = True) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask`` of one text or of several texts."""
        ids: Any = (
            self.encode(text, add_special_tokens=add_special_tokens)
            if isinstance(text, str)
            else [self.encode(each, add_special_tokens=add_special_tokens) for each in text]
        )
        mask = [1] * len(ids) if isinstance(text, str) else [[1] * len(each) for each in ids]
        return Encoding(input_ids=ids, attention_mask=mask)

    @property
    def eos_token(self) -> str | None:
        return self._tokenizer.special_tokens.get("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return self._tokenizer.encode(text, add_special_tokens).tolist()

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str]:
        """Return the vocabulary's string of one token id, or of each of several token ids."""
        pieces = self._tokenizer.pieces([ids] if isinstance(ids, int) else ids)
        return pieces[0] if isinstance(ids, int) else pieces

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> Any:
        """Render a conversation to text, or to token ids if ``tokenize`` is set.

        For several conversations, return a list.

        Raises:
            RequestError: there is no template, or the template refuses these messages.
        """
        conversations = read_conversations(conversation)
        found = [
            self._tokenizer.render_chat(
                messages,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=variables,
                template=chat_template,
            )
            for messages in conversations
        ]
        each: list[Any] = [self.encode(text, add_special_tokens=False) for text in found] if tokenize else list(found)
        return each[0] if isinstance(conversation[0], Mapping) else each


class Encoding(dict[str, Any]):
    """A dict of token ids whose entries are also attributes."""

    def __getattr__(self, name: str) -> Any:
        """Return the entry of this name."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None
