"""Tokenizer: converts text to token ids and back. The only module that imports the ``tokenizers`` library."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import string
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import ConfigError, ModelError, RequestError, quoted, shortened
from ..messages import TokenTexts
from ..sandbox.program_pool import POOL, TOKENIZER_SECONDS, ProgramFailed, ProgramRefused
from .added_token_search import search_of
from .chat_template import ChatTemplates, Message
from .token_bounds import read_bounds
from .token_bytes import DecoderRules, read_rules
from .tokenizer_files import TokenizerFiles, read_folder, refusing_malformed
from .tokenizer_gguf import read_gguf

MOST_IDS = 1 << 22
"""Limit on token ids: every id is less than this number."""
_JOB = "engine.text.tokenizer:encode_job"
_JOB_BYTES = 1 << 30
_MOST_BUILT = 4  # Number of tokenizers that a worker process keeps.
_UNKNOWN = b"?"  # Answer of a worker process that does not have the tokenizer yet.
_STEPS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_PROBE = f"{string.printable} aaaa"


class Tokenizer:
    """A model's tokenizer and chat templates. Immutable: threads may share it.

    If a text contains the name of a special token, the name is encoded as that token. Chat templates need this, and
    transformers does the same. So untrusted text has to be filtered first.

    The steps of an adapter's tokenizer (normalizer, pre-tokenizer and so on) are a program by its publisher, who is not
    trusted. Unless the steps equal those of the base model, texts are encoded in a process that can be killed.

    Attributes:
        steps: digest of the steps with which a text is encoded, without the vocabulary and merges.
        vocab_size: number of ids that have a token. The model may have more rows of logits.
        bos_id: the token that begins a text, None if the model has none.
        eos_ids: the tokens that end an answer, from the tokenizer's files.
        special_ids: ids of the special tokens, whose text ``skip_special_tokens`` leaves out.
        special_tokens: texts of the special tokens, by their names in tokenizer_config.json (``bos_token``, ...).
        chat_templates: sources of the chat templates by name.
    """

    def __init__(self, files: TokenizerFiles, trusted_steps: str | None = None) -> None:
        """Build the tokenizer from ``files``; see ``load``.

        Args:
            trusted_steps: digest of the tokenizer steps that may run in this process; None allows any steps.

        Raises:
            ModelError: the tokenizer is not supported exactly, or its steps fail or take too long.
        """
        self.steps = _digest_of_steps(files.definition)
        self._remote = None if trusted_steps in (None, self.steps) else _RemoteEncoder(files.definition)
        self._backend = _build(files.definition | dict.fromkeys(_STEPS) if self._remote else files.definition)
        rules = read_rules(files.definition.get("decoder"))
        self._rules = rules
        self._bytes, self.special_ids = _vocabulary(self._backend, rules)
        self._marked = _marked_first_tokens(self._backend, rules)
        self._search = search_of(files.definition["added_tokens"])
        self._bounds = read_bounds(files.definition, self._bytes.values())
        self.vocab_size = max(self._bytes, default=-1) + 1
        if self.vocab_size > MOST_IDS:
            raise ModelError(f"The tokenizer has the token id {self.vocab_size - 1:,}; ids are below {MOST_IDS:,}.")
        self.bos_id = self._id_of(files.special.get("bos_token"))
        ends = (self._id_of(files.special.get("eos_token")), *files.eos_ids)
        self.eos_ids = tuple(sorted({token for token in ends if token is not None}))
        self.special_tokens = dict(files.special)
        self.chat_templates = dict(files.chat_templates)
        self._templates = ChatTemplates(files.chat_templates, files.special)

    @classmethod
    def load(cls, path: Path, *, tokenizer_path: Path | None = None, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a model.

        Args:
            path: the model: a folder in Hugging Face format or a GGUF file.
            tokenizer_path: another folder or GGUF file that holds the tokenizer.
            chat_template: a file with a Jinja template, or the template itself, which replaces the model's own.

        Raises:
            ModelError: there is no tokenizer, or it is not supported exactly.
            ConfigError: the other tokenizer or the chat template cannot be read.
        """
        if tokenizer_path is None:
            files = _read_files(path)
        else:
            try:
                files = _read_files(tokenizer_path)
            except ModelError as error:
                raise ConfigError(f"--tokenizer: {tokenizer_path} cannot be used: {error}") from error
        if chat_template is not None:
            files = dataclasses.replace(files, chat_templates={"default": _read_template(chat_template)})
        return cls(files)

    @property
    def waits(self) -> bool:
        """Whether ``encode`` waits for another process, because the tokenizer is an adapter's own."""
        return self._remote is not None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._templates)

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if the model has none."""
        return self._templates.source

    def template_mentions(self, text: str) -> bool:
        """Return whether the source of a chat template contains ``text``."""
        return self._templates.mention(text)

    @property
    def named_roles(self) -> frozenset[str]:
        """The roles with which the chat templates compare a message's role."""
        return self._templates.named_roles

    def renders_role(self, role: str) -> bool:
        """Return whether the chat template renders messages of this role, under the role's name or in another form."""
        return self._templates.renders_role(role)

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        """Return the token ids of ``text``.

        Releases the interpreter's lock (GIL). May wait for another process (``waits``).

        Args:
            add_special_tokens: whether to add the model's special tokens around the text (often a bos token). False for
                texts of ``render_chat``, because the template has written these tokens.

        Raises:
            RequestError: the text has lone surrogates, which are not characters and have no UTF-8 form; or an adapter's
                tokenizer takes too long.
        """
        check_unicode(text)
        if self._remote is not None:
            return self._remote.encode(text, add_special_tokens)
        # encode() holds the GIL while it runs. The batch method releases the GIL and computes no offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return array("i", encoding.ids)

    def encode_pair(self, first: str, second: str) -> array[int]:
        """Return the token ids of two texts in one prompt, joined as the tokenizer's file specifies.

        Raises:
            RequestError: a text has lone surrogates, or the tokenizer is an adapter's own.
        """
        check_unicode(first)
        check_unicode(second)
        if self._remote is not None:
            raise RequestError("Pairs of texts are not encoded by an adapter's own tokenizer.", param="model")
        [encoding] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return array("i", encoding.ids)

    def cuts(self, text: str) -> Iterator[int]:
        """Yield, in ascending order, positions at which the text may be cut without changing its tokens.

        The positions are the starts of special tokens, at which the library splits a text first. The tokens after such
        a position do not depend on the text before it, and the library does not treat the position as the beginning of
        a text. The positions are valid only for ``encode`` without ``add_special_tokens``.
        """
        if self._search is not None:
            yield from self._search.starts(text)

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound on the number of tokens of a text, much faster than ``encode``; 0 if none is known."""
        return 0 if self._bounds is None else self._bounds.fewest_tokens(text)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Return the text of a whole sequence of tokens. Ill-formed bytes become U+FFFD; unknown ids have no text.

        A space that encoding puts before every text is dropped.
        """
        ids = [token for token in ids if not (skip_special_tokens and token in self.special_ids)]
        data = self.join_bytes(ids, False)
        if self._marked and ids:
            data = self._marked.get(ids[0], self._bytes.get(ids[0], b"")) + self.join_bytes(ids[1:], False)
        text = data.decode(errors="replace")
        spaces = len(text) - len(text.lstrip(" "))
        return text[min(spaces, self._rules.strip) :]

    def token_bytes(self, token: int) -> bytes:
        """Return the exact bytes of a token: its name for a special token, and no bytes for an unknown id."""
        return self._bytes.get(token, b"")

    def pieces(self, tokens: Iterable[int]) -> list[str]:
        """Return the tokens' strings in the vocabulary (``convert_ids_to_tokens``), with "" for an unknown id."""
        return [self._backend.id_to_token(token) or "" for token in tokens]

    def texts(self) -> TokenTexts:
        """Return the bytes of all tokens, for the engine's grammars. An id without a token has no bytes."""
        data = [self._bytes.get(token, b"") for token in range(self.vocab_size)]
        return TokenTexts(array("i", map(len, data)), b"".join(data), tuple(sorted(self.special_ids)))

    def join_bytes(self, tokens: Iterable[int], skip_special_tokens: bool) -> bytes:
        """Return the joined bytes of a whole sequence of tokens."""
        known = self._bytes.get
        if skip_special_tokens:
            special = self.special_ids
            return b"".join([known(token, b"") for token in tokens if token not in special])
        return b"".join([known(token, b"") for token in tokens])

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """Render a conversation to a text, which must be encoded without adding special tokens.

        See ``ChatTemplates.render``.

        Args:
            template: a Jinja template that replaces the model's. Raises RequestError if the template is not valid.
        """
        templates = self._templates if template is None else self._own_templates(template)
        return templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=kwargs,
        )

    def _own_templates(self, source: str) -> ChatTemplates:
        try:
            return ChatTemplates({"default": source}, self.special_tokens)
        except ModelError as error:
            raise RequestError(str(error), param="chat_template") from None

    def _id_of(self, text: str | None) -> int | None:
        return None if text is None else self._backend.token_to_id(text)


