"""New sequences: what a ``Submit`` asks for, as the scheduler takes it."""

from __future__ import annotations

import random
import time

from ...radix.namespace import ENDLESS
from ..errors import RequestError
from ..messages import Submit
from ..sequence.sequence import Sequence
from ..types import Pooler
from .adapter_manager import Adaptation
from .step_worker import StepWorker


def new_sequence(submit: Submit, adaptation: Adaptation, worker: StepWorker, seeds: random.Random) -> Sequence:
    """Make the sequence of a ``Submit``.

    Args:
        adaptation: its adapter.
        seeds: of sequences that name none.

    Raises:
        RequestError: it has as many generated tokens as it may have, or may draw none, or the model has no head for it.
    """
    _check_kind(submit, worker.pooler, adaptation.num_classes or len(worker.pooler.labels))
    params, room = submit.params, worker.max_model_len - len(submit.tokens)
    if len(submit.generated) >= min(params.max_tokens, room) and submit.generated:
        raise RequestError(
            f"generated must be fewer tokens than max_tokens ({params.max_tokens}) and than fit the model "
            f"({room}), not {len(submit.generated)}.",
            param="generated",
        )
    ends = () if params.ignore_eos else (*worker.eos_ids, *submit.ends)
    stops = frozenset((*ends, *params.stop_token_ids))
    if params.min_tokens and params.allowed_token_ids and stops.issuperset(params.allowed_token_ids):
        raise RequestError(
            "allowed_token_ids leaves nothing to draw before min_tokens: all of them end the answer.",
            param="allowed_token_ids",
        )
    seed = params.seed if params.seed is not None else seeds.getrandbits(63)
    tokens = submit.tokens + submit.generated
    switch = worker.rope_switch
    is_long = len(tokens) > switch
    return Sequence(
        id=submit.id,
        tokens=tokens,
        num_prompt=len(submit.tokens),
        params=params,
        path=adaptation.path.as_long() if is_long else adaptation.path,
        stop_ids=stops,
        seed=seed,
        arrival=time.monotonic(),
        max_model_len=worker.max_model_len,
        rope_switch=ENDLESS if is_long else switch,
        adapter=adaptation.adapter,
        adapted_from=adaptation.adapted_from,
        vocabulary=submit.vocabulary,
        vocab_size=adaptation.vocab_size,
        tenant=submit.tenant,
        priority=submit.priority,
        session=submit.session,
        pins=(*submit.prefix_pins, (len(submit.tokens), submit.pin_seconds)),
    )


def _check_kind(submit: Submit, pooler: Pooler, num_classes: int) -> None:
    """Check that the model has what gives the kind of answer that is asked for. Raises RequestError.

    Args:
        num_classes: of the model's classification head, or of its adapter's.
    """
    pooling = submit.params.pooling
    if not pooling and not pooler.generates:
        other = "classify" if pooler.labels else "embeddings"
        raise RequestError(f"This model has no language head, so it writes nothing: ask /v1/{other}.", param="model")
    if pooling == "classify" and not num_classes:
        raise RequestError(
            "This model has no classification head: load a ...ForSequenceClassification, or ask for one of several "
            "labels with /v1/decisions.",
            param="model",
        )
    if pooling == "embed" and pooler.refusal:
        raise RequestError(f"Embeddings of this model are not computed: {pooler.refusal}.", param="model")
