"""Options of all commands except serve. A command may use several of these classes together.

They are in a separate module, so that help and usage errors do not import the commands' code.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from itertools import pairwise

from ...engine.config import check_options, option
from ...engine.errors import ConfigError
from ...engine.types import CALIBRATION_NAME, MAX_SEED, MIN_SEED

_DEFAULT_URL = (
    "Default: the environment variable ROOTGRAFT_URL, else your only running server on this machine, else its port "
    "8000."
)
_DEFAULT_KEY = (
    "Default: the environment variable ROOTGRAFT_API_KEY, which other users cannot see, unlike a command line."
)


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Options of ``rootgraft pull``."""

    model: str | None = option(
        None,
        "Name in the catalogue (rootgraft search) or on the Hugging Face Hub (org/name). Default: "
        "SmolLM2-135M-Instruct (Q4_1).",
        group="model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.", group="model")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``rootgraft run``."""

    model: str | None = option(
        None,
        "Folder, GGUF file, or name in the catalogue or on the Hugging Face Hub, such as Qwen/Qwen3-0.6B. Default: "
        "SmolLM2-135M-Instruct (Q4_1). In the chat, /help lists commands; Ctrl-D ends the chat and the server.",
        group="model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the Hub.", group="model")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of ``rootgraft quantize``."""

    model: str = option("", "Folder in Hugging Face format, or the Hub name of a downloaded model.", group="model")
    output: str = option("", "Folder to write. It must be empty or not exist.", group="model")
    scheme: str = option(
        "w4a16",
        "w4a16: 4-bit integers, a scale per group. w8a8: 8-bit integers, a scale per row. fp8: E4M3, a scale per "
        "row. nvfp4: E2M1, an E4M3 scale per 16 inputs.",
        choices=("w4a16", "w8a8", "fp8", "nvfp4"),
        group="model",
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("model", "output"):
            if not getattr(self, name):
                raise ConfigError(f"--{name} must name a folder.")


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """Address, key and model of a server."""

    url: str | None = option(None, f"Address of an OpenAI-compatible server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(None, f"API key of the server. {_DEFAULT_KEY}", group="server")
    model: str | None = option(None, "Model or adapter. Default: the first that the server lists.", group="server")


@dataclass(frozen=True, slots=True)
class FleetStatusOptions:
    """Options of ``rootgraft fleet status``."""

    url: str | None = option(None, f"Address of the server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"API key with the scope admin, if the server requires keys. {_DEFAULT_KEY}", group="server"
    )
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class KvCacheOptions:
    """Options of ``rootgraft cache``: a folder of KV, or a server."""

    kv_disk: str | None = option(
        None, "A --kv-disk folder whose server is not running. Default: ask the running server.", group="cache"
    )
    url: str = option("http://127.0.0.1:8000/v1", "Address of the server.", group="server")
    api_key: str | None = option(None, "API key with the scope admin, if the server requires keys.", group="server")
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class KvFileOptions:
    """Common options of ``rootgraft cache export`` and ``import``: a file with the KV of a folder or of a session."""

    file: str = option("", "File with the KV. It can be copied to another machine.", group="cache")
    kv_disk: str | None = option(
        None, "A --kv-disk folder whose server is not running. Default: a session on a running server.", group="cache"
    )
    url: str | None = option(None, f"Address of the server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"API key with the scope admin, if the server requires keys. {_DEFAULT_KEY}", group="server"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.file:
            raise ConfigError("--file must be given.")


@dataclass(frozen=True, slots=True)
class KvExportOptions(KvFileOptions):
    """Options of ``rootgraft cache export``."""

    session: str = option("", "Session to export, by its prompt_cache_key.", group="cache")
    tenant: str = option("", "Tenant of the key that made the session. Default: none.", group="cache")

    def __post_init__(self) -> None:
        KvFileOptions.__post_init__(self)
        if self.kv_disk is None and not self.session:
            raise ConfigError("Give --kv-disk FOLDER, or --session NAME for a session on a server.")
        if self.kv_disk is not None and self.session:
            raise ConfigError("--session exports from a server and --kv-disk from a folder: give only one of them.")


@dataclass(frozen=True, slots=True)
class KvImportOptions(KvFileOptions):
    """Options of ``rootgraft cache import``."""

    kv_disk_gib: float = option(10.0, "Maximum size of the folder after the import, in GiB.", low=0.001, high=1 << 20)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters; None selects the server's default."""

    temperature: float | None = option(
        None, "Sampling temperature; 0 is greedy. Default: the server's.", low=0, high=2, group="answer"
    )
    top_p: float | None = option(
        None,
        "Nucleus sampling: sample from the most likely tokens that have this probability together. Default: the "
        "server's.",
        low=0,
        high=1,
        group="answer",
    )
    seed: int | None = option(None, "Sampling seed.", low=MIN_SEED, high=MAX_SEED, group="answer")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """Options of ``rootgraft chat``."""

    system: str | None = option(None, "System message at the start of the conversation.", group="answer")
    max_tokens: int | None = option(
        None, "Maximum number of tokens in an answer. Default: the server's.", low=1, group="answer"
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class CompleteOptions:
    """Options of ``rootgraft complete``."""

    prompt: str | None = option(None, "Text to complete. Default: standard input.", group="answer")
    max_tokens: int = option(128, "Maximum number of tokens in the answer.", low=1, group="answer")

    def __post_init__(self) -> None:
        check_options(self)


MIXES = ("random", "shared-prefix", "schema", "adapters")
MOST_CLIENTS = 4096
_ELLIPSIS = "..."


def parse_levels(text: str) -> tuple[int, ...]:
    """Parse ``1,2,4,8`` or ``1,2,4,...,64``. Dots continue the sequence by the factor or difference of its numbers.

    The factor is used if it is a whole number and fits all numbers before the dots. Raises ConfigError.
    """
    words = [word.strip() for word in text.split(",")]
    wrong = ConfigError(
        f"--sweep must be ascending numbers of clients from 1 to {MOST_CLIENTS} such as 1,2,4,8 or 1,2,4,...,64, "
        f"not {text}."
    )
    levels: list[int] = []
    for place, word in enumerate(words):
        if word == _ELLIPSIS and 2 <= place == len(words) - 2 and words[-1].isdecimal() and len(words[-1]) < 6:
            levels += _continued(levels, int(words[-1]))
        elif word.isdecimal() and len(word) < 6:
            levels.append(int(word))
        else:
            raise wrong
    if levels != sorted(set(levels)) or not 1 <= levels[0] <= levels[-1] <= MOST_CLIENTS:
        raise wrong
    return tuple(levels)


def _continued(levels: list[int], last: int) -> list[int]:
    """Return the numbers after ``levels`` that are less than ``last``; none if ``levels`` do not ascend."""
    before, current = levels[-2:]
    if not 0 < before < current:
        return []
    grows = all(b * before == a * current for a, b in pairwise(levels)) and current % before == 0
    found: list[int] = []
    while (current := current * levels[-1] // before if grows else current + levels[-1] - before) < last:
        found.append(current)
    return found


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Load for ``rootgraft bench serve``. Lengths are in tokens."""

    endpoint: str = option("chat", "API endpoint to call.", choices=("chat", "completions"), group="load")
    num_prompts: int | None = option(
        None,
        "Number of requests. Default: 100; in a sweep, 4 per client at each level.",
        low=1,
        group="load",
    )
    request_rate: float = option(
        float("inf"), "Requests per second, arriving as a Poisson process. inf: all at once.", low=0.001, group="load"
    )
    max_concurrency: int | None = option(None, "Maximum number of concurrent requests.", low=1, group="load")
    sweep: str | None = option(
        None,
        "Measure at each of these numbers of clients: 1,2,4,8 or 1,2,4,...,64. Each client sends its next request "
        "when the last one has ended.",
        group="load",
    )
    seed: int | None = option(
        None,
        "Seed of prompts and arrival times. Default: a new one in each run, which is printed.",
        low=0,
        group="load",
    )
    temperature: float = option(1.0, "Temperature of every request.", low=0, high=2, group="load")
    mix: tuple[str, ...] = option(
        ("random",),
        "Kinds of requests, in turn: random, shared-prefix, schema, adapters (the base model and --adapters).",
        group="prompts",
        words=True,
    )
    adapters: tuple[str, ...] = option((), "Names of adapters for the mix of that name.", group="prompts", words=True)
    input_len: int = option(
        128, "Number of random tokens in each prompt, after the shared prefix.", low=1, group="prompts"
    )
    shared_prefix_len: int = option(
        0,
        "Number of tokens at the start of all prompts of a kind. Default for the mix shared-prefix: 1024.",
        low=0,
        group="prompts",
    )
    output_len: int = option(128, "Maximum number of tokens in each answer.", low=1, group="prompts")
    ignore_eos: bool = option(False, "Ignore the end token and generate --output-len tokens.", group="prompts")
    dataset: str | None = option(
        None,
        "JSON Lines file with the requests instead of random prompts. Each line has prompt (a string) or messages, "
        "and optionally output_len, which overrides --output-len.",
        group="prompts",
    )
    extra_body: str | None = option(None, "JSON object whose fields are added to every request.", group="prompts")
    output_json: str | None = option(None, "File for the results and the timing of each request.", group="output")
    output_chart: str | None = option(
        None, "File for a chart of the sweep: .svg, or .png if cairosvg is installed.", group="output"
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_mix()
        if self.sweep is None:
            if self.output_chart is not None:
                raise ConfigError("--output-chart needs --sweep, whose results it draws.")
            return
        _ = self.levels
        for flag, is_set in (
            ("--max-concurrency", self.max_concurrency is not None),
            ("--request-rate", self.request_rate != float("inf")),
            ("--dataset", self.dataset is not None),
        ):
            if is_set:
                raise ConfigError(f"{flag} cannot be used with --sweep, whose clients send their requests one by one.")
        if self.output_chart is not None and not self.output_chart.lower().endswith((".svg", ".png")):
            raise ConfigError(f"--output-chart must end in .svg or .png, not {self.output_chart}.")

    def _check_mix(self) -> None:
        if unknown := [name for name in self.mix if name not in MIXES]:
            raise ConfigError(f"--mix must be of {', '.join(MIXES)}, not {unknown[0]}.")
        if not self.mix:
            raise ConfigError(f"--mix must name at least one of {', '.join(MIXES)}.")
        if self.dataset is not None and (self.shared_prefix_len or self.mix != ("random",)):
            flag = "--shared-prefix-len" if self.shared_prefix_len else "--mix"
            raise ConfigError(f"{flag} is for random prompts: it cannot be used with --dataset.")
        if ("adapters" in self.mix) != bool(self.adapters):
            raise ConfigError("--mix adapters and --adapters NAME... must be given together.")
        if "schema" in self.mix and self.endpoint != "chat":
            raise ConfigError("--mix schema needs --endpoint chat, because it sends response_format.")

    @property
    def num_requests(self) -> int:
        """Number of requests of a run without a sweep."""
        return 100 if self.num_prompts is None else self.num_prompts

    @property
    def levels(self) -> tuple[int, ...]:
        """Numbers of clients for ``--sweep``, ascending. Raises ConfigError."""
        return parse_levels(self.sweep or "")


@dataclass(frozen=True, slots=True)
class RunBatchOptions:
    """Files and server of ``rootgraft run-batch``."""

    input_file: str = option("", "JSON Lines file of requests in OpenAI's batch format.", group="batch", short="-i")
    output_file: str = option(
        "", "File to append the answers to. Answers already in it are kept.", group="batch", short="-o"
    )
    url: str | None = option(
        None, "Address of a running server. Default: start an engine with the options below.", group="batch"
    )
    api_key: str | None = option(None, "API key of the server.", group="batch")
    max_concurrency: int = option(64, "Maximum number of concurrent requests.", low=1, high=4096, group="batch")

    def __post_init__(self) -> None:
        check_options(self)
        for flag, name in (("--input-file", self.input_file), ("--output-file", self.output_file)):
            if not name:
                raise ConfigError(f"{flag} must name a file.")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """Load for ``rootgraft bench step``."""

    rows: int = option(32, "Number of sequences that generate one token each in every step.", low=0, group="load")
    context: int = option(128, "Number of tokens in each sequence at the first step.", low=1, group="load")
    shared: int = option(
        0, "Number of tokens at the start of the contexts that all of them share.", low=0, group="load"
    )
    prefill: int = option(
        0,
        "Number of tokens of a new prompt in each step, beside the rows. It is not chunked, whatever --target-itl-ms "
        "is.",
        low=0,
        group="load",
    )
    steps: int = option(40, "Number of steps to measure, once with timers and once without.", low=1, group="load")
    output_json: str | None = option(None, "File for the times.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.rows and not self.prefill:
            raise ConfigError("--rows and --prefill are both 0: there is nothing to compute.")
        if self.shared >= self.context:
            raise ConfigError(
                f"--shared ({self.shared}) must be less than --context ({self.context}): each row needs at least one "
                "token of its own."
            )


@dataclass(frozen=True, slots=True)
class KeyFileOptions:
    """The key file of the ``rootgraft key`` commands."""

    api_key_file: str = option(
        "", "The server's --api-key-file (.toml or .json). The server applies changes at once.", group="key"
    )

    def __post_init__(self) -> None:
        if not self.api_key_file:
            raise ConfigError("--api-key-file must name the server's key file; rootgraft key add creates it.")
        if not self.api_key_file.endswith((".toml", ".json")):
            raise ConfigError(f"--api-key-file must end in .toml or .json, not {self.api_key_file}.")


@dataclass(frozen=True, slots=True)
class KeyNameOptions(KeyFileOptions):
    """The key that ``rootgraft key revoke`` and ``key rotate`` change."""

    name: str = option("", "Name of the key, as rootgraft key list shows it.", group="key")

    def __post_init__(self) -> None:
        KeyFileOptions.__post_init__(self)
        if not re.fullmatch(r"[A-Za-z0-9._@:-]{1,64}", self.name):
            raise ConfigError(f"--name must be 1 to 64 letters, digits and ._@:-, not {self.name[:80]!r}.")


@dataclass(frozen=True, slots=True)
class KeyAddOptions(KeyNameOptions):
    """Permissions of the new key in ``rootgraft key add``."""

    tenant: str | None = option(
        None,
        "Tenant of the key. Keys of one tenant share cached KV and turns in the queue. Default: the key's name.",
        group="rights",
    )
    scopes: tuple[str, ...] = option(
        ("inference",), "What the key may do: inference, metrics, admin.", group="rights", words=True
    )
    adapters: tuple[str, ...] = option(
        (), "Adapters that the key may use besides the base model. Default: all.", group="rights", words=True
    )
    requests_per_minute: int | None = option(None, "Default: no limit.", low=1, group="rights")
    tokens_per_minute: int | None = option(None, "Default: no limit.", low=1, group="rights")
    priority: str = option(
        "interactive",
        "Priority class of the key's requests, and the highest that they may ask for.",
        choices=("realtime", "interactive", "batch"),
        group="rights",
    )

    def __post_init__(self) -> None:
        KeyNameOptions.__post_init__(self)
        check_options(self)


@dataclass(frozen=True, slots=True)
class KeyListOptions(KeyFileOptions):
    """Options of ``rootgraft key list``."""

    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class CalibrateOptions:
    """Options of ``rootgraft calibrate``."""

    data: str = option("", "JSON Lines file of labelled examples, each with input and answer.", group="calibration")
    question: str = option("", "JSON file with the question, as in POST /v1/decisions.", group="calibration")
    name: str = option("", "Name of the calibration, which requests refer to.", group="calibration")
    calibration_dir: str = option("", "The server's --calibration-dir.", group="calibration")
    bias: bool = option(False, "Also fit a bias for each label.", group="calibration")
    answer_with: str = option("letters", "As in requests.", choices=("letters", "values"), group="calibration")
    json: bool = option(False, "Print JSON for programs.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("data", "question", "name", "calibration_dir"):
            if not getattr(self, name):
                raise ConfigError(f"--{name.replace('_', '-')} must be given.")
        if not re.fullmatch(CALIBRATION_NAME, self.name):
            raise ConfigError("--name must be 1 to 64 letters, digits and ._@:-, and not begin with a dot.")


@dataclass(frozen=True, slots=True)
class UsageOptions:
    """Options of ``rootgraft usage``."""

    usage_ledger: str = option("", "The server's --usage-ledger file.", group="usage")
    by: str = option(
        "model",
        "What to group by: day, month, key, model or adapter (both show the base model's or the adapter's name), or "
        "tenant (from --api-key-file).",
        choices=("day", "month", "key", "model", "adapter", "tenant"),
        group="usage",
    )
    since: str | None = option(None, "First day in UTC, such as 2026-11-01.", group="usage")
    until: str | None = option(None, "Last day in UTC.", group="usage")
    api_key_file: str | None = option(None, "Key file that gives the tenant of each key.", group="usage")
    prices: str | None = option(
        None, "TOML file of prices per million tokens; adds a column with the cost.", group="usage"
    )
    csv: bool = option(False, "Print comma-separated values.", group="output")
    json: bool = option(False, "Print JSON for programs.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.usage_ledger:
            raise ConfigError("--usage-ledger must name the server's --usage-ledger file.")
        for name in ("since", "until"):
            day = getattr(self, name)
            try:
                is_day = day is None or date.fromisoformat(day).isoformat() == day
            except ValueError:
                is_day = False
            if not is_day:
                raise ConfigError(f"--{name} must be a day such as 2026-11-01, not {day}.")
        if (self.by == "tenant") > (self.api_key_file is not None):
            raise ConfigError("--by tenant needs --api-key-file, which gives the tenant of each key.")
        if self.csv and self.json:
            raise ConfigError("--csv and --json cannot be used together.")


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Address and administrator's key of a server, for ``rootgraft models``."""

    url: str | None = option(None, f"Address of a rootgraft server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"API key with the scope admin, if the server requires keys. {_DEFAULT_KEY}", group="server"
    )
    json: bool = option(False, "Print the server's answer as JSON, for programs.", group="output")


@dataclass(frozen=True, slots=True)
class NameOptions:
    """Name for ``rootgraft models rollback`` and ``remove``."""

    name: str = option("", "A name in the server's model catalogue; NAME@DIGEST is one version of it.", group="model")

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("--name must be a name that rootgraft models list shows.")
        _ = self.parts

    @property
    def parts(self) -> tuple[str, str | None]:
        """Return the name and the version; None for the version if there is none. Raises ConfigError."""
        name, at, version = self.name.partition("@")
        if not name or (at and not version):
            raise ConfigError(f"--name must be NAME or NAME@DIGEST, not {self.name}.")
        return name, version or None


@dataclass(frozen=True, slots=True)
class VersionOptions(NameOptions):
    """Version for ``rootgraft models promote`` and ``canary``."""

    def __post_init__(self) -> None:
        if self.name and self.parts[1] is None:
            raise ConfigError(
                f"--name must include a version, such as {self.name}@3f2a9c: the first digits of its digest."
            )
        if not self.name:
            raise ConfigError("--name must be NAME@DIGEST of a version that rootgraft models list shows.")


@dataclass(frozen=True, slots=True)
class CanaryOptions:
    """Share of requests for ``rootgraft models canary``."""

    weight: int = option(10, "Percentage of new requests to route to the version.", low=1, high=99, group="model")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class AddOptions:
    """The version that ``rootgraft models add`` adds."""

    name: str = option("", "Name to add the version to.", group="model")
    source: str = option(
        "", "hf://org/name@revision, s3://bucket/folder, https://host/folder or file:///folder.", group="model"
    )
    digest: str | None = option(None, "Expected SHA-256 of the content.", group="model")
    base: str | None = option(None, "Base model of the adapter, if the server has several.", group="model")

    def __post_init__(self) -> None:
        for flag, value in (("--name", self.name), ("--source", self.source)):
            if not value:
                raise ConfigError(f"{flag} must be given. Try: rootgraft models add sql --source file:///srv/sql")