class _RemoteEncoder:
    """Encodes texts in worker processes. Each process receives the tokenizer's definition with the first text.

    Raises:
        ModelError: the tokenizer cannot be built, or it takes too long for a text of all printable ASCII characters.
    """

    def __init__(self, definition: Mapping[str, Any]) -> None:
        self._definition = json.dumps(definition).encode()
        self._key = hashlib.sha256(self._definition).hexdigest()
        try:
            self._run(_PROBE, False)
        except ProgramFailed as error:
            raise ModelError(str(error)) from None
        except ProgramRefused as error:
            raise ModelError(f"The tokenizer {error} with {len(_PROBE)} characters.") from None

    def encode(self, text: str, add_special_tokens: bool) -> array[int]:
        """Return the token ids of a text without lone surrogates, as ``Tokenizer.encode`` does. Raises RequestError."""
        try:
            return self._run(text, add_special_tokens)
        except ProgramRefused as error:
            raise RequestError(f"The adapter's tokenizer {error} with this text: send another one.") from None

    def _run(self, text: str, add_special_tokens: bool) -> array[int]:
        data = text.encode()
        found = _UNKNOWN
        for definition in (b"", self._definition):
            if found == _UNKNOWN:
                arguments = [self._key, add_special_tokens, len(definition)]
                found = POOL.run(_JOB, TOKENIZER_SECONDS, arguments, definition + data, memory=_JOB_BYTES)
        return array("i", found)


