"""Command line ``rootgraft``: its commands, from serve to completion, and their exit codes.

A command's code is imported when it runs, so that help and usage errors are printed at once. Exit codes: 0 done, 1 the
command failed, 2 the command line is wrong, 130 interrupted.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError, EngineError
from ...engine.peer_options import nearest
from ..config import ServerConfig
from ..models_file import ModelEntry, ServedModel, check_digest, check_models, naming_place
from .flag_parser import command_parser, parse, parse_models
from .machine.machine_options import CompletionOptions, DoctorOptions, ListOptions, PsOptions, RmOptions
from .options import (
    AddOptions,
    AdminOptions,
    BenchOptions,
    CanaryOptions,
    ChatOptions,
    CompleteOptions,
    FleetStatusOptions,
    KeyOptions,
    NameOptions,
    PullOptions,
    RemoteOptions,
    RunBatchOptions,
    SamplingOptions,
    StepOptions,
    VersionOptions,
)

if TYPE_CHECKING:
    from ...engine.checkpoint.locate import ModelFiles


ParsedModels = Sequence[tuple[ModelEntry, list[Any]]]
"""Entry and instances of options of each model."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of ``rootgraft``.

    Attributes:
        about: a sentence for the help.
        classes: dataclasses of its options.
        run: takes one instance of each class and returns the exit code.
        positional: an option that may be given without its flag, or an empty string.
        takes_models: ``run`` takes the models, of which a file may name several, and what reads them again.
    """

    about: str
    classes: tuple[type[Any], ...]
    run: Callable[..., int]
    positional: str = ""
    takes_models: bool = False


def _serve(models: ParsedModels, read_again: Callable[[], ParsedModels]) -> int:
    """Serve models. The process of a single engine imports the engine while this one imports the server."""
    from ...engine.process_memory import uncollected
    from ...engine.serving.engine_spawn import EnginePreload

    with ExitStack() as stack:
        if models[0][0].options is not None:  # a SIGHUP has the file read again, once the server can do it
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
            stack.callback(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGHUP})
        spawn = stack.enter_context(EnginePreload()).spawn if _is_single_engine(models) else None
        served = _checked(models)
        with uncollected():
            from ..http.server import serve_models
        return serve_models(served, lambda: _checked(read_again()), spawn)


def _is_single_engine(models: ParsedModels) -> bool:
    servers: list[ServerConfig] = [options[-1] for _, options in models]
    return len(servers) == 1 and not servers[0].is_fleet and servers[0].ray_address is None


def _checked(parsed: ParsedModels) -> Sequence[ServedModel]:
    """Return models once their files are on this machine and fit together. Raises ConfigError, ModelError."""
    from ...engine.checkpoint.base_digest import base_digest

    models, names = [ServedModel(entry, *options) for entry, options in parsed], []
    for model in models:
        engine = model.engine
        with naming_place(model.entry):
            files = _fetch(engine.model, engine.revision)
            digest = model.entry.digest and base_digest(files.path, dummy=engine.load_format == "dummy")
        if digest is not None:
            check_digest(model.entry, files.path, digest)
        names.append(model.server.served_model_name or (files.name,))
    if len(models) > 1:
        check_models(models, names)
    return models


def _chat(*options: Any) -> int:
    from .terminal import chat

    return chat(*options)


def _complete(*options: Any) -> int:
    from .terminal import complete

    return complete(*options)


def _run_batch(batch: RunBatchOptions, engine: EngineConfig) -> int:
    from .run_batch import run_batch

    return run_batch(engine, batch)


def _bench_serve(remote: RemoteOptions, options: BenchOptions) -> int:
    if options.sweep is not None:
        from .bench_sweep import bench_sweep

        return bench_sweep(remote, options)
    from .bench_serve import bench_serve

    return bench_serve(remote, options)


def _bench_step(engine: EngineConfig, options: StepOptions) -> int:
    from .bench_step import bench_step

    return bench_step(engine, options)


def _pull(options: PullOptions) -> int:
    print(_fetch(options.model, options.revision).path)
    return 0


def _fetch(model: str | None, revision: str | None) -> ModelFiles:
    """Download a model if it is not cached: a progress bar in a terminal, a line per file in a log."""
    from tqdm import tqdm

    from ...engine.checkpoint.locate import resolve_model

    bars: dict[str, tqdm] = {}
    in_terminal = sys.stderr.isatty()

    def progress(file: str, done: int, total: int) -> None:
        if file not in bars:
            if not in_terminal:
                print(f"{file} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
            bars[file] = tqdm(
                desc=file,
                total=total,
                unit="B",
                unit_scale=True,
                disable=not in_terminal,
                ncols=min(shutil.get_terminal_size().columns, 110),
                bar_format="{desc}  {percentage:3.0f}% {bar} {n_fmt}/{total_fmt}B  {rate_fmt}",
            )
        bars[file].update(done - bars[file].n)

    try:
        return resolve_model(model, revision=revision, progress=progress)
    finally:
        for bar in bars.values():
            bar.close()


def _fleet_status(options: FleetStatusOptions) -> int:
    from .fleet_status import print_fleet

    return print_fleet(options)


def _key(options: KeyOptions) -> int:
    from ..access.api_keys import new_key

    key, lines = new_key(options.name)
    print(f"The key, which is shown only now: {key}", file=sys.stderr)
    print(lines)
    return 0


def _models(verb: str, *options: Any) -> int:
    from . import models_command

    verbs: dict[str, Callable[..., int]] = {
        "list": models_command.list_models_of,
        "add": models_command.add,
        "promote": models_command.promote,
        "canary": models_command.canary,
        "rollback": models_command.rollback,
        "remove": models_command.remove,
    }
    return verbs[verb](*options)


def _list(options: ListOptions) -> int:
    from .machine.model_list import list_models

    return list_models(options)


def _rm(options: RmOptions) -> int:
    from .machine.model_list import remove_model

    return remove_model(options)


def _ps(options: PsOptions) -> int:
    from .machine.server_list import list_servers

    return list_servers(options)


def _doctor(options: DoctorOptions) -> int:
    from .machine.doctor import doctor

    return doctor(options)


def _completion(options: CompletionOptions) -> int:
    from .machine.completion import print_completion

    parsers = {
        name: (command.about, command_parser(f"rootgraft {name}", command.about, command.classes, command.positional))
        for name, command in COMMANDS.items()
    }
    return print_completion(options, parsers)


COMMANDS = {
    "serve": Command(
        "Serve a model with OpenAI's interface.", (EngineConfig, ServerConfig), _serve, "model", takes_models=True
    ),
    "chat": Command("Talk with a model that is being served.", (RemoteOptions, SamplingOptions, ChatOptions), _chat),
    "complete": Command(
        "Let a model that is being served continue a text.",
        (RemoteOptions, SamplingOptions, CompleteOptions),
        _complete,
        positional="prompt",
    ),
    "run-batch": Command(
        "Answer a file of requests into another, and go on where it was broken off.",
        (RunBatchOptions, EngineConfig),
        _run_batch,
    ),
    "bench serve": Command("Load a server with requests and measure it.", (RemoteOptions, BenchOptions), _bench_serve),
    "bench step": Command(
        "Tell where the time of an engine's step goes.", (EngineConfig, StepOptions), _bench_step, positional="model"
    ),
    "models list": Command("List the versions of a server's models.", (AdminOptions,), partial(_models, "list")),
    "models add": Command(
        "Bring a version of an adapter to a server.", (AdminOptions, AddOptions), partial(_models, "add"), "name"
    ),
    "models promote": Command(
        "Let a version get all new requests.", (AdminOptions, VersionOptions), partial(_models, "promote"), "name"
    ),
    "models canary": Command(
        "Let a version get a share of new requests.",
        (AdminOptions, VersionOptions, CanaryOptions),
        partial(_models, "canary"),
        "name",
    ),
    "models rollback": Command(
        "Undo the last promote or canary of a name.", (AdminOptions, NameOptions), partial(_models, "rollback"), "name"
    ),
    "models remove": Command(
        "Retire a version or a name, or stop serving a base model.",
        (AdminOptions, NameOptions),
        partial(_models, "remove"),
        "name",
    ),
    "fleet status": Command(
        "Tell how a server's replicas are, and what has happened to them.", (FleetStatusOptions,), _fleet_status
    ),
    "key": Command("Make an API key, and the lines for --api-key-file.", (KeyOptions,), _key, "name"),
    "pull": Command("Bring a model to this machine and say where it is.", (PullOptions,), _pull, "model"),
    "list": Command("List the models on this machine, and what each is served with.", (ListOptions,), _list),
    "rm": Command("Remove a model from this machine.", (RmOptions,), _rm, "model"),
    "ps": Command("List the servers that run on this machine.", (PsOptions,), _ps),
    "doctor": Command(
        "Tell what this machine has, what will be slow, and what to install; and how a model will be computed here.",
        (DoctorOptions,),
        _doctor,
        "model",
    ),
    "completion": Command(
        "Print the completion of commands and options for a shell.", (CompletionOptions,), _completion, "shell"
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Errors of usage and of the engine are one line on standard error."""
    _open_standard_descriptors()
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # The reader of our output has closed it: discard the buffered rest silently.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code


