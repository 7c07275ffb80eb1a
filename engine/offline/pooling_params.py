"""``PoolingParams`` as in vLLM: parameters of embeddings and classification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import RequestError
from .sampling_params import RequestOutputKind
from .vllm_table import check_values

PoolingTask = Literal["embed", "classify"]


@dataclass
class PoolingParams:
    """Parameters of pooled outputs. ``vllm_classes.toml`` describes the effect of each field.

    Attributes:
        dimensions: number of leading values of an embedding to return; they are normalized to length 1 again.
        normalize: whether embeddings have length 1; by default as the checkpoint defines.
    """

    dimensions: int | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    truncate_prompt_tokens: int | None = None
    step_tag_id: int | None = None
    returned_token_ids: Sequence[int] | None = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    late_interaction_params: Any = None
    late_chunking_params: Any = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY

    def check(self) -> None:
        """Raise RequestError, which names the field, if a field requests what this engine does not support."""
        check_values("PoolingParams", vars(self), dict.fromkeys(("use_activation", "softmax", "activation"), True))


def read_pooling_params(params: Any, num_prompts: int) -> PoolingParams:
    """Return the one set of parameters that applies to all prompts of a call.

    Args:
        params: parameters for all prompts, one for each prompt, or None.

    Raises:
        RequestError: the argument has another form, the prompts have different parameters, or a field is refused.
    """
    given = [PoolingParams()] if params is None else [params] if isinstance(params, PoolingParams) else params
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, PoolingParams) for each in given):
        right = "PoolingParams, or a list with one for each prompt"
        raise RequestError(f"pooling_params must be {right}, not {type(params).__name__}.", param="pooling_params")
    if len(given) not in (1, num_prompts) or any(each != given[0] for each in given):
        raise RequestError(
            f"pooling_params must be the same for all {num_prompts} prompts: call once for each kind.",
            param="pooling_params",
        )
    given[0].check()
    return given[0]


def read_pooling_task(task: str | None, default: Callable[[], PoolingTask]) -> PoolingTask:
    """Return ``embed`` or ``classify``, without a task what ``default`` returns. Raises RequestError for another."""
    if task in (None, ""):
        return default()
    if task == "embed":
        return "embed"
    if task == "classify":
        return "classify"
    raise RequestError(f"pooling_task must be embed or classify, not {task!r}.", param="pooling_task")
