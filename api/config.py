"""Options of the HTTP server, declared like those of ``engine.config``. The command line is generated from them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from ..engine.config import check_options, option
from ..engine.errors import ConfigError
from ..engine.serving.watchdog import FLEET_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT, WATCHDOG_TIMEOUT
from ..fleet.fleet_options import FleetOptions

# "auto" and the formats of api/structured/tool_formats.py. They are repeated here, so that the command line need not
# import that module.
TOOL_CALL_PARSERS = (
    *("auto", "mistral", "hermes", "llama3_json", "qwen3_coder", "seed_oss", "functionary", "glm45", "glm47"),
    *("minimax_m2", "deepseek_v3", "deepseek_v31", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k2"),
    *("kimi_k3", "muse_glimmer", "command_r", "openai"),
    *("gemma4", "granite", "granite-20b-fc", "phi4_mini_json", "lfm2", "pythonic", "generic"),
    *("llama4_json", "llama4_pythonic", "qwen3_json", "qwen3_xml", "granite4"),
)
# "auto", "none" and the formats of engine/text/reasoning_formats.py, repeated for the same reason.
REASONING_PARSERS = (
    *("auto", "none", "qwen3", "deepseek_r1", "deepseek_v3", "glm45", "kimi_k2", "minimax_m2", "nemotron_v3", "olmo3"),
    *("step3", "seed_oss", "mistral", "cohere_command3", "apertus", "apriel", "granite", "gemma4"),
    "openai_gptoss",
)
# Variables of a chat template that only the server may set.
RESERVED_TEMPLATE_KWARGS = frozenset(
    (
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "bos_token",
        "eos_token",
    )
)
_ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+/?")
# The prefixes that engine/metric_tables.py defines.
METRICS_PREFIXES = ("rootgraft:", "vllm:")
MOST_REPLICAS = 16
"""Largest number of engine processes of a server."""
MOST_GATEWAYS = 16
_ROLE = re.compile(r"([1-9][0-9]?)([pdb])")
_ROLES = {"p": "prefill", "d": "decode", "b": "both"}
_BOUNDS = re.compile(r"([0-9]{1,3}):([0-9]{1,3})")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Options of the HTTP server. The constructor raises ConfigError for the first option that is out of bounds."""

    host: str = option("127.0.0.1", "Address to listen on. 0.0.0.0: reachable from other machines.", group="server")
    port: int = option(8000, "Port to listen on. 0: any free one.", low=0, high=65535, group="server")
    uds: str | None = option(
        None, "Unix domain socket to listen on, in the place of --host and --port.", group="server"
    )
    root_path: str = option(
        "", "Path under which a proxy offers the server, such as /llm; it may strip it or pass it on.", group="server"
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Names under which the model is offered; the first is the one that answers carry.",
        group="server",
        words=True,
    )
    api_key: tuple[str, ...] = option(
        (),
        "Keys, one of which each request must bring as a bearer token. Default: no key is asked for.",
        group="server",
        words=True,
    )
    calibration_dir: str | None = option(
        None, "Folder of calibrations, as rootgraft calibrate writes them. Default: none.", group="model"
    )
    api_key_file: str | None = option(
        None,
        "File (.toml or .json) with hashed keys, their limits and scopes; read again when it changes.",
        group="server",
    )
    model_catalog: str | None = option(
        None,
        "SQLite file of models, their versions by content digest and the weights of these (rootgraft models). It needs "
        "--enable-lora. Default: none.",
        group="server",
    )
    share_cache_between_keys: bool = option(
        False, "Let requests of different tenants share the KV of equal prefixes.", group="server"
    )
    max_queued_requests: int = option(
        1024, "Most sequences that may wait for their first token.", low=1, high=1 << 20, group="overload"
    )
    max_queued_tokens: int = option(
        1 << 20, "Most tokens in the prompts of those.", low=1, high=1 << 40, group="overload"
    )
    max_queue_seconds: float = option(
        60.0,
        "A request is refused at once if it would surely wait longer, by what was measured: 1.5 times by the estimate.",
        low=0.01,
        high=86400,
        group="overload",
    )
    request_timeout: float | None = option(
        None,
        "Seconds after which a request ends, wherever it is; the header x-request-timeout may ask for fewer.",
        low=0.001,
        high=86400,
        group="overload",
    )
    tool_call_parser: str = option(
        "auto",
        "How the model writes tool calls. auto: as its chat template does; generic: told in plain text.",
        choices=TOOL_CALL_PARSERS,
        group="server",
    )
    stream_interval: int = option(
        1,
        "Tokens of an answer in each event of a stream; fewer at its begin and end. 1: those of a step, at once.",
        low=1,
        high=1 << 20,
        group="server",
    )
    stream_heartbeat: float = option(
        15.0,
        "Seconds without an event after which a stream sends a comment, so that nothing between takes it for dead. "
        "0: none.",
        low=0,
        high=3600,
        group="server",
    )
    reasoning_parser: str = option(
        "auto",
        "How the model marks its thoughts. auto: as its chat template does; none: thoughts are part of the answer.",
        choices=REASONING_PARSERS,
        group="server",
    )
    unknown_fields: str = option(
        "refuse",
        "A field that nobody knows. refuse: 400; ignore: left alone, named in x-ignored-fields and the log.",
        choices=("refuse", "ignore"),
        group="server",
    )
    strict_max_tokens: bool = option(
        False,
        "Refuse a request whose max_tokens is more than fits behind its prompt. By default it gets what fits.",
        group="server",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "Tell the tokenizer's configuration and the chat template: GET /tokenizer_info.", group="server"
    )
    default_chat_template_kwargs: str = option(
        "{}",
        'JSON object of variables for the chat template, such as {"enable_thinking": false}; those of a request go '
        "before them.",
        group="server",
    )
    max_request_bytes: int = option(
        4 << 20, "Longest request body that is read.", low=1024, high=1 << 30, group="server"
    )
    max_websockets: int = option(
        512, "Most WebSocket connections at a time, of which tenants have shares.", low=1, high=1 << 16, group="server"
    )
    max_stored_response_bytes: int = option(
        256 << 20, "Memory for responses that clients may go on from. 0: none is stored.", low=0, group="server"
    )
    stored_response_ttl: float = option(
        86400.0, "Seconds after which a stored response that nobody asks for is forgotten.", low=0, group="server"
    )
    max_stored_event_bytes: int = option(
        64 << 20,
        "Memory for events of stored responses, by which a stream is resumed. 0: none is kept.",
        low=0,
        group="server",
    )
    stored_event_ttl: float = option(
        600.0, "Seconds after a response's end for which its events are kept.", low=0, high=86400, group="server"
    )
    batch_dir: str | None = option(
        None,
        "Folder for files and batches of clients (/v1/files, /v1/batches). Default: there are none.",
        group="server",
    )
    max_file_bytes: int = option(200 << 20, "Largest file of a client's.", low=1024, high=1 << 30, group="server")
    max_stored_file_bytes: int = option(
        4 << 30, "Most bytes of all such files.", low=1024, high=1 << 50, group="server"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Names in Host and Origin that are served besides loopback's own; *.NAME is all below one, * any. Default: "
        "with keys any; without, names that the public DNS does not have, and on loopback its own.",
        group="server",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "Origins whose web pages may ask this server; * for all. Default: none.", group="server"
    )
    allow_credentials: bool = option(
        False, "Let pages of those origins send cookies, as for a proxy that asks for them.", group="server"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "HTTP methods that such pages may use.", group="server")
    allowed_headers: tuple[str, ...] = option(("*",), "Headers that such pages may send.", group="server")
    grpc_port: int | None = option(
        None,
        "Port that gRPC is spoken on, with the same keys and limits; 0: any. Default: none.",
        low=0,
        high=65535,
        group="server",
    )
    ssl_certfile: str | None = option(
        None, "PEM file with the certificate and those that signed it. With it the server speaks HTTPS.", group="server"
    )
    ssl_keyfile: str | None = option(None, "PEM file with its private key, if not in --ssl-certfile.", group="server")
    ssl_ca_certs: str | None = option(
        None, "PEM file of the authorities that sign clients' certificates.", group="server"
    )
    ssl_cert_reqs: int = option(
        0,
        "Certificates of clients, by the numbers of Python's ssl. 0: none is asked for; 1: one that is sent is "
        "checked; 2: each client must send one.",
        choices=(0, 1, 2),
        group="server",
    )
    ssl_ciphers: str | None = option(
        None, "Ciphers of TLS 1.2 in OpenSSL's notation. Default: OpenSSL's.", group="server"
    )
    enable_ssl_refresh: bool = option(
        False, "Load certificate files again when they change, as after a renewal.", group="server"
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests get to finish after the first SIGTERM.", low=0, high=86400, group="server"
    )
    replicas: int = option(
        1,
        "Engine processes that serve together: if one ends or hangs, its streams go on in another, and a new one is "
        "started. They share this machine's cores and memory, but where --ray-address places them on others.",
        low=1,
        high=MOST_REPLICAS,
        group="server",
    )
    replica_roles: str | None = option(
        None,
        "Replicas for prompts and others for answers, as 1p+1d, in the place of --replicas; 1p+2d+1b has one for both. "
        "KV goes from the first to the others while it is computed, so that long prompts delay no stream. A role is a "
        "preference: where no other replica runs, each computes all.",
        group="server",
    )
    gateways: int = option(
        1,
        "Processes that answer HTTP on the one port: if one ends or hangs, new requests go through the others, and "
        "another one is started.",
        low=1,
        high=MOST_GATEWAYS,
        group="server",
    )
    autoscale: str | None = option(
        None,
        "MIN:MAX, as 1:4: as many replicas on this machine as the load needs, in the place of --replicas. With MIN 0 "
        "none runs after a minute without requests, and the next one waits until one has started.",
        group="server",
    )
    dry_run: bool = option(
        False,
        "Load and serve nothing: check the options, say what the model takes in memory here and how it would be "
        "computed, on each of the ranks where there are several, and end; with code 1 if it does not fit.",
        group="server",
    )
    keep_alive: float | None = option(
        None,
        "Seconds without requests after which a model's engine ends and its memory is free; the next request waits "
        "until it has started again. As --autoscale 0:1, or with --autoscale 0:MAX. Default: it stays.",
        low=1,
        high=30 * 86400,
        group="server",
    )
    ray_address: str | None = option(
        None,
        "Let Ray place the replicas: local starts a Ray of this server's own on this machine, auto joins the cluster "
        "that this machine is part of, HOST:PORT the one with that head. Default: without Ray.",
        group="server",
    )
    heartbeat_timeout: float | None = option(
        None,
        "Seconds without a sign of life of the engine's process, as when it is stopped, after which it counts as hung. "
        "Default: 5; 3 with --replicas and --autoscale, where its streams go on in another one.",
        low=1,
        high=86400,
        group="server",
    )
    watchdog_timeout: float = option(
        WATCHDOG_TIMEOUT,
        "Seconds that one step may take, such as a prompt's on a slow machine, before the engine counts as hung.",
        low=1,
        high=86400,
        group="server",
    )
    log_level: str = option("info", "Least severe lines in the log.", choices=_LOG_LEVELS, group="observability")
    log_format: str = option(
        "text", "json: each line of the log is a JSON object.", choices=("text", "json"), group="observability"
    )
    log_requests: bool = option(
        False,
        "Log a line for each request also where the log is text in a terminal. Elsewhere each is logged.",
        group="observability",
    )
    metrics_prefix: str = option(
        "rootgraft:",
        "Prefix of the metrics that vLLM has too. vllm: makes them its own, buckets included, for its dashboards.",
        choices=METRICS_PREFIXES,
        group="observability",
    )
    usage_ledger: str | None = option(
        None,
        "SQLite file that counts requests and tokens by day, key and model. Default: none.",
        group="observability",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that traces are sent to by OTLP over HTTP, such as http://localhost:4318/v1/traces. Default: none.",
        group="observability",
    )

    def __post_init__(self) -> None:
        """Check each option, and that no name or key is empty."""
        check_options(self)
        for flag, values in (("--served-model-name", self.served_model_name), ("--api-key", self.api_key)):
            if not all(value.strip() for value in values):
                raise ConfigError(f"{flag} must not be empty.")
        self._check_tls()
        self._check_paths()
        self._check_replicas()
        if self.allow_credentials and (not self.allowed_origins or "*" in self.allowed_origins):
            raise ConfigError(
                "--allow-credentials needs origins by name, for with it * would let any web page use the cookies of "
                "its visitors. Try: --allowed-origins https://chat.example.org"
            )
        _ = self.template_kwargs

    @property
    def silence_seconds(self) -> float:
        """Seconds without a sign of life after which an engine process counts as hung."""
        default = FLEET_HEARTBEAT_TIMEOUT if self.is_fleet else HEARTBEAT_TIMEOUT
        return default if self.heartbeat_timeout is None else self.heartbeat_timeout

    @property
    def is_fleet(self) -> bool:
        """Whether the engine consists of replicas."""
        return self.replicas > 1 or self.autoscale_bounds is not None or self.replica_roles is not None

    @property
    def autoscale_bounds(self) -> tuple[int, int] | None:
        """Bounds of the number of replicas by ``--autoscale`` or ``--keep-alive``; None without. Raises ConfigError."""
        if self.autoscale is None:
            return None if self.keep_alive is None else (0, 1)
        found = _BOUNDS.fullmatch(self.autoscale)
        if found is None or not 0 <= int(found[1]) <= int(found[2]) or not 1 <= int(found[2]) <= MOST_REPLICAS:
            raise ConfigError(
                f"--autoscale must be MIN:MAX such as 1:4, with MIN from 0 to MAX and MAX from 1 to {MOST_REPLICAS}, "
                f"not {self.autoscale}."
            )
        return int(found[1]), int(found[2])

    @property
    def roles(self) -> tuple[str, ...]:
        """The role of each replica by ``--replica-roles``; empty without the option. Raises ConfigError."""
        if self.replica_roles is None:
            return ()
        parts = [_ROLE.fullmatch(part) for part in self.replica_roles.split("+")]
        counts = [(int(found[1]), _ROLES[found[2]]) for found in parts if found is not None]
        roles = tuple(role for count, role in counts for _ in range(count))
        is_whole = {"prefill", "decode"} <= set(roles) or "both" in roles
        if None in parts or len(roles) > MOST_REPLICAS or not is_whole:
            raise ConfigError(
                "--replica-roles must be numbers of replicas with p (prompts), d (answers) or b (both), such as "
                f"1p+1d, with both sides and at most {MOST_REPLICAS} in all, not {self.replica_roles}."
            )
        return roles

    @property
    def most_replicas(self) -> int:
        """Largest number of replicas that share the machine at the same time."""
        return self.fleet_options.most_replicas

    @property
    def fleet_options(self) -> FleetOptions:
        """The options that concern the engine's replicas."""
        return FleetOptions(
            replicas=len(self.roles) or self.replicas,
            autoscale_bounds=self.autoscale_bounds,
            ray_address=self.ray_address,
            silence_seconds=self.silence_seconds,
            watchdog_timeout=self.watchdog_timeout,
            roles=self.roles,
            idle_seconds=self.keep_alive,
        )

    @property
    def template_kwargs(self) -> dict[str, Any]:
        """The JSON object that ``--default-chat-template-kwargs`` contains. Raises ConfigError."""
        flag = "--default-chat-template-kwargs"
        try:
            found = json.loads(self.default_chat_template_kwargs)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            example = '{"enable_thinking": false}'
            raise ConfigError(
                f"{flag} must be a JSON object such as {example}, not {self.default_chat_template_kwargs}."
            )
        for name, value in found.items():
            if name in RESERVED_TEMPLATE_KWARGS:
                raise ConfigError(f"{name!r} of {flag} is set by the server.")
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(f"{name!r} of {flag} must be a string, a number or a boolean.")
        return found

    def _check_tls(self) -> None:
        """Check that options for certificates are given together with the options that they need. Reads no files."""
        if self.ssl_certfile is None:
            given = [
                flag
                for flag, value in (
                    ("--ssl-keyfile", self.ssl_keyfile),
                    ("--ssl-ca-certs", self.ssl_ca_certs),
                    ("--ssl-cert-reqs", self.ssl_cert_reqs),
                    ("--ssl-ciphers", self.ssl_ciphers),
                    ("--enable-ssl-refresh", self.enable_ssl_refresh),
                )
                if value
            ]
            if given:
                raise ConfigError(f"{given[0]} needs --ssl-certfile, the file with the server's certificate.")
        elif self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs, the file of the authorities that sign "
                "clients' certificates."
            )

    def _check_replicas(self) -> None:
        """Check that the number of replicas is set by only one option."""
        counts = (
            ("--replicas", self.replicas),
            ("--autoscale", self.autoscale),
            ("--keep-alive", self.keep_alive and f"{self.keep_alive:g}"),
        )
        for flag, value in counts if self.roles else ():
            if value not in (1, None):
                raise ConfigError(
                    f"--replica-roles {self.replica_roles} says how many replicas there are: leave out {flag} {value}."
                )
        if self.autoscale_bounds is None:
            return
        named = "--keep-alive" if self.autoscale is None else f"--autoscale {self.autoscale}"
        if self.replicas != 1:
            raise ConfigError(f"{named} says how many replicas there are: leave out --replicas {self.replicas}.")
        if self.ray_address is not None:
            raise ConfigError(f"{named} starts replicas on this machine alone: leave out --ray-address.")
        if self.keep_alive is not None and self.autoscale_bounds[0] > 0:
            raise ConfigError(f"--keep-alive lets the last replica end: {named} must be 0:MAX.")

    def _check_paths(self) -> None:
        if self.uds is not None and not self.uds:
            raise ConfigError("--uds must name a file.")
        if self.root_path.rstrip("/") and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"--root-path must be a path such as /llm, not {self.root_path}.")
        if self.root_path.split("/")[1:2] == ["v1"]:
            raise ConfigError("--root-path must not begin with /v1, where the server's own routes are; take /llm.")
