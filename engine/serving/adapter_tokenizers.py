"""Tokenizers of adapters: loads the tokenizer and the chat template that an adapter's folder may contain.

TRL and PEFT save the tokenizer with the adapter, including the tokens that were added in training. The prompts of
requests that name such an adapter are rendered and encoded with the adapter's tokenizer, and their answers are
detokenized with it. If several adapters have equal tokenizer files, the files are loaded once.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock

from ...lora.errors import AdapterError
from ...lora.safe_paths import find_folder
from ..adapter_sources.cached_adapters import adapter_cache_folder
from ..config import EngineConfig
from ..errors import ModelError, RequestError
from ..messages import TokenTexts
from ..sandbox.program_pool import POOL
from ..text.adapter_vocabulary import check_lengths, digest_tokenizer_files, tokenizer_identity, vocabulary_fault
from ..text.tokenizer import Tokenizer
from ..text.tokenizer_files import read_folder, refusing_malformed
from ..types import AdapterInfo

MOST_TOKENIZERS = 16
"""Number of adapters' tokenizers kept in memory.

A tokenizer that a request uses stays in memory even if it is dropped here.
"""


@dataclass(frozen=True, slots=True)
class ServedTokenizer:
    """A tokenizer, with the vocabulary of the weights with which it is used.

    Attributes:
        tokenizer: the model's tokenizer, or an adapter's own.
        vocab_size: exclusive upper bound of the token ids.
        key: name of this vocabulary and its end tokens in messages to the engine; "" for the model's own.
        identity: digest by which the engine checks that a sequence was encoded with its adapter's tokenizer: see
            ``tokenizer_identity``.
    """

    tokenizer: Tokenizer
    vocab_size: int
    key: str = ""
    identity: str = ""

    @property
    def ends(self) -> tuple[int, ...]:
        """The end-of-sequence tokens of an adapter's own tokenizer; the model's own end tokens also end an answer."""
        return tuple(token for token in self.tokenizer.eos_ids if token < self.vocab_size) if self.key else ()

    def texts(self) -> TokenTexts:
        """Return the bytes of all tokens, for the engine's grammars."""
        texts = self.tokenizer.texts()
        if not self.key:
            return texts
        lengths = texts.lengths[: self.vocab_size]
        special = tuple(token for token in texts.special if token < self.vocab_size)
        return TokenTexts(lengths, texts.data[: sum(lengths)], special, self.key, self.ends)


@dataclass(slots=True, eq=False)
class _Loaded:
    """A tokenizer read from files, the digest of the files, and the monotonic time in seconds of its last use."""

    tokenizer: Tokenizer
    digest: str
    used: float


@dataclass(frozen=True, slots=True)
class _Found:
    """The result for one version of an adapter. ``loaded`` is None if the adapter has no tokenizer of its own."""

    version: tuple[str, float]
    served: ServedTokenizer
    loaded: _Loaded | None


