"""Answer opening: completes a prompt whose answer is read from its first token, for example the label of a question.

A prompt that ends within the reasoning is refused, because its next tokens would be reasoning and not an answer. Some
templates write a mark between the header of an answer and its text, and in a generation prompt they leave this mark to
the model. The mark is then appended to the prompt, as the template writes it before the answer of an earlier turn.
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
"""Variables that make chat templates leave out the reasoning."""
_QUESTION = {"role": "user", "content": "Probe of a question."}
_ANSWER = "Probe of an answer."


class AnswerOpening:
    """Completes the prompts of one chat template.

    Args:
        thoughts: the model's reasoning format; None for a model without reasoning.
        kwargs: variables with which the prompts are rendered.

    Raises:
        TemplateStopped: the template takes too long.
    """

    def __init__(self, tokenizer: Tokenizer, thoughts: ReasoningFormat | None, kwargs: Mapping[str, Any]) -> None:
        self._thoughts = thoughts
        self._mark = _mark_of(tokenizer, kwargs)

    def complete(self, prompt: str) -> str:
        """Return a rendered prompt, extended to the position at which the text of the answer begins.

        Raises:
            RequestError: the prompt ends within the reasoning.
        """
        if self._thoughts is not None and self._thoughts.is_open_at(prompt):
            raise RequestError(
                "This model begins every answer with a thought, so its first tokens are not an answer.", param="model"
            )
        return prompt + self._mark


def _mark_of(tokenizer: Tokenizer, kwargs: Mapping[str, Any]) -> str:
    """Return the text that the template writes between an answer's header and the answer; "" for white space only."""
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