def _open_standard_descriptors() -> None:
    """Open what is closed of the descriptors 0 to 2, as after ``2>&-``: a socket must not get one of their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def _main(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] in ("-V", "--version"):
        print(f"rootgraft {_version()}")
        return 0
    group = [command for command in COMMANDS if command.startswith(f"{words[0]} ")]
    if group and words[1:2] in (["-h"], ["--help"]):
        print(_overview(group))
        return 0
    name = " ".join(words[:2]) if group else words[0]
    return _run(name, words[len(name.split()) :])


def _run(name: str, argv: Sequence[str]) -> int:
    command = COMMANDS.get(name)
    if command is None:
        group, _, verb = name.partition(" ")
        inner = [each for each in COMMANDS if each.startswith(f"{group} ")]
        hint = nearest(name, inner if verb else () if inner else COMMANDS) or _there_is(inner)
        return _print_error("rootgraft", f"unknown command {name!r}.{hint}", 2)
    prog = f"rootgraft {name}"
    try:
        line = (prog, command.about, command.classes, command.positional, argv, partial(_print_note, prog))
        options = [parse_models(*line), partial(parse_models, *line)] if command.takes_models else parse(*line)
    except ConfigError as error:
        return _print_error(prog, f"{error} See '{prog} --help'.", 2)
    except SystemExit:  # argparse has printed the help.
        return 0
    try:
        return command.run(*options)
    except EngineError as error:
        return _print_error(prog, str(error), 1)
    except OSError as error:
        return _print_error(prog, _of_system(error), 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "rootgraft":
            raise
        return _print_error(prog, f"the package {error.name} is missing. Try: pip install --upgrade rootgraft", 1)


def _of_system(error: OSError) -> str:
    """Return an error of the operating system in one line, with the file that it is about."""
    if error.filename is None and "temporary directory" in str(error):
        return "no folder for temporary files can be written. Try: TMPDIR=FOLDER, with one that can be"
    about = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{about}"


def _print_note(prog: str, sentence: str) -> None:
    print(f"{prog}: {sentence}", file=sys.stderr)


def _print_error(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return code


def _there_is(names: Sequence[str]) -> str:
    """Return a sentence that names commands; an empty string for none."""
    *others, last = names or [""]
    return (f" There are {', '.join(others)} and {last}." if others else f" There is {last}.") if last else ""


def _overview(names: Collection[str] = COMMANDS) -> str:
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {COMMANDS[name].about}" for name in names]
    return "\n".join(
        ["usage: rootgraft COMMAND [options]", "", *lines, "", "'rootgraft COMMAND --help' lists a command's options."]
    )


def _version() -> str:
    try:
        return version("rootgraft")
    except PackageNotFoundError:
        return "(from a checkout that is not installed)"


if __name__ == "__main__":
    sys.exit(main())
