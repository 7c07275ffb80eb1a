"""Every error that the engine raises on purpose, and what it becomes outside.

    EngineError
    ├── RequestError          the request is wrong; asking again will not help       HTTP 400
    │   ├── GrammarRefused    a form of answer that cannot be promised               HTTP 400
    │   ├── ContextTooLong    prompt + answer exceed the model's length              HTTP 400
    │   └── UnknownModel      no base model or adapter of that name                  HTTP 404
    ├── CapacityError         right request, wrong moment; may be asked again        HTTP 503
    ├── DeadlineExceeded      it did not begin within the time that it was given       HTTP 504
    ├── EngineDead            the engine process is gone or hangs                    HTTP 503
    ├── ModelError            weights, tokenizer or config that we do not compute    stops the start
    └── ConfigError           options that contradict each other                     stops the start

A message names the field, quotes what was given and says what would be right. It never holds a path, an
address or a traceback. Anything else that escapes is a bug: HTTP 500, without details.
"""


class EngineError(Exception):
    """Root of the tree: an error with a text that its user may read."""


class RequestError(EngineError):
    """The request can never succeed as it stands.

    Args:
        message: what is wrong, with limit and value.
        param: the request's field, in OpenAI's spelling (``"messages[0].content"``), if there is one.
        code: a stable machine-readable code, if clients know one (``"context_length_exceeded"``).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(RequestError):
    """Prompt and answer together do not fit the model's length."""

    def __init__(
        self, num_prompt: int, num_new: int, limit: int, *, param: str | None = None, at_least: bool = False
    ) -> None:
        asked = f"{num_prompt} in the prompt and {num_new} for the answer" if num_new else f"{num_prompt}"
        asked = f"at least {asked}" if at_least else asked
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request asks for {asked}. "
            "Shorten the prompt or ask for a shorter answer.",
            param=param,
            code="context_length_exceeded",
        )


_LONGEST_PLACE = 120  # characters of a pointer in a message, from its end; ``GrammarRefused.pointer`` is whole


class GrammarRefused(RequestError):
    """A form of answer that cannot be promised.

    Args:
        keyword: the schema's keyword, or the kind of grammar, that is to blame.
        pointer: JSON Pointer to it from the root of ``param``; ``""`` is the root.
        reason: what is wrong.
        param: the field that asked for the form; None as long as only the engine has seen it.
    """

    def __init__(self, keyword: str, pointer: str, reason: str, *, param: str | None = None) -> None:
        subject = f"'{param}'" if param else "The grammar"
        place = pointer if len(pointer) <= _LONGEST_PLACE else f"...{pointer[-_LONGEST_PLACE:]}"
        where = f" at {place!r}" if place else ""
        super().__init__(f"{subject} cannot be promised: {keyword!r}{where}: {reason}.", param=param)
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason


class UnknownModel(RequestError):
    """The ``model`` field names neither the base model nor an adapter."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model {name!r} does not exist.", param="model", code="model_not_found")


class CapacityError(EngineError):
    """A correct request that cannot be taken now."""


class DeadlineExceeded(EngineError):
    """The time that a request was given is up, and it has no token yet."""


class EngineDead(EngineError):
    """The engine process has ended or no longer makes progress."""


class ModelError(EngineError):
    """A model that we do not compute exactly, or files that are not what they claim to be."""


class ConfigError(EngineError):
    """Options that are unknown, out of range or contradict each other."""
