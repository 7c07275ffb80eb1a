"""Server limits: the API keys, the limits on concurrent requests, and the number of running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import ServerConfig
from .api_keys import Key, KeyRing, Scope
from .caller import Caller, RequestFacts
from .request_admission import Demand, RequestAdmission, Ticket

if TYPE_CHECKING:
    from ...engine.serving.request import TextRequest


def open_keys(options: ServerConfig) -> KeyRing:
    """Create the key ring that the options configure. Raises ConfigError if the file with keys cannot be read."""
    return KeyRing(options.api_key, None if options.api_key_file is None else Path(options.api_key_file))


class ServerLimits:
    """Keys and admission for the requests of one base model. Belongs to the server's event loop.

    Args:
        shares_cache: whether tenants share the prefix cache.

    Attributes:
        keys: the keys of the whole server.
        admission: queue limits of the model, and the rate limits of the keys.
        active: number of running generations. Only ``generate`` writes it.
    """

    def __init__(self, keys: KeyRing, admission: RequestAdmission, *, shares_cache: bool) -> None:
        self.keys = keys
        self.admission = admission
        self.active = 0
        self._shares_cache = shares_cache

    async def admit(self, caller: Caller, requests: Sequence[TextRequest]) -> Ticket:
        """Admit all requests of one HTTP request, or none. Raises like ``RequestAdmission.admit``."""
        return self.admission.admit(caller.key, Demand.of(requests, is_strict=caller.is_strict))

    async def limit_headers(self, key: Key) -> Mapping[str, str]:
        """Return OpenAI's rate limit headers of a key."""
        return self.admission.limits.headers(key)

    def cache_tenant(self, key: Key) -> str:
        """Return the tenant whose cached prefixes a key's requests use."""
        return "" if self._shares_cache else key.tenant

    def caller_named(self, tenant: str, key_name: str, path: str) -> Caller | None:
        """Return the caller for a batch of this tenant; None if the key was removed or has lost its scope."""
        key = self.keys.named(key_name)
        if key is None or key.tenant != tenant or Scope.INFERENCE not in key.scopes:
            return None
        return Caller(key, self.cache_tenant(key), None, RequestFacts(), path)