_built: dict[str, tokenizers.Tokenizer] = {}


def encode_job(arguments: list[Any], data: bytes) -> bytes:
    """Encode a text in a worker process.

    ``data`` is the definition, or nothing if the process has it, and then the text.
    """
    key, add_special_tokens, size = arguments
    backend = _built.pop(key, None)
    if backend is None:
        if not size:
            return _UNKNOWN
        backend = _build(json.loads(data[:size]))
        if len(_built) >= _MOST_BUILT:
            del _built[next(iter(_built))]
    _built[key] = backend
    [encoding] = backend.encode_batch_fast([data[size:].decode()], add_special_tokens=add_special_tokens)
    return array("i", encoding.ids).tobytes()


def _digest_of_steps(definition: Mapping[str, Any]) -> str:
    """Return the SHA-256 of the steps of a tokenizer definition, without vocabulary and merges."""
    model = {name: value for name, value in definition["model"].items() if name not in ("vocab", "merges")}
    steps = [definition.get(name) for name in _STEPS]
    return hashlib.sha256(json.dumps([model, steps], sort_keys=True).encode()).hexdigest()


def _build(definition: dict[str, Any]) -> tokenizers.Tokenizer:
    """Return the library's tokenizer, without the truncation and padding that some files set."""
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(definition | {"truncation": None, "padding": None}))
    except Exception as error:  # The library raises no more specific exception.
        raise ModelError(f"The tokenizer's definition is not valid: {shortened(str(error), 200)}.") from error
    for token in definition["added_tokens"]:
        if backend.token_to_id(token["content"]) != token["id"]:
            raise ModelError(
                f"The token {quoted(token['content'])} cannot have the id {token['id']} in this vocabulary."
            )
    return backend


def check_unicode(text: str) -> None:
    """Raise RequestError for lone surrogates, which are not characters and have no UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The text has a lone surrogate, U+{ord(text[error.start]):04X}, at position {error.start}: "
            "send valid Unicode."
        ) from None


def _vocabulary(backend: tokenizers.Tokenizer, rules: DecoderRules) -> tuple[dict[int, bytes], frozenset[int]]:
    """Return the bytes of each id, and the ids of special tokens. The bytes of an added token are its plain text."""
    added = backend.get_added_tokens_decoder()
    pieces = backend.get_vocab(with_added_tokens=True).items()
    table = {token: rules.bytes_of(piece) for piece, token in pieces if token not in added}
    table |= {token: entry.content.encode() for token, entry in added.items()}
    return table, frozenset(token for token, entry in added.items() if entry.special)


def _marked_first_tokens(backend: tokenizers.Tokenizer, rules: DecoderRules) -> dict[int, bytes]:
    """Return the bytes of tokens that have other bytes at the beginning of a text (``DecoderRules.strip_mark``)."""
    if (mark := rules.strip_mark) is None:
        return {}
    pieces = backend.get_vocab(with_added_tokens=True).items()
    return {token: rules.bytes_of(piece.replace(mark, "")) for piece, token in pieces if mark in piece}


def _read_files(source: Path) -> TokenizerFiles:
    """Read the files of a tokenizer from a folder or a GGUF file. Raises ModelError."""
    with refusing_malformed():
        return read_folder(source) if source.is_dir() else read_gguf(source)


def _read_template(chat_template: str) -> str:
    """Return the text itself if it contains a template's braces; else the content of the file of that name."""
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"--chat-template: {chat_template} cannot be read: {reason}.") from error
