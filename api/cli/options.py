"""Options of the commands other than serve. A command takes several of these classes together.

They are separate from the commands' code, so that help and usage errors do not import it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...engine.config import check_options, option
from ...engine.errors import ConfigError
from ...engine.types import MAX_SEED, MIN_SEED


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Options of ``rootgraft pull``."""

    model: str | None = option(
        None, "Name on the hub (org/name). Without it: SmolLM2-135M-Instruct (Q4_1).", group="model"
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub.", group="model")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Address, key and model of a server."""

    url: str = option("http://127.0.0.1:8000/v1", "Address of an OpenAI-compatible server.", group="server")
    api_key: str | None = option(None, "Key that the server asks for.", group="server")
    model: str | None = option(None, "Model or adapter. Default: the first that the server lists.", group="server")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters; None leaves the server's default."""

    temperature: float | None = option(None, "0 is greedy. Default: the server's.", low=0, high=2, group="answer")
    top_p: float | None = option(
        None, "Share of the probability to draw from. Default: the server's.", low=0, high=1, group="answer"
    )
    seed: int | None = option(None, "Seed of the draws.", low=MIN_SEED, high=MAX_SEED, group="answer")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of ``rootgraft chat``."""

    system: str | None = option(None, "System message that opens the conversation.", group="answer")
    max_tokens: int | None = option(None, "Most tokens in an answer. Default: the server's.", low=1, group="answer")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """Options of ``rootgraft complete``."""

    prompt: str | None = option(None, "Text to continue. Without it: standard input.", group="answer")
    max_tokens: int = option(128, "Most tokens in the answer.", low=1, group="answer")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Load of ``rootgraft bench serve``. Lengths are in tokens."""

    endpoint: str = option("chat", "What to call.", choices=("chat", "completions"), group="load")
    num_prompts: int = option(100, "Requests in all.", low=1, group="load")
    request_rate: float = option(
        float("inf"), "Requests a second, arriving as a Poisson process. inf: all at once.", low=0.001, group="load"
    )
    max_concurrency: int | None = option(None, "Most requests under way at one time.", low=1, group="load")
    seed: int = option(0, "Seed of prompts and arrival times.", low=0, group="load")
    input_len: int = option(128, "Random tokens in each prompt, after the shared prefix.", low=1, group="prompts")
    shared_prefix_len: int = option(0, "Tokens that all prompts begin with.", low=0, group="prompts")
    output_len: int = option(128, "Most tokens in each answer.", low=1, group="prompts")
    ignore_eos: bool = option(False, "Generate all of --output-len, whatever the model says.", group="prompts")
    dataset: str | None = option(
        None,
        "File of JSON lines in place of random prompts: prompt (a text) or messages, and output_len if it is not "
        "--output-len.",
        group="prompts",
    )
    extra_body: str | None = option(None, "JSON object whose fields go into every request.", group="prompts")
    output_json: str | None = option(None, "File for the figures and each request's timing.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        if self.dataset is not None and self.shared_prefix_len:
            raise ConfigError("--shared-prefix-len is for random prompts: it cannot go with --dataset.")


@dataclass(frozen=True, slots=True)
class RunBatchOptions:
    """Files and server of ``rootgraft run-batch``."""

    input_file: str = option("", "JSON lines of requests in OpenAI's batch format.", group="batch", short="-i")
    output_file: str = option("", "Where answers are appended; those in it are kept.", group="batch", short="-o")
    url: str | None = option(
        None, "Address of a running server. Without it: an engine of its own, with the options below.", group="batch"
    )
    api_key: str | None = option(None, "Key that the server asks for.", group="batch")
    max_concurrency: int = option(64, "Most requests under way at one time.", low=1, high=4096, group="batch")

    def __post_init__(self) -> None:
        check_options(self)
        for flag, name in (("--input-file", self.input_file), ("--output-file", self.output_file)):
            if not name:
                raise ConfigError(f"{flag} must name a file.")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Load of ``rootgraft bench step``."""

    rows: int = option(32, "Sequences that draw one token each in every step.", low=0, group="load")
    context: int = option(128, "Tokens of each sequence at the first step.", low=1, group="load")
    shared: int = option(0, "Tokens that the contexts have in common at their start.", low=0, group="load")
    prefill: int = option(
        0, "Tokens of a new prompt that is computed in each step, beside the rows.", low=0, group="load"
    )
    steps: int = option(40, "Steps to measure, with timers and without.", low=1, group="load")
    output_json: str | None = option(None, "File for the times.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.rows and not self.prefill:
            raise ConfigError("--rows and --prefill are both 0: there is nothing to compute.")
        if self.shared >= self.context:
            raise ConfigError(f"--shared: {self.shared} tokens of {self.context}; a row needs one of its own.")


@dataclass(frozen=True, slots=True)
class KeyOptions:
    """Options of ``rootgraft key``."""

    name: str = option("default", "Name of the key, for the log.", group="key")
