"""``rootgraft search`` and ``rootgraft show``: print models of the catalogue and whether they fit on this machine."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict

from ....engine.checkpoint.catalogue import LAPTOP_BANDWIDTH, CatalogueModel, catalogue, family_sizes, search_catalogue
from ....engine.checkpoint.locate import resolve_model
from ....engine.config import EngineConfig
from ....engine.errors import ModelError
from ....engine.machine.resources import memory
from ....engine.machine.software import driver, probe_torch
from ....engine.peer_options import nearest
from .machine_options import SearchOptions, ShowOptions
from .text_table import bytes_text, text_table

_HEAD = ("NAME", "WEIGHTS", "FORM", "MEMORY", "TOKENS/S", "FITS", "USE", "LICENCE")


def search(options: SearchOptions) -> int:
    """Print the models of the catalogue that match all words. Returns 0, or 1 without a match."""
    found, room = search_catalogue(options.words), _room()
    if options.json:
        print(json.dumps([_fields(model, room) for model in found], indent=2))
        return int(not found)
    if not found:
        print(f"No model in the catalogue matches {options.words!r}. Try: rootgraft search", file=sys.stderr)
        return 1
    print(text_table(_HEAD, [_row(model, room) for model in found]))
    print(
        "\nMEMORY: weights and the KV of 8,192 tokens. TOKENS/S: upper bound for one answer with a memory bandwidth "
        f"of {LAPTOP_BANDWIDTH:.0f} GB/s, as in a typical laptop. Try: rootgraft run NAME"
    )
    return 0


def show(options: ShowOptions) -> int:
    """Print the catalogue's data of a model, and whether the model is on this machine. Returns 0.

    Raises:
        ModelError: the catalogue has no such model.
    """
    model = catalogue().get(options.model)
    if model is None:
        if family := family_sizes(options.model):
            raise ModelError(f"the catalogue has no {options.model}; it has {', '.join(family)}. Try: rootgraft search")
        raise ModelError(
            f"the catalogue has no {options.model}.{nearest(options.model, catalogue())} For a folder, a file or a "
            f"downloaded model: rootgraft doctor {options.model}"
        )
    room = _room()
    fields = _fields(model, room)
    if options.json:
        print(json.dumps(fields, indent=2))
        return 0
    repository, _, tag = model.repository.partition(":")
    rows: Mapping[str, str] = {
        "model": model.name,
        "from": f"https://huggingface.co/{repository}" + (f", the file {tag}" if tag else ""),
        "weights": f"{bytes_text(model.gigabytes * 1e9)}, {model.form}",
        "memory": f"{bytes_text(model.memory_bytes)} with the KV of 8,192 tokens; {bytes_text(room)} are free here",
        "context": f"{model.context:,} tokens",
        "use": model.use,
        "licence": model.license,
        "here": f"yes: rootgraft serve {model.name}" if fields["downloaded"] else f"no: rootgraft pull {model.name}",
    }
    print("\n".join(f"{name:8} {value}" for name, value in rows.items()))
    return 0


def _row(model: CatalogueModel, room: float) -> tuple[str, ...]:
    return (
        model.name,
        bytes_text(model.gigabytes * 1e9),
        model.form,
        bytes_text(model.memory_bytes),
        f"{model.laptop_tokens_per_second:.0f}",
        "yes" if model.memory_bytes <= room else "no",
        model.use,
        model.license,
    )


def _fields(model: CatalogueModel, room: float) -> dict[str, object]:
    return asdict(model) | {
        "memory_bytes": round(model.memory_bytes),
        "fits": model.memory_bytes <= room,
        "downloaded": _is_downloaded(model),
    }


def _is_downloaded(model: CatalogueModel) -> bool:
    try:
        resolve_model(model.name, on_machine=True)
    except ModelError:
        return False
    return True


def _room() -> float:
    """Return the number of bytes that a server may use, of the first GPU's memory or else of available main memory."""
    share = EngineConfig().gpu_memory_utilization
    devices = probe_torch().devices if driver() is not None else ()
    if devices:
        return share * devices[0][1]
    found = memory()
    return found.available - (1 - share) * found.total
