"""Model router: chooses the base model of a server that serves a request. Each model has its own state.

    request --model--> ModelRouter --> ServerState of small --> its engine or fleet
                                   --> ServerState of big   --> its engine or fleet

On a server with one model, the router has one state and needs no lookup.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...engine.errors import RequestError, UnknownModel
from .server_state import ServerState

# Fields of a body that may name a model or an adapter. The first one that is set is used.
_FIELDS = ("model", "base_model_name", "lora_name", "name")


class ModelRouter:
    """Finds the state that serves a request. Belongs to the server's event loop.

    Attributes:
        main: the state that exists as long as the server, with the keys, stores and options of the whole server.
        on_removed: called with a state that accepts no more requests, so that its engine is ended.
    """

    def __init__(self, states: Sequence[ServerState]) -> None:
        self.main = states[0]
        self._states = list(states)
        self.on_removed: Callable[[ServerState], None] = lambda state: None

    @property
    def states(self) -> Sequence[ServerState]:
        """The states of the served models; the default model's state is the first one."""
        return self._states

    @property
    def is_single(self) -> bool:
        """Whether the server has only ever had one model, so that all requests are for it."""
        return len(self._states) == 1 and self._states[0] is self.main

    def of(self, name: str | None) -> ServerState:
        """Return the state that serves a name.

        For an unknown name, return the first state, which refuses the request.
        """
        if not name or self.is_single:
            return self._states[0]
        return self.owner(name) or self._finder(name) or self._states[0]

    def of_body(self, body: object) -> ServerState:
        """Return the state that serves a request with this JSON body."""
        fields: Mapping[str, Any] = body if isinstance(body, dict) else {}
        given = [fields.get(field) for field in _FIELDS]
        match fields.get("adapters"):
            case [{"name": first}, *_]:
                given.append(first)
        return self.of(next((name for name in given if isinstance(name, str) and name), None))

    def owner(self, name: str) -> ServerState | None:
        """Return the state whose model or adapter has this name; None if there is none."""
        for state in self._states:
            if state.models.has(name):
                return state
        names = [(each, state) for state in self._states for each in state.models.names]
        bases = [(len(each), state) for each, state in names if name.startswith(f"{each}:")]
        return max(bases, key=lambda found: found[0])[1] if bases else None

    def remove(self, name: str) -> ServerState:
        """Remove a base model. Its running requests finish, and new ones get 404. Returns the model's state.

        Raises:
            UnknownModel: no base model has the name.
            RequestError: this is the last base model.
        """
        state = next((each for each in self._states if name in each.models.names), None)
        if state is None:
            raise UnknownModel(name)
        if len(self._states) == 1:
            raise RequestError(
                f"{name} is the only base model: stop the server to stop serving it.", param="name", code="last_model"
            )
        self._drop(state)
        return state

    def put(self, state: ServerState) -> None:
        """Serve a base model in addition to the others. It replaces other models that have one of its names.

        New requests go to the new model at once. Running requests of replaced models finish unchanged.
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
        """Return the first model that may load an unknown adapter of this name; None if no model may."""
        return next((state for state in self._states if state.models.may_have(name)), None)
