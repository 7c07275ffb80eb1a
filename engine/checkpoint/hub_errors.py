"""Errors of the hub's client as sentences, each with the command that fixes it. No torch."""

from __future__ import annotations

import errno
import os


def hub_fault(model: str, revision: str | None, error: Exception) -> str:
    """Return the fault and its remedy, for an exception of ``snapshot_download``."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):  # before its base class, which says that there is no such model
        return (
            f"{model} is gated: accept its terms at https://huggingface.co/{model}, then use a token of that account. "
            "Try: hf auth login"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"there is no folder or file {model} here, and the hub has no such model, or it is private. Try: hf auth "
            "login, or rootgraft list for the models on this machine"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"--revision: {model} has no branch, tag or commit {revision}. Try: rootgraft pull {model}"
    if (full := _os_error(error)) is not None and full.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk of the hub's cache is full. Try: rootgraft list, then rootgraft rm NAME; or HF_HUB_CACHE=/larger"
        )
    reason = _reason(error)
    if os.environ.get("HF_HUB_OFFLINE", "0").upper() in ("1", "ON", "YES", "TRUE"):
        command = f"env -u HF_HUB_OFFLINE rootgraft pull {model}"
        return f"{model} is not in the hub's cache, and HF_HUB_OFFLINE is set. Try: {command}"
    if isinstance(error, errors.LocalEntryNotFoundError | ConnectionError) or "connect" in reason.lower():
        return (
            f"there is no folder or file {model} here, and the hub cannot be reached: {reason.rstrip('.')}. Try: "
            f"rootgraft list for the models on this machine, or HF_ENDPOINT=https://mirror rootgraft pull {model}"
        )
    return f"there is no folder or file {model} here, and it could not be downloaded from the hub: {reason}"


def _reason(error: Exception) -> str:
    """Return the first line of the innermost cause of an exception."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _os_error(error: BaseException | None) -> OSError | None:
    """Return the first OSError with an error number among an exception and its causes."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None
