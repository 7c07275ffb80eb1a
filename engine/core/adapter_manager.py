"""Adapter manager: loads, unloads and pins LoRA adapters for sequences, and replies to calls about adapters.

    Submit --> begin --> sequence runs, its version pinned --> Done or Failed --> settle: version unpinned
                 |
                 +-- adapter not loaded yet: the Submit waits for the load, then ``begin`` is called again

A version that was unloaded or replaced is dropped when no sequence pins it any more.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from typing import TYPE_CHECKING

from ...lora.activated_lora import activation_position
from ...lora.errors import AdapterError, AdapterLimit
from ...lora.sum_parts import SumPart
from ...radix.namespace import ENDLESS, Namespace
from ...radix.namespace import Path as PrefixPath
from ..adapter_sources.named_sources import is_adapter
from ..config import EngineConfig
from ..errors import AdapterUnavailable, ConfigError, EngineError, RequestError, UnknownModel
from ..messages import (
    AdapterChanged,
    Adapters,
    Done,
    Failed,
    ListAdapters,
    LoadAdapter,
    Message,
    Reply,
    Submit,
    UnloadAdapter,
    failure_of,
)
from ..snapshot import SlotView
from ..types import AdapterInfo
from ..weighted_adapters import WeightedPart, check_parts, is_combination, parts_of
from .adapter_checks import VocabularyCheck, check_tokens

if TYPE_CHECKING:
    from ...lora.adapter_pool import AdapterPool, LoadResult
    from ...lora.registry import AdapterVersion

_PAUSE = 0.001  # Seconds between two polls of the loads at the start of the engine.
_NO_CALL = -1
_MOST_NAMES = 64  # Limit on the number of adapter names in use that a heartbeat lists.


@dataclass(frozen=True, slots=True)
class Adaptation:
    """The adapter of a sequence, as the scheduler and the prefix cache need it.

    Attributes:
        path: namespaces of the sequence's KV in the prefix cache.
        adapter: load id of the adapter's version, -1 for the base model alone.
        adapted_from: position of the first token to which the adapter applies.
        vocab_size: number of tokens of the adapter's own vocabulary, 0 for the base model's.
        num_classes: number of rows of the adapter's classification head, 0 without one.
    """

    path: PrefixPath
    adapter: int = -1
    adapted_from: int = 0
    vocab_size: int = 0
    num_classes: int = 0

    @classmethod
    def of_base(cls, base_digest: str, submit: Submit) -> Adaptation:
        """Return the ``Adaptation`` of a sequence that uses the base model."""
        return cls(PrefixPath(Namespace(base_digest, None, submit.salt, submit.cache_tenant)))

    def rotated(self, num_tokens: int, switch: int) -> tuple[PrefixPath, int]:
        """Return the namespaces of a sequence of ``num_tokens`` tokens, and the length beyond which they change.

        Args:
            switch: length in tokens beyond which the rotary embedding of the whole sequence changes (LongRoPE).
        """
        return (self.path.as_long(), ENDLESS) if num_tokens > switch else (self.path, switch)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence that waited for its adapter. The adapter is loaded now, or its load has failed with ``error``."""

    submit: Submit
    error: EngineError | None


@dataclass(frozen=True, slots=True)
class Loss:
    """Sequences that cannot continue, because their adapter failed."""

    ids: tuple[int, ...]
    error: EngineError


@dataclass(slots=True, eq=False)
class _Load:
    """A load in progress, and the sequences that start when it is done."""

    name: str
    path: str
    call: int | None  # Id of the call to reply to; None if a sequence requested the load.
    wanted: bool = True  # False if the name was unloaded while the load was in progress.
    waiting: list[Submit] = field(default_factory=list)


