"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query

from ...engine.errors import UnknownModel
from ...fleet.catalog.model_versions import engine_name
from ..access.caller import Caller
from ..generate.server_state import ServerState
from .dependencies import CallerOf, Models, shown_path

router = APIRouter(tags=["models"])


def _card(state: ServerState, name: str, *, is_folder: bool = False) -> dict[str, Any]:
    served = {} if state.models.versions is None else state.models.versions.served.get(name, {})
    loaded = engine_name(name, max(served, key=lambda digest: served[digest])) if served else name
    adapter = None if name in state.models.names else state.models.adapters.get(loaded)
    base, root = state.models.names[0], name if is_folder else state.models.names[0]
    return {
        "id": name,
        "object": "model",
        "created": state.started,
        "owned_by": "rootgraft",
        "root": shown_path(adapter, state.models.remote, to_all=True) if adapter else root,
        "parent": base if adapter or is_folder else None,
        "max_model_len": None if state.engine.async_engine is None else state.engine.async_engine.max_model_len,
    }


def names_for(state: ServerState, caller: Caller) -> list[str]:
    """Return the names of a base model and of its adapters that a caller may use."""
    versions = state.models.versions
    served = () if versions is None else versions.served
    loaded = (name for name in state.models.adapters if versions is None or versions.public_name(name) is None)
    return [*state.models.names, *filter(caller.may_use, (*loaded, *served))]


@router.get("/v1/models")
async def list_models(
    models: Models, caller: CallerOf, client_version: Annotated[str | None, Query()] = None
) -> dict[str, Any]:
    """List all names that the field ``model`` may have. A model whose files are still being located is left out.

    Args:
        client_version: parameter that Codex sends. Codex expects a list ``models`` with facts about OpenAI's models,
            and repeats the request without one. If the list is empty, Codex uses its built-in facts.
    """
    named = [state for state in models.states if state.is_named]
    cards = [_card(state, name) for state in named for name in names_for(state, caller)]
    for state in named if models.is_single else ():
        cards += [_card(state, name, is_folder=True) for name in await folders_for(state, caller)]
    return {"object": "list", "data": cards, **({} if client_version is None else {"models": []})}


async def folders_for(state: ServerState, caller: Caller) -> list[str]:
    """Return the names of adapters in ``--lora-dir`` that a caller may use and that are not loaded yet."""
    return list(filter(caller.may_use, await state.models.findable()))


@router.get("/v1/models/{name:path}")
async def get_model(name: str, models: Models, caller: CallerOf) -> dict[str, Any]:
    """Get one model or adapter."""
    state = models.of(name)
    served = () if state.models.versions is None else state.models.versions.served
    if name not in state.models.names and not (
        (name in state.models.adapters or name in served) and caller.may_use(name)
    ):
        if not models.is_single or name not in await folders_for(state, caller):
            raise UnknownModel(name)
        return _card(state, name, is_folder=True)
    return _card(state, name)
