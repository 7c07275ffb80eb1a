"""The command line itself: help, flags made from dataclasses, mistakes answered in one line."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rootgraft.api.cli.commands import COMMANDS
from rootgraft.api.cli.flag_parser import parse
from rootgraft.api.cli.main import main
from rootgraft.api.cli.options import BenchOptions, SamplingOptions
from rootgraft.api.config import ServerConfig
from rootgraft.api.models_file import ModelEntry, ServedModel
from rootgraft.engine.checkpoint.locate import ModelFiles
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.types import MAX_SEED, MIN_SEED

ROOT = Path(__file__).parents[3]
HEAVY_MODULES = ("torch", "aiohttp", "fastapi", "uvicorn", "transformers", "numpy", "tqdm", "huggingface_hub")


def test_the_overview_names_every_command(capsys) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert all(f"  {name} " in overview for name in COMMANDS)
    assert main([]) == 2


def test_the_version_is_one_line(capsys) -> None:
    assert main(["--version"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("rootgraft ")
    assert out.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_option_of_a_command(name: str, capsys) -> None:
    assert main([*name.split(), "--help-all"]) == 0
    shown = capsys.readouterr().out
    for cls in COMMANDS[name].classes:
        for spec in fields(cls):
            assert "--" + spec.name.replace("_", "-") in shown


def test_help_of_serve_shows_what_is_common(capsys) -> None:
    assert main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    options = {word.strip(",") for word in shown.split() if word.startswith("--")}
    assert {"--" + name.replace("_", "-") for name in COMMANDS["serve"].common} <= options
    assert "'rootgraft serve --help-all' lists all options." in shown
    assert len(shown.splitlines()) < 45, "an option's help is its first sentences"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_names_a_function_that_takes_its_options(name: str) -> None:
    command = COMMANDS[name]
    hints = get_type_hints(command.load())
    assert hints.pop("return") is int
    assert command.takes_models or tuple(hints.values()) == command.classes


@pytest.mark.parametrize("words", ["models -h", "models --help", "help models"])
def test_help_of_a_group_lists_its_commands(words: str, capsys) -> None:
    assert main(words.split()) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "usage: rootgraft models COMMAND [options]"
    shown = [line.split("  ")[1] for line in lines if line.startswith("  ")]
    assert shown == [name for name in COMMANDS if name.startswith("models ")]


def test_help_takes_a_command(capsys) -> None:
    for words, first in (
        ("help models add", "usage: rootgraft models add"),
        ("help usage", "usage: rootgraft usage"),
        ("help", "usage: rootgraft COMMAND"),
    ):
        assert main(words.split()) == 0
        assert capsys.readouterr().out.startswith(first)
    assert main(["help", "serv"]) == 2
    assert "Did you mean serve?" in capsys.readouterr().err


def test_help_and_mistakes_load_nothing_heavy() -> None:
    script = (
        "import sys; from rootgraft.api.cli.main import main; main(['serve', '--help']);"
        "main(['bench', 'serve', '--nope']); "
        f"print([name for name in {HEAVY_MODULES} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("serv", "rootgraft: unknown command 'serv'. Did you mean serve?"),
        ("bench", "rootgraft: unknown command 'bench'. There are bench serve and bench step."),
        ("bench serv", "rootgraft: unknown command 'bench serv'. Did you mean bench serve?"),
        ("models", "rootgraft: unknown command 'models'. There are models list, models add, "),
        ("fleet what", "rootgraft: unknown command 'fleet what'. Did you mean fleet status?"),
        (
            "key add a/b --api-key-file k.toml",
            "rootgraft key add: --name must be 1 to 64 letters, digits and ._@:-, not 'a/b'.",
        ),
        ("serve --prot 8001", "rootgraft serve: unknown option --prot. Did you mean --port?"),
        ("sho", "rootgraft: unknown command 'sho'. Did you mean show?"),
        ("serve --ctx-size 4096", "rootgraft serve: unknown option --ctx-size. Did you mean --max-model-len?"),
        ("serve --prot=8001", "rootgraft serve: unknown option --prot. Did you mean --port?"),
        ("serve --port x", "rootgraft serve: --port: must be a whole number such as 4096"),
        ("serve --port", "rootgraft serve: --port: expected one argument."),
        ("serve --port 70000", "rootgraft serve: --port must be at most 65535, not 70000."),
        ("serve --dtype int3", "rootgraft serve: --dtype: must be one of auto, float32"),
        ("serve a b", "rootgraft serve: unexpected argument 'b'."),
        ("serve a --model b", "rootgraft serve: a and --model b contradict each other."),
        ("serve --max-num-seqs 64 --max-num-batched-tokens 8", "rootgraft serve: --max-num-batched-tokens (8) must be"),
        ("serve --gpu-memory-utilization nan", "rootgraft serve: --gpu-memory-utilization must be at least 0.05"),
        (
            "serve --target-itl-ms 60001",
            "rootgraft serve: --target-itl-ms must be 0, for no target, or from 1 to",
        ),
        (
            "serve --target-itl-ms.fast 5",
            "rootgraft serve: --target-itl-ms has no key 'fast'; its keys are realtime, interactive",
        ),
        ("chat --temperature -1", "rootgraft chat: --temperature must be at least 0, not -1.0."),
        ("bench serve --dataset x --shared-prefix-len 5", "rootgraft bench serve: --shared-prefix-len is for random"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(argv: str, message: str, capsys) -> None:
    assert main(argv.split()) == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


def test_an_error_of_the_engine_is_one_line_and_exit_code_1(tmp_path: Path, capsys) -> None:
    assert main(["pull", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("rootgraft pull: --model: ")
    assert error.count("\n") == 1


def test_pull_prints_where_the_model_is(tmp_path: Path, capsys) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert main(["pull", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"


def test_flags_become_fields() -> None:
    argv = "models/x --no-enable-prefix-caching --max-num-seqs 8 --api-key a --api-key b --kv-cache-memory 0.5"
    engine, server = parse("p", "about", (EngineConfig, ServerConfig), "model", argv.split())
    assert engine == EngineConfig(model="models/x", enable_prefix_caching=False, max_num_seqs=8, kv_cache_memory=0.5)
    assert server == ServerConfig(api_key=("a", "b"))
    assert parse("p", "about", (EngineConfig, ServerConfig), "model", []) == [EngineConfig(), ServerConfig()]


@pytest.mark.parametrize("kind", [EngineConfig, SamplingOptions])
def test_seeds_are_any_integer_of_64_bits(kind: type[Any]) -> None:
    for seed in (-1, MIN_SEED, MAX_SEED):
        [options] = parse("p", "about", (kind,), "", ["--seed", str(seed)])
        assert options.seed == seed
    for seed in (MIN_SEED - 1, MAX_SEED + 1):
        with pytest.raises(ConfigError, match="--seed must be at"):
            parse("p", "about", (kind,), "", ["--seed", str(seed)])


def test_several_adapters_follow_one_flag_as_with_vllm() -> None:
    argv = "models/x --enable-lora --lora-modules a=1 b=2 --max-loras 2 --lora-modules c=3"
    (engine,) = parse("p", "about", (EngineConfig,), "model", argv.split())
    assert engine.model == "models/x"
    assert engine.named_adapters == {"a": "1", "b": "2", "c": "3"}


@given(
    st.builds(
        BenchOptions,
        endpoint=st.sampled_from(["chat", "completions"]),
        num_prompts=st.integers(1, 1 << 40),
        request_rate=st.floats(0.001, allow_nan=False),
        max_concurrency=st.none() | st.integers(1, 99),
        ignore_eos=st.booleans(),
        extra_body=st.none() | st.text().filter(lambda text: text != "None"),  # which is how no value is written
    )
)
def test_options_survive_the_way_through_the_command_line(options: BenchOptions) -> None:
    argv = []
    for spec in fields(options):
        value, flag = getattr(options, spec.name), spec.name.replace("_", "-")
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, tuple):
            argv += [f"--{flag}", *value] if value else []
        elif value is not None:
            argv.append(f"--{flag}={value}")
    assert parse("p", "about", (BenchOptions,), "", argv) == [options]


def test_a_reader_that_leaves_early_gets_no_traceback() -> None:
    program = 'import sys; from rootgraft.api.cli.main import main; sys.exit(main(["--help"]))'
    command = f"{sys.executable} -c '{program}' | true"
    done = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_descriptors_are_opened(closed: str, tmp_path: Path) -> None:
    """Else the engine's socket would be the standard error of its process, and a command without output fail."""
    program = (
        "import os, sys; from rootgraft.api.cli.main import main; code = main(['--version']); "
        "print('', file=sys.stderr); links = [os.readlink(f'/proc/self/fd/{number}') for number in range(3)]; "
        "open(sys.argv[1], 'w').write(' '.join(links)); sys.exit(code)"
    )
    command = f"exec {sys.executable} -P -c {shlex.quote(program)} {tmp_path / 'links'} {closed}"
    nothing = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    assert subprocess.run(command, shell=True, check=False, **nothing).returncode == 0
    assert (tmp_path / "links").read_text() == "/dev/null /dev/null /dev/null"


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_line_of_a_download_fits_its_terminal(columns: int, monkeypatch, capsys) -> None:
    def resolve(model: str | None, *, revision: str | None, progress: Callable[[str, int, int], None]) -> ModelFiles:
        for done in (0, 40_000_000, 92_871_040):
            progress("Downloading SmolLM2-135M-Instruct.Q4_1.gguf", done, 92_871_040)
        return ModelFiles(Path("model.gguf"), "model")

    monkeypatch.setattr("rootgraft.engine.checkpoint.locate.resolve_model", resolve)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["pull"]) == 0
    lines = capsys.readouterr().err.strip().split("\r")
    assert all(len(line.rstrip("\n")) <= columns and line.endswith("B/s") for line in lines if line)
    assert "100%" in lines[-1] and "92.9M/92.9MB" in lines[-1]


def test_serve_fetches_the_model_before_it_starts(tmp_path: Path, monkeypatch) -> None:
    import rootgraft.api.http.server

    served = []
    monkeypatch.setattr(rootgraft.api.http.server, "serve_models", lambda models, *_: served.extend(models) or 70)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--port", "0"]) == 70
    assert served == [ServedModel(ModelEntry(), EngineConfig(model=str(tmp_path)), ServerConfig(port=0))]
    assert main(["serve", str(tmp_path / "none")]) == 1
    assert len(served) == 1
