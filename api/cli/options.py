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
    "Default: the variable ROOTGRAFT_URL, else the only server that you run on this machine, else port 8000 of it."
)
_DEFAULT_KEY = "Default: the variable ROOTGRAFT_API_KEY, which other users cannot see as they can a command line."


@dataclass(frozen=True, slots=True)
class PullOptions:
    """Options of ``rootgraft pull``."""

    model: str | None = option(
        None,
        "Name in the catalogue (rootgraft search) or on the hub (org/name). Without it: SmolLM2-135M-Instruct (Q4_1).",
        group="model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub.", group="model")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of ``rootgraft run``."""

    model: str | None = option(
        None,
        "Folder, GGUF file, name in the catalogue or on the hub, such as Qwen/Qwen3-0.6B. Without it: "
        "SmolLM2-135M-Instruct (Q4_1). In the chat, /help lists commands, and Ctrl-D ends it and the server.",
        group="model",
    )
    revision: str | None = option(None, "Branch, tag or commit of a model on the hub.", group="model")


@dataclass(frozen=True, slots=True)
class QuantizeOptions:
    """Options of ``rootgraft quantize``."""

    model: str = option("", "Folder in Hugging Face format, or a name on the hub that was downloaded.", group="model")
    output: str = option("", "Folder to write; it must not exist, or be empty.", group="model")
    scheme: str = option(
        "w4a16",
        "w4a16: integers of 4 bits with scales of groups. w8a8: of 8 bits, fp8: E4M3, both with scales of rows. nvfp4: "
        "E2M1 with scales in E4M3 of 16 inputs.",
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
    api_key: str | None = option(None, f"Key that the server asks for. {_DEFAULT_KEY}", group="server")
    model: str | None = option(None, "Model or adapter. Default: the first that the server lists.", group="server")


@dataclass(frozen=True, slots=True)
class FleetStatusOptions:
    """Options of ``rootgraft fleet status``."""

    url: str | None = option(None, f"Address of the server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"Key with the scope admin, where the server asks for keys. {_DEFAULT_KEY}", group="server"
    )
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class KvCacheOptions:
    """Options of ``rootgraft cache``: a folder of KV, or a server."""

    kv_disk: str | None = option(
        None, "Folder of --kv-disk, whose server is not running. Without it: ask the server.", group="cache"
    )
    url: str = option("http://127.0.0.1:8000/v1", "Address of the server.", group="server")
    api_key: str | None = option(None, "Key with the scope admin, where the server asks for keys.", group="server")
    json: bool = option(False, "Print JSON for programs.", group="output")


@dataclass(frozen=True, slots=True)
class KvFileOptions:
    """Common options of ``rootgraft cache export`` and ``import``: a file with the KV of a folder or of a session."""

    file: str = option("", "File of KV, which can be taken to another machine.", group="cache")
    kv_disk: str | None = option(
        None, "Folder of --kv-disk, whose server is not running. Without it: a session of a server.", group="cache"
    )
    url: str | None = option(None, f"Address of the server. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"Key with the scope admin, where the server asks for keys. {_DEFAULT_KEY}", group="server"
    )

    def __post_init__(self) -> None:
        check_options(self)
        if not self.file:
            raise ConfigError("--file must be named.")


@dataclass(frozen=True, slots=True)
class KvExportOptions(KvFileOptions):
    """Options of ``rootgraft cache export``."""

    session: str = option("", "Session (prompt_cache_key) of a server.", group="cache")
    tenant: str = option("", "Tenant of the key that the session is of. Default: none.", group="cache")

    def __post_init__(self) -> None:
        KvFileOptions.__post_init__(self)
        if self.kv_disk is None and not self.session:
            raise ConfigError("--kv-disk must be named, or with --session a session of a server.")
        if self.kv_disk is not None and self.session:
            raise ConfigError("--session is of a server, and --kv-disk a folder: name one of them.")


@dataclass(frozen=True, slots=True)
class KvImportOptions(KvFileOptions):
    """Options of ``rootgraft cache import``."""

    kv_disk_gib: float = option(10.0, "Most GiB of files in the folder after an import.", low=0.001, high=1 << 20)


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling parameters; None selects the server's default."""

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

    endpoint: str = option("chat", "What to call.", choices=("chat", "completions"), group="load")
    num_prompts: int | None = option(
        None,
        "Requests in all, 100 by default; in a sweep at each level, by default 4 for each client.",
        low=1,
        group="load",
    )
    request_rate: float = option(
        float("inf"), "Requests a second, arriving as a Poisson process. inf: all at once.", low=0.001, group="load"
    )
    max_concurrency: int | None = option(None, "Most requests under way at one time.", low=1, group="load")
    sweep: str | None = option(
        None,
        "Measure at each of these numbers of clients, which send their next request when the last one has ended: "
        "1,2,4,8 or 1,2,4,...,64.",
        group="load",
    )
    seed: int | None = option(
        None, "Seed of prompts and arrival times. Default: a new one in each run, which is told.", low=0, group="load"
    )
    temperature: float = option(1.0, "Temperature of every request.", low=0, high=2, group="load")
    mix: tuple[str, ...] = option(
        ("random",),
        "Kinds of requests, in turn: random, shared-prefix, schema, adapters (the base model and --adapters).",
        group="prompts",
        words=True,
    )
    adapters: tuple[str, ...] = option((), "Names of adapters for the mix of that name.", group="prompts", words=True)
    input_len: int = option(128, "Random tokens in each prompt, after the shared prefix.", low=1, group="prompts")
    shared_prefix_len: int = option(
        0, "Tokens that all prompts of a kind begin with. The mix shared-prefix: 1024.", low=0, group="prompts"
    )
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
    output_chart: str | None = option(
        None, "File for the curves of a sweep: .svg, or .png where cairosvg is installed.", group="output"
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._check_mix()
        if self.sweep is None:
            if self.output_chart is not None:
                raise ConfigError("--output-chart draws the curves of a sweep: it needs --sweep.")
            return
        _ = self.levels
        for flag, is_set in (
            ("--max-concurrency", self.max_concurrency is not None),
            ("--request-rate", self.request_rate != float("inf")),
            ("--dataset", self.dataset is not None),
        ):
            if is_set:
                raise ConfigError(f"{flag} cannot go with --sweep, whose clients send their requests one by one.")
        if self.output_chart is not None and not self.output_chart.lower().endswith((".svg", ".png")):
            raise ConfigError(f"--output-chart must end in .svg or .png, not be {self.output_chart}.")

    def _check_mix(self) -> None:
        if unknown := [name for name in self.mix if name not in MIXES]:
            raise ConfigError(f"--mix must be of {', '.join(MIXES)}, not {unknown[0]}.")
        if not self.mix:
            raise ConfigError(f"--mix must name at least one of {', '.join(MIXES)}.")
        if self.dataset is not None and (self.shared_prefix_len or self.mix != ("random",)):
            flag = "--shared-prefix-len" if self.shared_prefix_len else "--mix"
            raise ConfigError(f"{flag} is for random prompts: it cannot go with --dataset.")
        if ("adapters" in self.mix) != bool(self.adapters):
            raise ConfigError("--mix adapters and --adapters NAME... go together.")
        if "schema" in self.mix and self.endpoint != "chat":
            raise ConfigError("--mix schema needs --endpoint chat, whose response_format it asks for.")

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
    """Load for ``rootgraft bench step``."""

    rows: int = option(32, "Sequences that draw one token each in every step.", low=0, group="load")
    context: int = option(128, "Tokens of each sequence at the first step.", low=1, group="load")
    shared: int = option(0, "Tokens that the contexts have in common at their start.", low=0, group="load")
    prefill: int = option(
        0,
        "Tokens of a new prompt that is computed in each step, beside the rows: whole, whatever --target-itl-ms says.",
        low=0,
        group="load",
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
class KeyFileOptions:
    """The key file of the ``rootgraft key`` commands."""

    api_key_file: str = option(
        "", "The file (.toml or .json) that the server has as --api-key-file. It takes changes at once.", group="key"
    )

    def __post_init__(self) -> None:
        if not self.api_key_file:
            raise ConfigError("--api-key-file must name the file that the server has; key add makes it.")
        if not self.api_key_file.endswith((".toml", ".json")):
            raise ConfigError(f"--api-key-file must end in .toml or .json, not be {self.api_key_file}.")


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
        None, "Tenant, whose keys share cache and turns. Default: the key's name.", group="rights"
    )
    scopes: tuple[str, ...] = option(
        ("inference",), "What it may do: inference, metrics, admin.", group="rights", words=True
    )
    adapters: tuple[str, ...] = option(
        (), "Adapters that it may use besides the base model. Default: all.", group="rights", words=True
    )
    requests_per_minute: int | None = option(None, "Default: no limit.", low=1, group="rights")
    tokens_per_minute: int | None = option(None, "Default: no limit.", low=1, group="rights")
    priority: str = option(
        "interactive",
        "Its class, and the first that its requests may ask for.",
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

    data: str = option("", "File of labelled lines: JSON objects with input and answer.", group="calibration")
    question: str = option("", "JSON file with the question, as in POST /v1/decisions.", group="calibration")
    name: str = option("", "Name of the calibration, for requests.", group="calibration")
    calibration_dir: str = option("", "The folder that the server has as --calibration-dir.", group="calibration")
    bias: bool = option(False, "Fit a bias for each label, too.", group="calibration")
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

    usage_ledger: str = option("", "The file that the server has as --usage-ledger.", group="usage")
    by: str = option(
        "model",
        "What a row is for: day, month, key, model or adapter (either: the name of a base model or of an adapter), or "
        "tenant, as --api-key-file has it.",
        choices=("day", "month", "key", "model", "adapter", "tenant"),
        group="usage",
    )
    since: str | None = option(None, "First day, such as 2026-11-01, of UTC.", group="usage")
    until: str | None = option(None, "Last day.", group="usage")
    api_key_file: str | None = option(None, "File with the keys' tenants.", group="usage")
    prices: str | None = option(
        None, "TOML file of prices for a million tokens, for a column with the cost.", group="usage"
    )
    csv: bool = option(False, "Print comma-separated values.", group="output")
    json: bool = option(False, "Print JSON for programs.", group="output")

    def __post_init__(self) -> None:
        check_options(self)
        if not self.usage_ledger:
            raise ConfigError("--usage-ledger must name the file that the server has.")
        for name in ("since", "until"):
            day = getattr(self, name)
            try:
                is_day = day is None or date.fromisoformat(day).isoformat() == day
            except ValueError:
                is_day = False
            if not is_day:
                raise ConfigError(f"--{name} must be a day such as 2026-11-01, not {day}.")
        if (self.by == "tenant") > (self.api_key_file is not None):
            raise ConfigError("--by tenant needs --api-key-file, which has the keys' tenants.")
        if self.csv and self.json:
            raise ConfigError("--csv and --json exclude each other.")


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """Address and administrator's key of a server, for ``rootgraft models``."""

    url: str | None = option(None, f"Address of a server of rootgraft. {_DEFAULT_URL}", group="server")
    api_key: str | None = option(
        None, f"Key with the scope admin, if the server asks for keys. {_DEFAULT_KEY}", group="server"
    )
    json: bool = option(False, "Print the server's answer as JSON, for programs.", group="output")


@dataclass(frozen=True, slots=True)
class NameOptions:
    """Name for ``rootgraft models rollback`` and ``remove``."""

    name: str = option("", "A name of the catalogue; NAME@DIGEST is one version of it.", group="model")

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
            raise ConfigError(f"--name must name a version too, such as {self.name}@3f2a9c: its digest's first digits.")
        if not self.name:
            raise ConfigError("--name must be NAME@DIGEST, of a version that rootgraft models list shows.")


@dataclass(frozen=True, slots=True)
class CanaryOptions:
    """Share of requests for ``rootgraft models canary``."""

    weight: int = option(10, "Percent of new requests that the version gets.", low=1, high=99, group="model")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class AddOptions:
    """The version that ``rootgraft models add`` adds."""

    name: str = option("", "Name that the version is added to.", group="model")
    source: str = option(
        "", "hf://org/name@revision, s3://bucket/folder, https://host/folder or file:///folder.", group="model"
    )
    digest: str | None = option(None, "SHA-256 that the content must have.", group="model")
    base: str | None = option(None, "Base model of the adapter, where the server has several.", group="model")

    def __post_init__(self) -> None:
        for flag, value in (("--name", self.name), ("--source", self.source)):
            if not value:
                raise ConfigError(f"{flag} must be given. Try: rootgraft models add sql --source file:///srv/sql")
