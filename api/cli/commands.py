"""Commands of ``rootgraft``: help, options and function of each. A function's module is imported on its first run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from ...engine.config import EngineConfig
from ..config import ServerConfig
from .machine.machine_options import (
    CompletionOptions,
    DoctorOptions,
    ListOptions,
    PsOptions,
    RmOptions,
    SearchOptions,
    ShowOptions,
)
from .options import (
    AddOptions,
    AdminOptions,
    BenchOptions,
    CalibrateOptions,
    CanaryOptions,
    ChatOptions,
    CompleteOptions,
    FleetStatusOptions,
    KeyAddOptions,
    KeyListOptions,
    KeyNameOptions,
    KvCacheOptions,
    KvExportOptions,
    KvImportOptions,
    NameOptions,
    PullOptions,
    QuantizeOptions,
    RemoteOptions,
    RunBatchOptions,
    RunOptions,
    SamplingOptions,
    StepOptions,
    UsageOptions,
    VersionOptions,
)


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``rootgraft``.

    Attributes:
        about: a sentence for the help.
        classes: dataclasses of the command's options.
        function: ``module:name`` within this package; it is called with one instance of each class and returns the exit
            code.
        positional: name of an option that may be given without its flag, or an empty string.
        takes_models: whether the function gets the parsed models (a file may name several) and a function that rereads
            them.
        common: the options that ``--help`` shows; ``--help-all`` shows all. If empty, ``--help`` shows all.
    """

    about: str
    classes: tuple[type[Any], ...]
    function: str
    positional: str = ""
    takes_models: bool = False
    common: tuple[str, ...] = ()

    def load(self) -> Callable[..., int]:
        """Import the function's module and return the function."""
        module, _, name = self.function.partition(":")
        return cast(Callable[..., int], getattr(import_module(f".{module}", __package__), name))


_COMMON_OF_SERVE = (
    *("model", "host", "port", "served_model_name", "api_key_file", "lora_modules", "lora_dir", "max_model_len"),
    *("quantization", "device"),
)
COMMANDS = {
    "serve": Command(
        "Serve a model over an OpenAI-compatible HTTP API.",
        (EngineConfig, ServerConfig),
        "serve_command:serve",
        "model",
        takes_models=True,
        common=_COMMON_OF_SERVE,
    ),
    "run": Command(
        "Chat with a model: download it if needed, and serve it while the chat lasts.",
        (RunOptions, SamplingOptions, ChatOptions),
        "chat.run_command:run",
        "model",
    ),
    "chat": Command(
        "Chat with a model on a running server.",
        (RemoteOptions, SamplingOptions, ChatOptions),
        "chat.chat_command:chat",
    ),
    "complete": Command(
        "Complete a text with a model on a running server.",
        (RemoteOptions, SamplingOptions, CompleteOptions),
        "complete_command:complete",
        "prompt",
    ),
    "run-batch": Command(
        "Run a file of requests and append the answers to another file; a second run resumes.",
        (RunBatchOptions, EngineConfig),
        "run_batch:run_batch",
    ),
    "bench serve": Command(
        "Send requests to a server and measure throughput and latency.",
        (RemoteOptions, BenchOptions),
        "bench_sweep:bench",
    ),
    "bench step": Command(
        "Measure how long each part of an engine step takes.",
        (EngineConfig, StepOptions),
        "bench_step:bench_step",
        "model",
    ),
    "calibrate": Command(
        "Calibrate the probabilities of a typed question on labelled examples.",
        (RemoteOptions, CalibrateOptions),
        "calibrate_command:calibrate",
        "data",
    ),
    "models list": Command("List the versions of a server's models.", (AdminOptions,), "models_command:list_models_of"),
    "models add": Command(
        "Add a version of an adapter to a server.", (AdminOptions, AddOptions), "models_command:add", "name"
    ),
    "models promote": Command(
        "Promote a version: route all new requests to it.",
        (AdminOptions, VersionOptions),
        "models_command:promote",
        "name",
    ),
    "models canary": Command(
        "Route a share of new requests to a version.",
        (AdminOptions, VersionOptions, CanaryOptions),
        "models_command:canary",
        "name",
    ),
    "models rollback": Command(
        "Undo the last promote or canary of a name.", (AdminOptions, NameOptions), "models_command:rollback", "name"
    ),
    "models remove": Command(
        "Retire a version or a name, or stop serving a base model.",
        (AdminOptions, NameOptions),
        "models_command:remove",
        "name",
    ),
    "fleet status": Command(
        "Show the state of a server's replicas and the events since its start.",
        (FleetStatusOptions,),
        "fleet_status:print_fleet",
    ),
    "cache ls": Command("List the KV in a --kv-disk folder.", (KvCacheOptions,), "cache_command:ls", "kv_disk"),
    "cache stats": Command(
        "Show how much KV a server or a --kv-disk folder holds.", (KvCacheOptions,), "cache_command:stats", "kv_disk"
    ),
    "cache clear": Command(
        "Remove the cached KV of a server, or the files in a --kv-disk folder.",
        (KvCacheOptions,),
        "cache_command:clear",
        "kv_disk",
    ),
    "cache export": Command(
        "Export the KV of a session on a server, or of a --kv-disk folder, to a file.",
        (KvExportOptions,),
        "cache_command:export",
        "file",
    ),
    "cache import": Command(
        "Import KV from a file of `cache export` into a server or a --kv-disk folder.",
        (KvImportOptions,),
        "cache_command:import_file",
        "file",
    ),
    "key add": Command(
        "Create an API key and add it to a server's key file.", (KeyAddOptions,), "key_command:add", "name"
    ),
    "key list": Command(
        "List the keys in a key file and their permissions.", (KeyListOptions,), "key_command:list_keys"
    ),
    "key rotate": Command(
        "Replace a key with a new one of the same name.", (KeyNameOptions,), "key_command:rotate", "name"
    ),
    "key revoke": Command("Revoke a key.", (KeyNameOptions,), "key_command:revoke", "name"),
    "usage": Command(
        "Report usage by day, key, tenant or model, and its cost.",
        (UsageOptions,),
        "usage_report:report_usage",
        "usage_ledger",
    ),
    "search": Command(
        "List the models in the catalogue: size, memory, speed, and whether they fit this machine.",
        (SearchOptions,),
        "machine.catalogue_command:search",
        "words",
    ),
    "show": Command("Show details of a model.", (ShowOptions,), "machine.catalogue_command:show", "model"),
    "pull": Command("Download a model and print its path.", (PullOptions,), "pull:pull", "model"),
    "quantize": Command(
        "Write a copy of a model with 4-bit or 8-bit weights, in the compressed-tensors format.",
        (QuantizeOptions,),
        "quantize_command:quantize",
        "model",
    ),
    "list": Command(
        "List the models on this machine and the command that serves each.",
        (ListOptions,),
        "machine.model_list:list_models",
    ),
    "rm": Command("Remove a model from this machine.", (RmOptions,), "machine.model_list:remove_model", "model"),
    "ps": Command("List the servers running on this machine.", (PsOptions,), "machine.server_list:list_servers"),
    "doctor": Command(
        "Check this machine: what it has, what is slow, what to install, and how it would run a model.",
        (DoctorOptions,),
        "machine.doctor:doctor",
        "model",
    ),
    "completion": Command(
        "Print a script that completes commands and options in a shell.",
        (CompletionOptions,),
        "completion:print_completion",
        "shell",
    ),
}
