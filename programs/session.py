"""Session: the root branch of a program, with its model, default parameters and token report."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from .branch import Branch
from .branch_calls import ModelBackend
from .http_backend import HttpBackend
from .token_report import Report, TokenTotals

if TYPE_CHECKING:
    from ..engine.offline.llm import LLM


_TIMEOUT, _LONGEST_TIMEOUT = 600.0, 86_400.0


class Session(Branch):
    """A conversation with a model, from which branches are forked.

    Args:
        target: address of a server (``http://127.0.0.1:8000/v1``), or the offline ``LLM``, which the session uses
            exclusively until it is closed.
        model: name of the model on the server. Default: the first model that the server lists.
        api_key: API key of the server.
        timeout: largest number of seconds without data from the server, after which a call fails. It applies until the
            first token and between tokens; for ``select`` and ``warm``, until the whole answer. Default: 600.
        max_tokens: default limit for an answer.
        temperature: default temperature; 0 is greedy.

    >>> session = Session("http://127.0.0.1:8000/v1")
    >>> session.system("Be brief.").user("The capital of France?").gen("city", max_tokens=10)
    """

    def __init__(
        self,
        target: str | LLM,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float | None = None,
        max_tokens: int = 256,
        temperature: float = 0.0,
    ) -> None:
        backend = _backend(target, model, api_key, timeout)
        super().__init__("root", backend, TokenTotals(), {"max_tokens": max_tokens, "temperature": temperature})

    def begin(self) -> Branch:
        """Return an empty conversation on the same model, whose tokens are counted in the same report."""
        branch = self._child()
        branch.messages, branch.values, branch.scores = [], {}, {}
        return branch

    def report(self) -> Report:
        return self._totals.total()

    def close(self) -> None:
        """Release the model. Afterwards the offline ``LLM`` may be used outside of the session again."""
        self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _backend(target: str | LLM, model: str | None, api_key: str | None, timeout: float | None) -> ModelBackend:
    if isinstance(target, str):
        return HttpBackend(target, model, api_key, _TIMEOUT if timeout is None else _check_timeout(timeout))
    if model is not None or api_key is not None or timeout is not None:
        raise ValueError("model, api_key and timeout are only for servers: an LLM already has its model")
    from ..engine.offline.llm import LLM
    from .offline_backend import OfflineBackend

    if not isinstance(target, LLM):
        raise ValueError(f"target must be the address of a server, or an LLM, not {type(target).__name__}")
    return OfflineBackend(target)


def _check_timeout(timeout: float) -> float:
    is_number = isinstance(timeout, (int, float)) and not isinstance(timeout, bool)
    if not (is_number and 0 < timeout <= _LONGEST_TIMEOUT):
        raise ValueError(f"timeout must be above 0 and at most {_LONGEST_TIMEOUT:g} seconds, not {timeout!r}")
    return float(timeout)
