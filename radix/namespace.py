"""Namespaces of KV: the weights and the tenant that KV belongs to, and a sequence's path through them.

The KV of a token depends on all tokens before it and on the model's weights. A prefix is shared exactly where the
tokens and, at each position, the namespaces are equal::

    position           0 ........................ switch_at ..................... end
    ordinary           |<------------------- namespace ------------------------->|      switch_at = 0
    activated LoRA     |<------- before --------->|<-------- namespace --------->|

Activated LoRA applies the adapter only from its invocation tokens on, so all earlier tokens have the KV of the base
model. They share this KV with the base model and with all other adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

ENDLESS = 1 << 62
"""A position beyond the end of every sequence."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Weights and tenant of KV, in separate fields, so that a salt cannot be confused with an adapter or a tenant.

    Attributes:
        base: digest of the base model.
        adapter: digest of an adapter's load (not its name, which may get new weights); None for the base model.
        salt: text chosen by a tenant to separate some of its own KV.
        tenant: tenant of the KV; different tenants never share KV.
        is_long: whether keys are rotated as in sequences beyond the length at which the rotary embedding switches
            (LongRoPE).
    """

    base: str
    adapter: str | None = None
    salt: str = ""
    tenant: str = ""
    is_long: bool = False


@dataclass(frozen=True, slots=True)
class Origin:
    """Namespaces of a page's slots: ``before`` for the first ``switch`` slots, ``namespace`` for the others.

    Origin and tokens together are the key of a page. Pages of a single namespace have ``switch`` 0 and no ``before``.
    """

    namespace: Namespace
    switch: int = 0
    before: Namespace | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """Namespaces of a sequence: ``before`` owns positions below ``switch_at``, ``namespace`` the others.

    A page wholly below ``switch_at`` belongs to ``before``. The page that contains position ``switch_at`` belongs to
    ``namespace``. Its key includes the position of the switch, so the page differs from pages that the adapter computed
    alone or with a switch elsewhere. Later pages differ by their parent in the tree.

    Raises:
        ValueError: ``before`` without a positive ``switch_at`` or the reverse, or ``before`` equal to ``namespace``.
    """

    namespace: Namespace
    switch_at: int = 0
    before: Namespace | None = None
    _after: Origin = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Check that the switch has a positive position and a namespace before it, or neither."""
        if self.switch_at < 0 or (self.switch_at > 0) != (self.before is not None):
            raise ValueError(
                f"a switch at {self.switch_at} needs a positive position and a namespace before it, or 0 and none"
            )
        if self.before == self.namespace:
            raise ValueError(f"the switch at {self.switch_at} leads from {self.before} to itself")
        object.__setattr__(self, "_after", Origin(self.namespace))

    def origin(self, start: int, end: int) -> Origin:
        """Return the origin of the page that contains the positions ``start`` to ``end``."""
        if self.before is None or start >= self.switch_at:
            return self._after
        if end <= self.switch_at:
            return Origin(self.before)
        return Origin(self.namespace, self.switch_at - start, self.before)

    def zone(self, position: int) -> tuple[Namespace, int]:
        """Return the namespace of ``position``, and the first later position with another namespace."""
        if self.before is None or position >= self.switch_at:
            return self.namespace, ENDLESS
        return self.before, self.switch_at

    def as_long(self) -> Path:
        """Return the path of the same tokens in a sequence beyond the switch of the rotary embedding."""
        before = self.before and replace(self.before, is_long=True)
        return Path(replace(self.namespace, is_long=True), self.switch_at, before)

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        return (self.namespace,) if self.before is None else (self.before, self.namespace)

    def touches(self, namespace: Namespace) -> bool:
        return namespace in (self.namespace, self.before)
