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
        "Serve a model with OpenAI's interface.",
        (EngineConfig, ServerConfig),
        "serve_command:serve",
        "model",
        takes_models=True,
        common=_COMMON_OF_SERVE,
    ),
    "run": Command(
        "Talk with a model at once: fetch it, serve it while the chat lasts, and chat.",
        (RunOptions, SamplingOptions, ChatOptions),
        "chat.run_command:run",
        "model",
    ),
    "chat": Command(
        "Talk with a model that is being served.",
        (RemoteOptions, SamplingOptions, ChatOptions),
        "chat.chat_command:chat",
    ),
    "complete": Command(
        "Let a model that is being served continue a text.",
        (RemoteOptions, SamplingOptions, CompleteOptions),
        "complete_command:complete",
        "prompt",
    ),
    "run-batch": Command(
        "Answer a file of requests into another, and go on where it was broken off.",
        (RunBatchOptions, EngineConfig),
        "run_batch:run_batch",
    ),
    "bench serve": Command(
        "Load a server with requests and measure it.", (RemoteOptions, BenchOptions), "bench_sweep:bench"
    ),
    "bench step": Command(
        "Tell where the time of an engine's step goes.", (EngineConfig, StepOptions), "bench_step:bench_step", "model"
    ),
    "calibrate": Command(
        "Fit the probabilities of a typed question to labelled examples.",
        (RemoteOptions, CalibrateOptions),
        "calibrate_command:calibrate",
        "data",
    ),
    "models list": Command("List the versions of a server's models.", (AdminOptions,), "models_command:list_models_of"),
    "models add": Command(
        "Bring a version of an adapter to a server.", (AdminOptions, AddOptions), "models_command:add", "name"
    ),
    "models promote": Command(
        "Let a version get all new requests.", (AdminOptions, VersionOptions), "models_command:promote", "name"
    ),
    "models canary": Command(
        "Let a version get a share of new requests.",
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
        "Tell how a server's replicas are, and what has happened to them.",
        (FleetStatusOptions,),
        "fleet_status:print_fleet",
    ),
    "cache ls": Command("List what a folder of --kv-disk holds.", (KvCacheOptions,), "cache_command:ls", "kv_disk"),
    "cache stats": Command(
        "Tell how much KV a server or a folder of --kv-disk holds.", (KvCacheOptions,), "cache_command:stats", "kv_disk"
    ),
    "cache clear": Command(
        "Remove the cached KV of a server, or the files of a folder of --kv-disk.",
        (KvCacheOptions,),
        "cache_command:clear",
        "kv_disk",
    ),
    "cache export": Command(
        "Write a session of a server, or a folder of --kv-disk, into a file.",
        (KvExportOptions,),
        "cache_command:export",
        "file",
    ),
    "cache import": Command(
        "Take KV from a file of `cache export` to a server, or a folder of --kv-disk.",
        (KvImportOptions,),
        "cache_command:import_file",
        "file",
    ),
    "key add": Command("Make an API key, and let a server know it.", (KeyAddOptions,), "key_command:add", "name"),
    "key list": Command("List the keys of a file, and what each may do.", (KeyListOptions,), "key_command:list_keys"),
    "key rotate": Command("Make a new key in the place of one.", (KeyNameOptions,), "key_command:rotate", "name"),
    "key revoke": Command("Take a key away.", (KeyNameOptions,), "key_command:revoke", "name"),
    "usage": Command(
        "Tell what was used, by day, key, tenant or model, and what it costs.",
        (UsageOptions,),
        "usage_report:report_usage",
        "usage_ledger",
    ),
    "search": Command(
        "List models by short names: their size, memory and speed, and whether they fit this machine.",
        (SearchOptions,),
        "machine.catalogue_command:search",
        "words",
    ),
    "show": Command("Tell what is known of a model.", (ShowOptions,), "machine.catalogue_command:show", "model"),
    "pull": Command("Bring a model to this machine and say where it is.", (PullOptions,), "pull:pull", "model"),
    "quantize": Command(
        "Write a copy of a model with weights of 4 or 8 bits, in the format compressed-tensors.",
        (QuantizeOptions,),
        "quantize_command:quantize",
        "model",
    ),
    "list": Command(
        "List the models on this machine, and what each is served with.",
        (ListOptions,),
        "machine.model_list:list_models",
    ),
    "rm": Command("Remove a model from this machine.", (RmOptions,), "machine.model_list:remove_model", "model"),
    "ps": Command("List the servers that run on this machine.", (PsOptions,), "machine.server_list:list_servers"),
    "doctor": Command(
        "Tell what this machine has, what will be slow, and what to install; and how a model will be computed here.",
        (DoctorOptions,),
        "machine.doctor:doctor",
        "model",
    ),
    "completion": Command(
        "Print the completion of commands and options for a shell.",
        (CompletionOptions,),
        "completion:print_completion",
        "shell",
    ),
}
