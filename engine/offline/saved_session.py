"""Saved sessions: encodes paused requests as bytes, so that another process can continue them.

The seed and the tokens are sufficient to continue. A random draw depends only on the seed and the position, and the
states of grammar matching, penalties and stop strings follow from the earlier tokens.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, replace
from itertools import repeat

from ...grammar.spec import GrammarKind, GrammarSpec
from ..kv_cache.session_files import pack_head, read_head
from ..messages import Submit, decode, encode
from ..serving.request import TextRequest
from .type_check import is_of_type

__all__ = ["SavedSession", "pack_head", "read_head"]

VERSION = 1


@dataclass(frozen=True, slots=True)
class SavedSession:
    """A paused request, and the weights on which it must continue.

    Attributes:
        base: digest of the base model.
        adapter_digest: digest of the adapter; "" for none.
        request: the request as given by the caller, with its seed.
        generated: the tokens generated so far, ``array('i')``.
    """

    base: str
    adapter_digest: str
    request: TextRequest
    generated: array[int]

    def encode(self) -> bytes:
        """Encode the session as bytes."""
        request = self.request
        [submit] = request.submits(repeat(0))
        fields = {
            "version": VERSION,
            "base": self.base,
            "adapter_digest": self.adapter_digest,
            "stop": request.stop,
            "include_stop": request.include_stop,
            "skip_special_tokens": request.skip_special_tokens,
            "shown_tokens": sorted(request.shown_tokens),
            "timeout": request.timeout,
        }
        text = json.dumps(fields).encode()
        return len(text).to_bytes(4, "little") + text + encode([replace(submit, generated=self.generated)])

    @classmethod
    def decode(cls, data: bytes) -> SavedSession | None:
        """Decode the bytes of ``encode``. Returns None for bytes of another version, or that are not a session.

        The bytes are untrusted. If a value has a wrong type, the result is None. Bounds are checked later by
        ``RequestLimits``.
        """
        try:
            saved = cls._decoded(data)
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            return None
        return saved if is_of_type(saved, cls) else None

    @classmethod
    def _decoded(cls, data: bytes) -> SavedSession:
        """Decode the bytes. Raises any of the errors that malformed data causes."""
        length = int.from_bytes(data[:4], "little")
        fields = json.loads(data[4 : 4 + length])
        [submit] = decode(data[4 + length :])
        if fields["version"] != VERSION or not isinstance(submit, Submit):
            raise ValueError("not a session of this version")
        request = TextRequest(
            submit.tokens,
            submit.params,
            stop=tuple(fields["stop"]),
            include_stop=fields["include_stop"],
            adapter=submit.adapter,
            salt=submit.salt,
            skip_special_tokens=fields["skip_special_tokens"],
            grammar=None if submit.grammar is None else GrammarSpec(GrammarKind(submit.grammar[0]), submit.grammar[1]),
            tenant=submit.tenant,
            cache_tenant=submit.cache_tenant,
            priority=submit.priority,
            timeout=fields["timeout"],
            session=submit.session,
            session_seconds=submit.session_seconds,
            pin_seconds=submit.pin_seconds,
            prefix_pins=submit.prefix_pins,
            reasoning=submit.reasoning,
            shown_tokens=frozenset(fields["shown_tokens"]),
        )
        return cls(fields["base"], fields["adapter_digest"], request, submit.generated)
