"""Who computed a piece of KV and for whom, and along which of them a sequence is looked up.

KV depends on every token before it and on the weights that read them. A prefix may therefore be shared exactly where
the tokens agree and, at each position, the namespaces do::

    position           0 ........................ switch_at ..................... end
    ordinary           |<------------------- namespace ------------------------->|      switch_at = 0
    activated LoRA     |<------- before --------->|<-------- namespace --------->|

With activated LoRA the adapter works only from its invocation tokens on, so all tokens before them have the KV of the
base model and are shared with it and with every other adapter.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ENDLESS = 1 << 62
"""A position that no sequence reaches."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """Who computed the KV, and for whom. Four fields, never joined: a salt cannot pass for an adapter or a tenant.

    Attributes:
        base: revision of the base model's weights.
        adapter: identity of one load of an adapter, never its name, since new weights may come under an old name;
            None for the base model.
        salt: chosen by a tenant, to set some of its own KV apart.
        tenant: those with different ones never share.
    """

    base: str
    adapter: str | None = None
    salt: str = ""
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Origin:
    """Who computed the cells of one page: ``before`` the first ``switch`` of them, ``namespace`` the others.

    It is the part of a page's key that is not tokens. Pages of one namespace alone have ``switch`` 0 and no ``before``.
    """

    namespace: Namespace
    switch: int = 0
    before: Namespace | None = None


@dataclass(frozen=True, slots=True)
class Path:
    """By what the tokens of a sequence are looked up: ``before`` owns positions below ``switch_at``.

    A page wholly below ``switch_at`` belongs to ``before``. The page that holds position ``switch_at`` belongs to
    ``namespace``, and where in it the switch lies is a part of its key, so that it is never taken for a page that the
    adapter computed alone or switched to elsewhere. Later pages are told apart by standing below it in the tree.

    Raises:
        ValueError: ``before`` without a positive ``switch_at`` or the reverse, or ``before`` equal to ``namespace``.
    """

    namespace: Namespace
    switch_at: int = 0
    before: Namespace | None = None
    _after: Origin = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse a switch that is none."""
        if self.switch_at < 0 or (self.switch_at > 0) != (self.before is not None):
            raise ValueError(
                f"a switch at {self.switch_at} needs a positive position and a namespace before it, or 0 and none"
            )
        if self.before == self.namespace:
            raise ValueError(f"the switch at {self.switch_at} leads from {self.before} to itself")
        object.__setattr__(self, "_after", Origin(self.namespace))

    def origin(self, start: int, end: int) -> Origin:
        """Who computes the cells of the page that holds positions ``start`` to ``end`` of this path."""
        if self.before is None or start >= self.switch_at:
            return self._after
        if end <= self.switch_at:
            return Origin(self.before)
        return Origin(self.namespace, self.switch_at - start, self.before)

    def zone(self, position: int) -> tuple[Namespace, int]:
        """The namespace of ``position``, and the first position after it that has another."""
        if self.before is None or position >= self.switch_at:
            return self.namespace, ENDLESS
        return self.before, self.switch_at

    @property
    def namespaces(self) -> tuple[Namespace, ...]:
        """All to which a position may belong."""
        return (self.namespace,) if self.before is None else (self.before, self.namespace)

    def touches(self, namespace: Namespace) -> bool:
        """Whether any position may belong to ``namespace``."""
        return namespace in (self.namespace, self.before)