class AdapterTokenizers:
    """Finds and loads the tokenizers of adapters. Thread-safe.

    Args:
        base: tokenizer of requests without an adapter, and of adapters without a tokenizer.
        config: the engine's options, which name the folder of adapters and the folder of downloads. A symbolic link
            must not lead out of the folder of adapters.
    """

    def __init__(self, base: ServedTokenizer, config: EngineConfig) -> None:
        self._base = base
        self._root = None if config.lora_dir is None else Path(config.lora_dir)
        self._downloads = adapter_cache_folder(config.adapter_cache_dir).resolve()
        self._lock = Lock()
        self._most_names = config.max_adapters
        # Results by the adapter's name; the most recently found result is the last one.
        self._of_adapters: dict[str, _Found] = {}
        self._loaded: dict[str, _Loaded] = {}  # Tokenizers by the digest of their files.
        self._loading: dict[str, Lock] = {}  # Locks by the digest of the files, held while the files are loaded.

    @property
    def has_folder(self) -> bool:
        """Whether the server has a folder of adapters."""
        return self._root is not None

    def known(self, name: str | None, info: AdapterInfo | None) -> ServedTokenizer | None:
        """Return the tokenizer of an adapter's version, or None if ``find`` has not loaded it yet.

        Without a name, return the base model's.
        """
        if name is None:
            return self._base
        found = self._of_adapters.get(name)
        if found is None or info is None or found.version != _version(info):
            return None
        if found.loaded is not None:
            found.loaded.used = time.monotonic()
        return found.served

    def read_own(self, name: str, path: str) -> int:
        """Read the tokenizer of an adapter that is to be loaded. Must not be called on the event loop.

        Args:
            path: path of the adapter, relative to the folder of adapters if there is one.

        Returns:
            Number of tokens of the tokenizer; 0 if the adapter has no tokenizer, or if its folder is missing (the load
            of the adapter reports a missing folder).

        Raises:
            RequestError: the tokenizer is malformed.
        """
        try:
            loaded = self._own(name, find_folder(path, self._root))
        except AdapterError:
            return 0
        return 0 if loaded is None else loaded.tokenizer.vocab_size

    def find(self, name: str, info: AdapterInfo) -> ServedTokenizer:
        """Return the tokenizer of a loaded adapter, reading it if necessary. Must not be called on the event loop.

        Raises:
            RequestError: the tokenizer is malformed, or has more tokens than the adapter's embedding.
        """
        try:
            folder = find_folder(str((self._root or Path()) / info.path), None)
            served, loaded = self._find(name, folder, info.vocab_size)
        except AdapterError:  # The adapter's folder was deleted after the adapter was loaded.
            served, loaded = self._base, None
        self._keep(name, _Found(_version(info), served, loaded))
        return served

    async def read_own_off_loop(self, name: str, path: str) -> int:
        """Call ``read_own`` on another thread, so that the event loop is not blocked."""
        return await POOL.off_loop(partial(self.read_own, name, path))

    async def find_off_loop(self, name: str, info: AdapterInfo) -> ServedTokenizer:
        """Call ``find`` on another thread, so that the event loop is not blocked."""
        return await POOL.off_loop(partial(self.find, name, info))

    def _keep(self, name: str, found: _Found) -> None:
        """Store the result for an adapter, unless ``_keep_loaded`` of another tokenizer has dropped its tokenizer from
        memory.
        """
        with self._lock:
            self._of_adapters.pop(name, None)
            if found.loaded is None or found.loaded in self._loaded.values():
                self._of_adapters[name] = found
            while len(self._of_adapters) > self._most_names:
                del self._of_adapters[next(iter(self._of_adapters))]

    def _find(self, name: str, folder: Path, vocab_size: int) -> tuple[ServedTokenizer, _Loaded | None]:
        loaded, base = self._own(name, folder), self._base
        num_tokens = 0 if loaded is None else loaded.tokenizer.vocab_size
        is_download = folder.is_relative_to(self._downloads)
        if fault := vocabulary_fault(vocab_size, num_tokens, base.vocab_size, is_download=is_download):
            raise RequestError(fault, param="model", code="adapter_not_supported" if is_download else None)
        size = vocab_size or base.vocab_size
        identity = tokenizer_identity("" if loaded is None else loaded.digest, size, base.vocab_size)
        if loaded is None:
            wider = ServedTokenizer(base.tokenizer, size, f"@{size}", identity)
            return (base if size == base.vocab_size else wider), None
        own = loaded.tokenizer
        key = _vocabulary_key(own)
        if size == base.vocab_size and key == self._base_key:
            # The adapter's tokenizer has the model's tokens, but it may have its own chat template.
            return ServedTokenizer(own, size, "", identity), loaded
        return ServedTokenizer(own, size, f"{key}@{size}", identity), loaded

    @cached_property
    def _base_key(self) -> str:
        return _vocabulary_key(self._base.tokenizer)

    def _own(self, name: str, folder: Path) -> _Loaded | None:
        """Return the tokenizer in an adapter's folder; None if it has none. Raises RequestError if it is malformed."""
        try:
            return self._read(folder)
        except (ModelError, OSError) as error:
            reason = error if isinstance(error, ModelError) else f"{error.strerror}."
            raise RequestError(
                f"The tokenizer in the folder of the adapter {name!r}: {reason}", param="model"
            ) from None

    def _read(self, folder: Path) -> _Loaded | None:
        """Return the tokenizer in an adapter's folder; None if it has none."""
        if not (key := digest_tokenizer_files(folder, self._root)):
            return None
        with self._lock:
            found = self._loaded.get(key)
            loading = self._loading.setdefault(key, Lock()) if found is None else None
        if loading is not None:
            try:
                # The lock is per digest: equal files are loaded once, and different files at the same time.
                with loading:
                    found = self._loaded.get(key) or self._keep_loaded(_Loaded(self._load(folder), key, 0.0))
            finally:
                with self._lock:
                    self._loading.pop(key, None)
        assert found is not None
        found.used = time.monotonic()
        return found

    def _keep_loaded(self, loaded: _Loaded) -> _Loaded:
        """Keep a tokenizer in memory. If there are too many, drop the one that was used least recently."""
        with self._lock:
            if len(self._loaded) >= MOST_TOKENIZERS:
                self._drop(min(self._loaded, key=lambda each: self._loaded[each].used))
            self._loaded[loaded.digest] = loaded
            loaded.used = time.monotonic()
        return loaded

    def _drop(self, key: str) -> None:
        """Drop a tokenizer, and the results that refer to it. The caller holds the lock."""
        dropped = self._loaded.pop(key)
        kept = {name: found for name, found in self._of_adapters.items() if found.loaded is not dropped}
        self._of_adapters = kept

    def _load(self, folder: Path) -> Tokenizer:
        with refusing_malformed():
            files = read_folder(folder)
            if not files.chat_templates:
                files = dataclasses.replace(files, chat_templates=self._base.tokenizer.chat_templates)
            tokenizer = Tokenizer(files, self._base.tokenizer.steps)
            check_lengths(tokenizer.texts().lengths)
            return tokenizer


def _vocabulary_key(tokenizer: Tokenizer) -> str:
    """Return the SHA-256 of a tokenizer's tokens, special tokens and end tokens."""
    texts = tokenizer.texts()
    digest = hashlib.sha256(repr((texts.special, tokenizer.eos_ids)).encode())
    digest.update(texts.lengths.tobytes() + texts.data)
    return digest.hexdigest()


def _version(info: AdapterInfo) -> tuple[str, float]:
    """Return the identity of one load of an adapter. The digest alone covers only the weights, not the tokenizer."""
    return info.digest, info.loaded
