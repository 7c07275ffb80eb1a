"""Model router: the base models of one server, each with a state of its own, and which of them a request is for.

    request --model--> ModelRouter --> ServerState of small --> its engine or fleet
                                   --> ServerState of big   --> its engine or fleet

A server with one model has a router with one state, and nothing is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...engine.errors import RequestError, UnknownModel
from .server_state import ServerState

# Fields of a body that name a model or an adapter; the first one that is given counts.
_FIELDS = ("model", "base_model_name", "lora_name", "name")


class ModelRouter:
    """Picks the state that serves a request. Belongs to the server's event loop.

    Attributes:
        main: state whose keys, stores and options are those of the whole server, and which lives as long as it.
        on_removed: called with a state that takes no requests any more, to end its engine.
    """

    def __init__(self, states: Sequence[ServerState]) -> None:
        self.main = states[0]
        self._states = list(states)
        self.on_removed: Callable[[ServerState], None] = lambda state: None

    @property
    def states(self) -> Sequence[ServerState]:
        """The states of the models that are served, the default one first."""
        return self._states

    @property
    def is_single(self) -> bool:
        """Whether all requests are for the one model that there ever was."""
        return len(self._states) == 1 and self._states[0] is self.main

    def of(self, name: str | None) -> ServerState:
        """Return the state that a name is for; of an unknown name the first one, which refuses it."""
        if not name or self.is_single:
            return self._states[0]
        return self.owner(name) or self._finder(name) or self._states[0]

    def of_body(self, body: object) -> ServerState:
        """Return the state that the JSON body of a request is for."""
        fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
        given = [fields.get(field) for field in _FIELDS]
        match fields.get("adapters"):
            case [{"name": first}, *_]:
                given.append(first)
        return self.of(next((name for name in given if isinstance(name, str) and name), None))

    def owner(self, name: str) -> ServerState | None:
        """Return the state of the model that has a name, or whose adapter does; None if none has."""
        for state in self._states:
            if state.models.has(name):
                return state
        names = [(each, state) for state in self._states for each in state.models.names]
        bases = [(len(each), state) for each, state in names if name.startswith(f"{each}:")]
        return max(bases, key=lambda found: found[0])[1] if bases else None

    def remove(self, name: str) -> ServerState:
        """Serve a base model no more: its requests end as they began, new ones get a 404. Returns its state.

        Raises:
            UnknownModel: no base model has the name.
            RequestError: it is the last one.
        """
        state = next((each for each in self._states if name in each.models.names), None)
        if state is None:
            raise UnknownModel(name)
        if len(self._states) == 1:
            raise RequestError(
                f"{name} is the only base model: end the server to stop serving it.", param="name", code="last_model"
            )
        self._drop(state)
        return state

    def put(self, state: ServerState) -> None:
        """Serve a base model beside the others, and in the place of those that have one of its names.

        New requests get it at once; those of the others end as they began.
        """
        before = [each for each in self._states if set(each.models.names) & set(state.models.names)]
        place = self._states.index(before[0]) if before else len(self._states)
        self._states.insert(place, state)
        for each in before:
            self._drop(each)

    def _drop(self, state: ServerState) -> None:
        self._states.remove(state)
        state.engine.removed = state.models.names[0]
        if state.is_main:
            state.is_main, self._states[0].is_main = False, True
        self.on_removed(state)

    def _finder(self, name: str) -> ServerState | None:
        """Return the first model that may load an adapter by a name that no model has loaded yet; None if none may."""
        return next((state for state in self._states if state.models.may_have(name)), None)
