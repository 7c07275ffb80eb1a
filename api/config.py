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

    host: str = option(
        "127.0.0.1", "Address to listen on. 0.0.0.0: accept connections from other machines.", group="server"
    )
    port: int = option(8000, "Port to listen on. 0: any free port.", low=0, high=65535, group="server")
    uds: str | None = option(None, "Unix domain socket to listen on instead of --host and --port.", group="server")
    root_path: str = option(
        "",
        "Path prefix under which a proxy publishes the server, such as /llm. The proxy may strip it or pass it on.",
        group="server",
    )
    served_model_name: tuple[str, ...] = option(
        (),
        "Model names that requests may use; responses contain the first one.",
        group="server",
        words=True,
    )
    api_key: tuple[str, ...] = option(
        (),
        "API keys; each request must send one of them as a bearer token. Default: no key is required.",
        group="server",
        words=True,
    )
    calibration_dir: str | None = option(
        None, "Folder with calibrations written by rootgraft calibrate. Default: none.", group="model"
    )
    api_key_file: str | None = option(
        None,
        "File (.toml or .json) with hashed API keys, their limits and scopes; reloaded when it changes.",
        group="server",
    )
    model_catalog: str | None = option(
        None,
        "SQLite file with adapter names, their versions by content digest and the traffic weight of each version "
        "(rootgraft models). Needs --enable-lora. Default: none.",
        group="server",
    )
    share_cache_between_keys: bool = option(
        False, "Share the cached KV of equal prefixes between tenants.", group="server"
    )
    max_queued_requests: int = option(
        1024, "Maximum number of sequences waiting for their first token.", low=1, high=1 << 20, group="overload"
    )
    max_queued_tokens: int = option(
        1 << 20,
        "Maximum number of prompt tokens of the sequences waiting for their first token.",
        low=1,
        high=1 << 40,
        group="overload",
    )
    max_queue_seconds: float = option(
        60.0,
        "Longest wait for the first token: a request is refused at once if its estimated wait is more than 1.5 times "
        "this.",
        low=0.01,
        high=86400,
        group="overload",
    )
    request_timeout: float | None = option(
        None,
        "Seconds after which a request ends, waiting or running. The header x-request-timeout may set less. Default: "
        "none.",
        low=0.001,
        high=86400,
        group="overload",
    )
    tool_call_parser: str = option(
        "auto",
        "Format of the model's tool calls. auto: that of its chat template; generic: a format that the prompt "
        "explains.",
        choices=TOOL_CALL_PARSERS,
        group="server",
    )
    stream_interval: int = option(
        1,
        "Tokens per event of a streamed answer; fewer at its start and end. 1: send the tokens of each step at once.",
        low=1,
        high=1 << 20,
        group="server",
    )
    stream_heartbeat: float = option(
        15.0,
        "Seconds without an event after which a stream sends a comment, so that proxies do not close it. 0: never.",
        low=0,
        high=3600,
        group="server",
    )
    reasoning_parser: str = option(
        "auto",
        "Format in which the model marks its reasoning. auto: that of its chat template; none: reasoning is part of "
        "the answer.",
        choices=REASONING_PARSERS,
        group="server",
    )
    unknown_fields: str = option(
        "refuse",
        "Request fields that the server does not know. refuse: answer 400; ignore: skip them and list them in the "
        "header x-ignored-fields and the log.",
        choices=("refuse", "ignore"),
        group="server",
    )
    strict_max_tokens: bool = option(
        False,
        "Refuse a request if its prompt and max_tokens do not fit the context together. By default max_tokens is "
        "lowered to what fits.",
        group="server",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False,
        "Serve GET /tokenizer_info, which returns the tokenizer's configuration and the chat template.",
        group="server",
    )
    default_chat_template_kwargs: str = option(
        "{}",
        'JSON object of variables for the chat template, such as {"enable_thinking": false}; a request\'s own '
        "variables override them.",
        group="server",
    )
    max_request_bytes: int = option(
        4 << 20, "Maximum size of a request body, in bytes.", low=1024, high=1 << 30, group="server"
    )
    max_websockets: int = option(
        512,
        "Maximum number of open WebSocket connections. Tenants share them fairly.",
        low=1,
        high=1 << 16,
        group="server",
    )
    max_stored_response_bytes: int = option(
        256 << 20, "Memory in bytes for stored responses (previous_response_id). 0: store none.", low=0, group="server"
    )
    stored_response_ttl: float = option(
        86400.0, "Seconds after its last use when a stored response is deleted.", low=0, group="server"
    )
    max_stored_event_bytes: int = option(
        64 << 20,
        "Memory in bytes for events of stored responses, with which clients resume a stream. 0: keep none.",
        low=0,
        group="server",
    )
    stored_event_ttl: float = option(
        600.0, "Seconds to keep the events of a response after its end.", low=0, high=86400, group="server"
    )
    batch_dir: str | None = option(
        None,
        "Folder for clients' files and batches (/v1/files, /v1/batches). Default: these routes are off.",
        group="server",
    )
    max_file_bytes: int = option(
        200 << 20, "Maximum size of an uploaded file, in bytes.", low=1024, high=1 << 30, group="server"
    )
    max_stored_file_bytes: int = option(
        4 << 30, "Maximum size of all uploaded files together, in bytes.", low=1024, high=1 << 50, group="server"
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names accepted in Host and Origin, besides localhost; *.NAME: all subdomains, *: any name. Default: "
        "any with API keys; without keys, only names that are not in public DNS, and only localhost when listening "
        "on loopback.",
        group="server",
    )
    allowed_origins: tuple[str, ...] = option(
        (), "CORS: origins whose web pages may call this server; * for all. Default: none.", group="server"
    )
    allow_credentials: bool = option(
        False, "CORS: let these origins send cookies, for a proxy that needs them.", group="server"
    )
    allowed_methods: tuple[str, ...] = option(("*",), "CORS: HTTP methods that these origins may use.", group="server")
    allowed_headers: tuple[str, ...] = option(("*",), "CORS: headers that these origins may send.", group="server")
    grpc_port: int | None = option(
        None,
        "Port for gRPC, with the same keys and limits. 0: any free port. Default: gRPC is off.",
        low=0,
        high=65535,
        group="server",
    )
    ssl_certfile: str | None = option(None, "PEM file with the certificate chain. Turns on HTTPS.", group="server")
    ssl_keyfile: str | None = option(
        None, "PEM file with the private key, if it is not in --ssl-certfile.", group="server"
    )
    ssl_ca_certs: str | None = option(
        None, "PEM file with the CA certificates that verify client certificates.", group="server"
    )
    ssl_cert_reqs: int = option(
        0,
        "Client certificates, by the numbers of Python's ssl module. 0: not requested; 1: optional, but verified; 2: "
        "required.",
        choices=(0, 1, 2),
        group="server",
    )
    ssl_ciphers: str | None = option(None, "TLS 1.2 ciphers in OpenSSL's notation. Default: OpenSSL's.", group="server")
    enable_ssl_refresh: bool = option(
        False, "Reload certificate files when they change, for example after a renewal.", group="server"
    )
    shutdown_timeout: float = option(
        30.0, "Seconds for running requests to finish after the first SIGTERM.", low=0, high=86400, group="server"
    )
    replicas: int = option(
        1,
        "Number of engine processes that serve together. If one ends or hangs, another continues its streams and a "
        "new one is started. They share this machine's cores and memory, unless --ray-address places them on other "
        "machines.",
        low=1,
        high=MOST_REPLICAS,
        group="server",
    )
    replica_roles: str | None = option(
        None,
        "Disaggregated prefill: separate replicas for prompts (p) and answers (d), such as 1p+1d, instead of "
        "--replicas; 1p+2d+1b adds one for both (b). KV is copied from p to d replicas while it is computed, so that "
        "long prompts do not delay streams. A role is a preference: a replica computes everything if no other one "
        "runs.",
        group="server",
    )
    gateways: int = option(
        1,
        "Number of processes that answer HTTP on the same port. If one ends or hangs, the others take new requests "
        "and a new one is started.",
        low=1,
        high=MOST_GATEWAYS,
        group="server",
    )
    autoscale: str | None = option(
        None,
        "MIN:MAX, such as 1:4: scale the replicas on this machine with the load, instead of --replicas. With MIN 0, "
        "the last one stops after a minute without requests, and the next request waits until one has started.",
        group="server",
    )
    dry_run: bool = option(
        False,
        "Check the options, print how much memory the model needs on this machine (on each rank) and how it would be "
        "computed, and exit without loading it. The exit code is 1 if it does not fit.",
        group="server",
    )
    keep_alive: float | None = option(
        None,
        "Seconds without requests after which a model is unloaded to free its memory; the next request waits until "
        "it is loaded again. Implies --autoscale 0:1; can be combined with --autoscale 0:MAX. Default: never.",
        low=1,
        high=30 * 86400,
        group="server",
    )
    ray_address: str | None = option(
        None,
        "Place the replicas with Ray. local: start Ray on this machine; auto: join this machine's cluster; "
        "HOST:PORT: join the cluster with this head. Default: no Ray.",
        group="server",
    )
    heartbeat_timeout: float | None = option(
        None,
        "Seconds without a heartbeat after which an engine process counts as hung. Default: 5; 3 with --replicas and "
        "--autoscale, where another replica continues its streams.",
        low=1,
        high=86400,
        group="server",
    )
    watchdog_timeout: float = option(
        WATCHDOG_TIMEOUT,
        "Seconds that one step may take before the engine counts as hung. Raise it for long prompts on a slow machine.",
        low=1,
        high=86400,
        group="server",
    )
    log_level: str = option("info", "Minimum severity of log lines.", choices=_LOG_LEVELS, group="observability")
    log_format: str = option(
        "text", "Log format. json: one JSON object per line.", choices=("text", "json"), group="observability"
    )
    log_requests: bool = option(
        False,
        "Log each request even if the log is text in a terminal. Otherwise requests are always logged.",
        group="observability",
    )
    metrics_prefix: str = option(
        "rootgraft:",
        "Prefix of the metrics that vLLM also has. vllm: gives them vLLM's names and buckets, for its dashboards.",
        choices=METRICS_PREFIXES,
        group="observability",
    )
    usage_ledger: str | None = option(
        None,
        "SQLite file in which to count requests and tokens by day, key and model. Default: none.",
        group="observability",
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL to send traces to with OTLP over HTTP, such as http://localhost:4318/v1/traces. Default: none.",
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
                "--allow-credentials needs --allowed-origins with named origins, because * would let any web page "
                "use its visitors' cookies. Try: --allowed-origins https://chat.example.org"
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
                "--replica-roles must be numbers of replicas for prompts (p), answers (d) or both (b), such as "
                f"1p+1d, that cover prompts and answers with at most {MOST_REPLICAS} replicas, not "
                f"{self.replica_roles}."
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
                raise ConfigError(f"{flag} must not contain {name!r}: the server sets it.")
            if not isinstance(value, bool | int | float | str):
                raise ConfigError(f"{name!r} in {flag} must be a string, a number or a boolean.")
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
                raise ConfigError(f"{given[0]} needs --ssl-certfile with the server's certificate.")
        elif self.ssl_cert_reqs and self.ssl_ca_certs is None:
            raise ConfigError(
                f"--ssl-cert-reqs {self.ssl_cert_reqs} needs --ssl-ca-certs with the CA certificates that verify "
                "client certificates."
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
                    f"--replica-roles {self.replica_roles} already sets the number of replicas: remove {flag} {value}."
                )
        if self.autoscale_bounds is None:
            return
        named = "--keep-alive" if self.autoscale is None else f"--autoscale {self.autoscale}"
        if self.replicas != 1:
            raise ConfigError(f"{named} already sets the number of replicas: remove --replicas {self.replicas}.")
        if self.ray_address is not None:
            raise ConfigError(f"{named} starts replicas on this machine only: remove --ray-address.")
        if self.keep_alive is not None and self.autoscale_bounds[0] > 0:
            raise ConfigError(f"--keep-alive stops the last replica: {named} must be 0:MAX.")

    def _check_paths(self) -> None:
        if self.uds is not None and not self.uds:
            raise ConfigError("--uds must name a file.")
        if self.root_path.rstrip("/") and not _ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(f"--root-path must be a path such as /llm, not {self.root_path}.")
        if self.root_path.split("/")[1:2] == ["v1"]:
            raise ConfigError(
                "--root-path must not begin with /v1, which the server's own routes use. Use another path, such as "
                "/llm."
            )
