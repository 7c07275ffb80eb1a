"""Command line ``rootgraft``: finds the command, reads its options, runs it, and prints its errors on one line.

Exit codes: 0 success, 1 the command failed, 2 the command line is malformed, 130 interrupted.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Collection, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from ...engine.errors import ConfigError, EngineError
from ...engine.peer_options import nearest
from .commands import COMMANDS
from .flag_parser import parse, parse_models, short_help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code. Errors of usage and of the engine are one line on standard error."""
    _open_standard_descriptors()
    try:
        code = _main(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    # The reader of our output has closed it, so the rest in the buffer is discarded without an error.
    except BrokenPipeError:
        _discard_output()
        return 1
    except OSError as error:  # This occurs, for example, if the output goes to a file on a full disk.
        _discard_output()
        return _print_error("rootgraft", f"standard output cannot be written: {_of_system(error)}", 1)
    return code


def _output_is_closed() -> bool:
    """Return whether the reader of standard output has closed it, as after ``| head``. Other pipes may break, too."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_output() -> None:
    """Discard the rest in the buffer of standard output, which the interpreter would fail to write when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _open_standard_descriptors() -> None:
    """Open closed descriptors among 0 to 2, as after ``2>&-``, so that no socket gets their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # os.open uses the lowest free number
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
        print(_overview(group, f"rootgraft {words[0]}"))
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
    if command.common and not {"-h", "--help"}.isdisjoint(argv):
        print(short_help(prog, command.about, command.classes, command.positional, command.common))
        return 0
    argv = ["--help" if word == "--help-all" else word for word in argv]
    try:
        line = (prog, command.about, command.classes, command.positional, argv, partial(_print_note, prog))
        options = [parse_models(*line), partial(parse_models, *line)] if command.takes_models else parse(*line)
    except ConfigError as error:
        return _print_error(prog, f"{error} See '{prog} --help'.", 2)
    except SystemExit:  # argparse has printed the help.
        return 0
    try:
        return command.load()(*options)
    except EngineError as error:
        return _print_error(prog, str(error), 1)
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _output_is_closed():
            raise
        return _print_error(prog, _of_system(error), 1)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "rootgraft":
            raise
        return _print_error(prog, f"the package {error.name} is missing. Try: pip install --upgrade rootgraft", 1)


def _of_system(error: OSError) -> str:
    """Return an error of the operating system on one line, with the name of its file."""
    if error.filename is None and "temporary directory" in str(error):
        return "no folder for temporary files is writable. Try: TMPDIR=FOLDER with a writable folder"
    about = "" if error.filename is None else f": {error.filename}"
    return f"{error.strerror or error}{about}"


def _print_note(prog: str, sentence: str) -> None:
    print(f"{prog}: {sentence}", file=sys.stderr)


def _print_error(prog: str, message: str, code: int) -> int:
    print(f"{prog}: {message}", file=sys.stderr)
    return code


def _there_is(names: Sequence[str]) -> str:
    """Return a sentence that lists commands; an empty string if there are none."""
    *others, last = names or [""]
    return (f" There are {', '.join(others)} and {last}." if others else f" There is {last}.") if last else ""


def _overview(names: Collection[str] = COMMANDS, prog: str = "rootgraft") -> str:
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {COMMANDS[name].about}" for name in names]
    return "\n".join(
        [f"usage: {prog} COMMAND [options]", "", *lines, "", f"'{prog} COMMAND --help' lists a command's options."]
    )


def _version() -> str:
    try:
        return version("rootgraft")
    except PackageNotFoundError:
        return "(from a checkout that is not installed)"


if __name__ == "__main__":
    sys.exit(main())
