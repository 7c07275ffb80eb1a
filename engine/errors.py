"""Error types of the engine and their HTTP status.

    EngineError
    ├── RequestError          the request is wrong; repeating it will not help       HTTP 400
    │   ├── GrammarRefused    an output format that cannot be guaranteed             HTTP 400
    │   ├── ContextTooLong    the prompt leaves no room in the model's length        HTTP 400
    │   └── UnknownModel      no base model or adapter of that name                  HTTP 404
    │       └── AdapterNotFound   a source has no such adapter, or may not be read   HTTP 404
    ├── CapacityError         a valid request that may be repeated later             HTTP 503
    │   └── AdapterUnavailable    it is being downloaded, or its source is silent    HTTP 503
    ├── DeadlineExceeded      no token within the time given                         HTTP 504
    ├── EngineDead            the engine process is gone or hangs                    HTTP 503
    ├── ModelError            weights, tokenizer or config that we do not compute    stops the start
    │   ├── UnknownArchitecture   the class belongs to no supported family           stops the start
    │   └── NotDownloaded     a model of the hub that is not on this machine         stops the command
    └── ConfigError           options that contradict each other                     stops the start

A message names the field, quotes its value and says what is allowed. It contains no path, address or traceback. Any
other exception is a bug: HTTP 500, without details.
"""

MOST_CHARACTERS = 2000  # Limit of the characters of a message.
MOST_QUOTED = 80  # Limit of the characters of a value that a message quotes.


def shortened(text: str, most: int = MOST_QUOTED) -> str:
    """Return a text of at most ``most`` characters. The middle of a longer text is replaced by dots."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[: most - 3 - half]}...{text[-half:]}"


def quoted(value: object) -> str:
    """Return a value from a file or a request in the form for messages: its ``repr``, shortened."""
    return shortened(repr(value))


class EngineError(Exception):
    """Base class of the engine's errors, whose text is written for the user.

    The text is cut to 2,000 characters, and lone surrogates, such as a quoted JSON file may have, are escaped. So it
    can always be printed and sent.
    """

    def __init__(self, message: str) -> None:
        super().__init__(shortened(message, MOST_CHARACTERS).encode(errors="backslashreplace").decode())


class RequestError(EngineError):
    """A wrong request, which cannot succeed unchanged.

    Args:
        message: the error, with limit and value.
        param: the request's field in OpenAI's spelling (``"messages[0].content"``), if any.
        code: OpenAI's machine-readable code (``"context_length_exceeded"``), if any.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(RequestError):
    """The prompt leaves no room for an answer in the model's length.

    Attributes:
        num_prompt: number of tokens of the prompt.
        limit: the model's length.
    """

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
        self.num_prompt, self.limit = num_prompt, limit


# Number of characters, counted from the end, of a pointer in a message; ``GrammarRefused.pointer`` has all.
_LONGEST_POINTER = 120


class GrammarRefused(RequestError):
    """An output format that cannot be guaranteed.

    Args:
        keyword: the schema keyword or the kind of grammar that is refused.
        pointer: JSON Pointer to it from the root of ``param``; ``""`` is the root.
        reason: the error.
        param: the request's field; None inside the engine.
    """

    def __init__(self, keyword: str, pointer: str, reason: str, *, param: str | None = None) -> None:
        subject = f"'{param}'" if param else "The grammar"
        shown = pointer if len(pointer) <= _LONGEST_POINTER else f"...{pointer[-_LONGEST_POINTER:]}"
        where = f" at {shown!r}" if shown else ""
        super().__init__(f"{subject} cannot be enforced: {keyword!r}{where}: {reason}.", param=param)
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason


class UnknownModel(RequestError):
    """The ``model`` field names neither the base model nor an adapter."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The model {quoted(name)} does not exist.", param="model", code="model_not_found")


class AdapterNotFound(UnknownModel):
    """A source of adapters does not have this one, or does not let the server read it."""

    def __init__(self, message: str) -> None:
        RequestError.__init__(self, message, param="model", code="model_not_found")


class CapacityError(EngineError):
    """A correct request that cannot be accepted now."""


class AdapterUnavailable(CapacityError):
    """An adapter that is being downloaded, or whose source cannot be reached."""


class DeadlineExceeded(EngineError):
    """A request got no token within its deadline."""


class EngineDead(EngineError):
    """The engine process has ended or hangs."""


class ModelError(EngineError):
    """A model that is not supported exactly, or malformed files."""


class UnknownArchitecture(ModelError):
    """A class in ``architectures`` that belongs to no supported family; the transformers library may have it."""

    def __init__(self, message: str, architecture: str) -> None:
        super().__init__(message)
        self.architecture = architecture


class NotDownloaded(ModelError):
    """A model of the hub that is not on this machine, in a case in which it may not be downloaded."""


class ConfigError(EngineError):
    """Options that are unknown, out of range or contradict each other."""
