"""Answer opening: completes a prompt whose answer is read from its first token, such as the label of a question.

A prompt that ends within a thought is refused, as its first tokens are none of an answer. Templates that write a mark
between the header of an answer and its text leave that mark to the model: it is added, as the template writes it before
an answer of an earlier turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from ..errors import RequestError
from .chat_template import TemplateStopped
from .reasoning_formats import ReasoningFormat

if TYPE_CHECKING:
    from .tokenizer import Tokenizer

NO_THOUGHT: Final[Mapping[str, Any]] = {"enable_thinking": False, "thinking": False}
"""Variables by which chat templates leave out the thought."""
_QUESTION = {"role": "user", "content": "Probe of a question."}
_ANSWER = "Probe of an answer."


class AnswerOpening:
    """Completes the prompts of one chat template.

    Args:
        thoughts: how the model writes thoughts; None for a model without.
        kwargs: variables with which the prompts are rendered.

    Raises:
        TemplateStopped: the template takes too long.
    """

    def __init__(self, tokenizer: Tokenizer, thoughts: ReasoningFormat | None, kwargs: Mapping[str, Any]) -> None:
        self._thoughts = thoughts
        self._mark = _mark_of(tokenizer, kwargs)

    def complete(self, prompt: str) -> str:
        """Return a rendered prompt up to the place at which the text of the answer begins.

        Raises:
            RequestError: the prompt ends within a thought.
        """
        if self._thoughts is not None and self._thoughts.is_open_at(prompt):
            raise RequestError(
                "This model begins every answer with a thought, so its first tokens are no answer.", param="model"
            )
        return prompt + self._mark


def _mark_of(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> str:
    """Return the text between the header of an answer and the answer; empty if the template shows none, or blanks."""
    try:
        header = tokenizer.render_chat([_QUESTION], add_generation_prompt=True, kwargs=dict(kwargs))
        answered = [_QUESTION, {"role": "assistant", "content": _ANSWER}]
        whole = tokenizer.render_chat(answered, add_generation_prompt=False, kwargs=dict(kwargs))
    except TemplateStopped:
        raise
    except RequestError:
        return ""
    mark, found, _ = whole.removeprefix(header).partition(_ANSWER)
    return mark if found and whole.startswith(header) and mark.strip() else ""