class AdapterManager:
    """Manages the adapters of an engine core, on the core's thread.

    Args:
        pool: adapter pool, with the names, versions, slots and memory of adapters.
        base_digest: digest of the base model, which is part of every namespace.
        vocab_size: number of tokens of the base model's vocabulary.
        config: the engine's options, with the folder from which adapters are loaded when a sequence names them.
    """

    def __init__(self, pool: AdapterPool, base_digest: str, vocab_size: int, config: EngineConfig) -> None:
        self._pool = pool
        self._vocab_size = vocab_size
        self._base_digest = base_digest
        self._config = config
        self._folder = None if config.lora_dir is None else Path(config.lora_dir)
        # Loads of the same name are in the order in which the pool reports their results.
        self._loads: list[_Load] = []
        self._pins: dict[int, AdapterVersion] = {}  # Pinned version by sequence id.
        self._requests: Counter[str] = Counter()
        self._hits: Counter[str] = Counter()
        self._outbox: list[Message] = []

    @property
    def has_work(self) -> bool:
        return bool(self._loads or self._outbox)

    @property
    def waiting_tokens(self) -> list[int]:
        """Number of prompt tokens of each sequence that waits for a load."""
        return [len(submit.tokens) for load in self._loads for submit in load.waiting]

    def load_named(self, folders: Mapping[str, str]) -> tuple[AdapterInfo, ...]:
        """Load adapters by name, and wait for them. Raises ConfigError for the first adapter that cannot be loaded."""
        try:
            for name, folder in folders.items():
                self._await(name, folder)
        except ConfigError:
            self._pool.close()
            raise
        return tuple(map(self.describe, self._pool.registry))

    def load(self, message: LoadAdapter) -> None:
        """Start a load. The reply is sent when the load has ended."""
        try:
            if not message.replace and self._is_known(message.name):
                raise RequestError(
                    f"The adapter {message.name!r} is already loaded: unload it, or ask to replace it.", param="name"
                )
            self._start(message)
        except EngineError as error:
            self._reply(message.id, error)

    def unload(self, message: UnloadAdapter) -> None:
        """Unload the adapter of a name, and reply. Running sequences keep its weights."""
        loaded = self._pool.registry.get(message.name) is not None
        try:
            self._pool.unload(message.name)
        except AdapterError:
            self._reply(message.id, UnknownModel(message.name))
            return
        for load in self._loads:
            load.wanted = load.wanted and load.name != message.name
        if loaded:
            self._gone(message.name)
        self._reply(message.id)

    def has_content(self, digest: str) -> bool:
        """Return whether an adapter with this digest is loaded."""
        return any(version.digest == digest for version in self._pool.registry)

    def tell(self, message: ListAdapters) -> None:
        """Reply with a list of all adapters: those that are ready, draining (unloaded but in use), or loading."""
        registry = self._pool.registry
        loading = (AdapterInfo(load.name, load.path, "loading", "disk") for load in self._loads if load.wanted)
        self._outbox.append(Adapters(message.id, (*map(self.describe, (*registry, *registry.draining)), *loading)))

    def begin(self, submit: Submit) -> Adaptation | None:
        """Pin the current version of a sequence's adapter, until ``settle`` receives the end of the sequence.

        Returns:
            The sequence's adaptation; None if the adapter must be loaded first. ``poll`` then returns the sequence
            after the load.

        Raises:
            UnknownModel: there is no such adapter.
            RequestError: the adapter cannot be loaded.
            AdapterUnavailable: there is no memory for the adapter now, or the sequence was tokenized with another
                tokenizer.
        """
        name, base = submit.adapter, Namespace(self._base_digest, None, submit.salt, submit.cache_tenant)
        assert name is not None
        version = self._pool.registry.get(name)
        if version is None:
            self._wait(name, submit)
            return None
        check_tokens(submit, version, self._vocab_size)
        if version.parts:
            self._pool.registry.use(version)
        self._requests[name] += 1
        self._hits[name] += self._pool.slots.is_ready(version.load_id)
        start = _activated_from(submit, version)
        if start is None:
            return Adaptation(PrefixPath(base))
        self._pool.registry.pin(version)
        self._pins[submit.id] = version
        self._pool.slots.prefetch(version.load_id, submit.tenant)
        own = Namespace(self._base_digest, version.digest, submit.salt, submit.cache_tenant)
        path = PrefixPath(own, switch_at=start, before=base) if start else PrefixPath(own)
        return Adaptation(path, version.load_id, start, version.own.vocab_size or 0, version.own.num_classes)

    def poll(self) -> list[Arrival]:
        """Finish loads. Must be called once a step. Returns the sequences that waited for the loads."""
        arrivals: list[Arrival] = []
        for result in self._pool.poll():
            load = next(each for each in self._loads if each.name == result.name)
            self._loads.remove(load)
            arrivals += self._finish(load, result)
        return arrivals

    def take_lost(self) -> list[Loss]:
        """Return the sequences whose adapter has failed since the last call."""
        losses = []
        for broken in self._pool.take_broken():
            if self._pool.registry.get(broken.version.name) is None:
                self._gone(broken.version.name)
            ids = tuple(number for number, version in self._pins.items() if version is broken.version)
            losses.append(Loss(ids, RequestError(str(broken.error), param="model")))
        return losses

    def take_waiting(self, ids: Container[int] | None = None) -> list[Submit]:
        """Remove waiting sequences, either those with the given ids or all of them. Returns them."""
        taken = []
        for load in self._loads:
            taken += [submit for submit in load.waiting if ids is None or submit.id in ids]
            load.waiting = [submit for submit in load.waiting if ids is not None and submit.id not in ids]
        return taken

    def take_messages(self) -> list[Message]:
        """Return the replies and changes since the last call.

        A change precedes the reply to the call that caused it.
        """
        messages, self._outbox = self._outbox, []
        return messages

    def settle(self, messages: Iterable[Message]) -> list[str]:
        """Unpin the adapter versions of all sequences that these messages end.

        Returns:
            Digests of the adapters that are unloaded and not in use, so that their KV can be dropped.
        """
        if self._pins:
            for message in messages:
                if isinstance(message, (Done, Failed)) and (version := self._pins.pop(message.id, None)):
                    self._pool.registry.unpin(version)
        return self._pool.take_ended()

    def describe(self, version: AdapterVersion) -> AdapterInfo:
        """Return the state of an adapter for the client."""
        pool = self._pool
        cached = "host" if version.digest in pool.cache else "disk"
        return AdapterInfo(
            name=version.name,
            path=version.path,
            state="draining" if version.retired else "ready",
            tier="device" if pool.slots.is_ready(version.load_id) else cached,
            rank=version.rank,
            bytes=version.num_bytes,
            activated=bool(version.invocation_tokens),
            pins=version.pins,
            running=pool.slots.pins(version.load_id),
            requests=self._requests[version.name],
            hits=self._hits[version.name],
            digest=version.digest,
            vocab_size=version.own.vocab_size or 0,
            loaded=version.loaded,
            num_classes=version.own.num_classes,
        )

    def names(self) -> dict[str, str]:
        """Return one name for each digest.

        If several adapters have equal content, the one in use or most used is named.
        """
        registry = self._pool.registry
        versions = sorted((*registry.draining, *registry), key=lambda each: (each.pins, self._requests[each.name]))
        return {version.digest: version.name for version in versions}

    def name(self, load_id: int) -> str | None:
        """Return the name of a version; None if the version has ended, or for -1, the base model."""
        version = self._pool.registry.version(load_id)
        return None if version is None else version.name

    def busiest(self, most: int) -> tuple[AdapterInfo, ...]:
        """Return up to ``most`` adapters: first those in use, then those in slots, then others."""
        slots, registry = self._pool.slots, self._pool.registry
        versions = nlargest(most, (*registry, *registry.draining), lambda v: (v.pins, slots.is_ready(v.load_id)))
        return tuple(map(self.describe, versions))

    def slots(self) -> tuple[SlotView, ...]:
        states = self._pool.slots.states()
        return tuple(SlotView(self.name(slot.adapter), slot.ready, slot.pins, slot.closing) for slot in states)

    def in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the adapters with running and with waiting sequences, each sorted and at most 64."""
        versions = {version.load_id: version for version in self._pins.values()}.values()
        running = {version.name for version in versions if self._pool.slots.pins(version.load_id)}
        waiting = {version.name for version in versions if version.pins > self._pool.slots.pins(version.load_id)}
        waiting |= {load.name for load in self._loads if load.waiting}
        return tuple(sorted(running)[:_MOST_NAMES]), tuple(sorted(waiting)[:_MOST_NAMES])

    def stats(self) -> dict[str, float]:
        """Return gauges and counters for metrics."""
        pool = self._pool
        return {
            "adapters": len(pool.registry),
            "adapters_loading": len(self._loads),
            "adapters_resident": pool.slots.num_resident,
            "adapters_pinned": pool.slots.num_pinned,
            "adapters_host_bytes": pool.cache.num_bytes,
            "adapters_evicted": pool.cache.num_evicted,
        }

    def check(self) -> None:
        """Raise AssertionError if pins, versions and slots are inconsistent."""
        self._pool.registry.check()
        self._pool.slots.check()
        pins = Counter(version.load_id for version in self._pins.values())
        for load_id, count in pins.items():
            version = self._pool.registry.version(load_id)
            assert version is not None and version.pins == count, f"{count} sequences use {version}"

    def start_anew(self) -> None:
        """Empty all slots and drop waiting sequences, after a step that raised an exception. Names and pins are kept.

        Loads continue. If the failed step lost the result of a load, the load's call gets an error as its reply.
        """
        self._pool.slots.clear()
        for load in self._loads:
            load.waiting.clear()
        running, lost = Counter(self._pool.loading), []
        for load in reversed(self._loads):
            running[load.name] -= 1
            if running[load.name] < 0:
                lost.append(load)
        for load in reversed(lost):
            self._loads.remove(load)
            if load.call is not None:
                self._reply(load.call, EngineError(f"The adapter {load.name!r} could not be loaded: try again."))

    def close(self) -> None:
        """End the background threads, and reply to pending calls with an error."""
        for load in self._loads:
            if load.call is not None:
                self._outbox.append(Reply(load.call, Failed(load.call, "EngineDead", "The engine is shutting down.")))
        self._loads.clear()
        self._pool.close()

    def _await(self, name: str, folder: str) -> None:
        """Load one adapter before the engine is ready, while no other load is in progress."""
        try:
            self._pool.load(name, folder, self._check_of(folder), trusted=True)
            while not (results := self._pool.poll()):
                time.sleep(_PAUSE)
            if results[0].error is not None:
                raise results[0].error
        except AdapterError as error:
            raise ConfigError(f"--lora-modules {name}={folder}: {error}") from None

    def _is_known(self, name: str) -> bool:
        return self._pool.registry.get(name) is not None or self._loading(name) is not None

    def _loading(self, name: str) -> _Load | None:
        """Return the first load of a name that is still wanted; None if there is none."""
        return next((load for load in self._loads if load.name == name and load.wanted), None)

    def _check_of(self, path: str, num_tokens: int = 0) -> VocabularyCheck:
        return VocabularyCheck(self._config, path, self._vocab_size, num_tokens)

    def _start(self, call: LoadAdapter) -> _Load:
        """Start a load. If the call's id is negative, no reply is sent. Raises RequestError or AdapterUnavailable."""
        try:
            check = self._check_of(call.path, call.num_tokens)
            self._pool.load(call.name, call.path, check, trusted=call.trusted, public=call.of, tenant=call.tenant)
        except AdapterError as error:
            raise _refusal(error) from None
        self._loads.append(_Load(call.name, call.path, call.id if call.id >= 0 else None))
        return self._loads[-1]

    def _wait(self, name: str, submit: Submit) -> None:
        """Keep a sequence until its adapter is loaded. Starts the load if it is not in progress."""
        load = self._loading(name)
        if load is None and (parts := parts_of(name)):
            load = self._start_sum(name, parts, submit.tenant)
        if load is None:
            if self._folder is None or not is_adapter(self._folder, name):
                raise UnknownModel(name)
            load = self._start(LoadAdapter(_NO_CALL, name, name, tenant=submit.tenant))
        load.waiting.append(submit)

    def _start_sum(self, name: str, parts: tuple[WeightedPart, ...], tenant: str) -> _Load:
        """Start the load of a weighted sum of loaded adapters. Raises like ``begin``."""
        check_parts(parts)
        registry = self._pool.registry
        found: list[SumPart] = []
        tokenizers: set[str] = set()
        for part in parts:
            version = registry.get(part.name)
            if version is None or version.parts:
                raise UnknownModel(part.name)
            found.append(SumPart(part.name, version.path, version.trusted, version.digest, part.weight))
            tokenizers.add(version.tokenizer)
        if len(tokenizers) > 1:
            raise RequestError(
                "The adapters have different tokenizers of their own, so they cannot be combined.", param="model"
            )
        for each in [each for each in self._requests if is_combination(each) and registry.get(each) is None]:
            del self._requests[each], self._hits[each]
        try:
            self._pool.load_sum(name, tuple(found), tokenizers.pop(), tenant=tenant)
        except AdapterError as error:
            raise _refusal(error) from None
        self._loads.append(_Load(name, name, None))
        return self._loads[-1]

    def _finish(self, load: _Load, result: LoadResult) -> list[Arrival]:
        error = None if result.error is None else _refusal(result.error)
        # Clients name a combination by its parts, so changes of combinations are not sent to them.
        if result.version is not None and not result.version.parts:
            self._outbox.append(AdapterChanged(load.name, self.describe(result.version)))
        if load.call is not None:
            self._reply(load.call, error)
            # For a sequence, any error of its adapter means that the model named in ``model`` is not available.
        if isinstance(error, RequestError):
            error = RequestError(str(error), param="model")
        return [Arrival(submit, error) for submit in load.waiting]

    def _gone(self, name: str) -> None:
        del self._requests[name], self._hits[name]
        if not is_combination(name):
            self._outbox.append(AdapterChanged(name, None))

    def _reply(self, call: int, error: EngineError | None = None) -> None:
        self._outbox.append(Reply(call, None if error is None else failure_of(call, error)))


def _activated_from(submit: Submit, version: AdapterVersion) -> int | None:
    """Return the first position to which an adapter applies, 0 for all tokens; None if an activated one is not invoked.

    An invocation in a label whose logprobs are read does not count: as in PEFT, the prompt alone decides, so all labels
    of a prompt are read with the same activation.
    """
    if not version.invocation_tokens:
        return 0
    prompt = submit.tokens
    if num_label := submit.params.num_label:
        prompt = prompt[:-num_label]
    return activation_position(prompt, version.invocation_tokens)


def _refusal(error: AdapterError) -> EngineError:
    if isinstance(error, AdapterLimit):
        return AdapterUnavailable(str(error))
    return RequestError(str(error), param=error.option)
