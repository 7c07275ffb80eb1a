# ruff: noqa: E501 (command lines and messages)
"""Options of vLLM and SGLang: the tables, the spellings, what is accepted, and what is refused with what to do instead."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path

import pytest
from support.options_page import page

from rootgraft.api.cli.flag_parser import parse
from rootgraft.api.cli.main import main
from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.peer_options import engine_keywords, environment, peer_options, read_options, whole_number

ROOT = Path(__file__).parents[2]
VLLM_NAMES = Path(__file__).parent / "vllm_serve_options.txt"
OURS = {spec.name.replace("_", "-"): spec for cls in (EngineConfig, ServerConfig) for spec in fields(cls)}
# Options that are no key of another.
WHOLE = {name: option for name, option in peer_options().items() if "." not in name}


def serve(line: str, notes: list[str] | None = None) -> tuple[EngineConfig, ServerConfig]:
    """The options that a command line gives."""
    told = notes.append if notes is not None else lambda note: None
    engine, server = parse("p", "about", (EngineConfig, ServerConfig), "model", line.split(), told)
    return engine, server


def changed(line: str) -> dict[str, object]:
    """The options that a command line gives other values than their defaults."""
    return {
        spec.name: getattr(config, spec.name)
        for config in serve(line)
        for spec in fields(config)
        if getattr(config, spec.name) != spec.default
    }


def test_every_option_of_vllm_has_a_row_and_a_treatment() -> None:
    rows = read_options("vllm")
    assert set(VLLM_NAMES.read_text("utf-8").split()) <= rows.keys()
    assert {option.status for option in rows.values()} == {"done", "accepted", "refused"}


@pytest.mark.parametrize("peer", ["vllm", "sglang"])
def test_rows_agree_with_our_options(peer: str) -> None:
    for name, option in read_options(peer).items():
        if option.ours:
            assert option.ours == "config" or option.ours in OURS, name
            spec = OURS.get(option.ours)
            assert option.takes != "flag" or (spec and isinstance(spec.default, bool)), name
            choices = spec.metadata["choices"] if spec else ()
            assert all(value in (*choices, "None", "false") for value in option.values.values() if choices), name
        else:
            assert option.name not in OURS, f"{name} is an option of ours"
            assert option.refuse or option.inert, name
        assert not (option.ours and option.inert), name
        for text in filter(None, (option.refuse, option.inert)):
            assert text.endswith("."), name


def test_no_short_spelling_is_given_twice() -> None:
    shorts = [short for option in peer_options().values() for short in option.short]
    assert len(shorts) == len(set(shorts))


def test_the_page_of_options_is_current() -> None:
    made = (ROOT / "docs" / "reference" / "options.md").read_text("utf-8")
    assert made == page(), "run python tests/support/options_page.py > docs/reference/options.md"


@pytest.mark.parametrize("name", [name for name, option in WHOLE.items() if option.status == "refused"])
def test_a_refused_option_says_what_to_do_instead(name: str) -> None:
    option = peer_options()[name]
    value = "" if option.takes == "flag" else " x"
    with pytest.raises(ConfigError) as refusal:
        serve(f"m --{name}{value}")
    assert str(refusal.value) == f"--{name}: {option.refuse}"


@pytest.mark.parametrize("name", [name for name, option in WHOLE.items() if option.status == "accepted"])
def test_an_accepted_option_changes_nothing(name: str) -> None:
    option = peer_options()[name]
    value = option.same[0].partition("..")[2] or option.same[0] if option.same else "x"
    notes: list[str] = []
    if option.takes == "flag":
        line = f"--{name}" if value != "false" else f"--no-{name}"
    else:
        line = f"--{name}={value.replace(' ', '')}"
    assert serve(f"m {line}", notes) == (EngineConfig(model="m"), ServerConfig())
    assert bool(notes) == (not option.same)
    assert all(option.inert in note for note in notes)


@pytest.mark.parametrize("name", [name for name, option in WHOLE.items() if option.same and not option.inert])
def test_a_value_that_we_do_not_do_is_refused(name: str) -> None:
    option = peer_options()[name]
    line = f"--no-{name}" if option.takes == "flag" else f"--{name}=other"
    with pytest.raises(ConfigError, match=f"^{line.partition('=')[0]}"):
        serve(f"m {line}")


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("m --max_model_len 4k", {"max_model_len": 4000}),
        ("m --max-model-len=4K", {"max_model_len": 4096}),
        ("m --max-model-len 25.6k", {"max_model_len": 25600}),
        ("m --max-model-len auto", {}),
        ("m --max-model-len -1", {}),
        ("m --max-num-seqs 1024", {"max_num_seqs": 1024}),
        ("m --max-num-seqs 512", {"max_num_seqs": 512}),
        ("m --max-num-seqs 1024 --max-num-batched-tokens 1M", {"max_num_seqs": 1024, "max_num_batched_tokens": 1 << 20}),
        ("m --dtype half", {"dtype": "float16"}),
        ("m --dtype float", {"dtype": "float32"}),
        ("m -tp 1 -pp=1 -O3 -cc.mode=3 -O 2", {}),
        ("m --kv-cache-memory-bytes 2G", {"kv_cache_memory": 2.0}),
        ("m --enable-prefix-caching=False", {"enable_prefix_caching": False}),
        ("m --enable-prefix-caching true --port 1", {"port": 1}),
        ("m --enable-chunked-prefill False", {}),
        ("--enable-prefix-caching m", {}),
        ("m --tokenizer m", {}),
        ("m --tokenizer None", {}),
        ("m --uvicorn-log-level critical", {"log_level": "error"}),
        ("m --served-model-name a b", {"served_model_name": ("a", "b")}),
        ("m --allowed-origins [\"x\",\"y\"]", {"allowed_origins": ("x", "y")}),
        ("m --speculative-config.method ngram", {"speculative_config": '{"method": "ngram"}'}),
        ("m --target-itl-ms 50", {"target_itl_ms": "50"}),
        ("m --target-itl-ms.batch 500", {"target_itl_ms": '{"batch": 500}'}),
        ("m -sc.method=ngram -sc.num_speculative_tokens=3", {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}),
        ("m --compilation-config.a.b+ 1 --compilation-config.a.b+=2,3", {}),
        ("--model-path m --tp 1 --mem-fraction-static 0.7 --context-length 8k", {"gpu_memory_utilization": 0.7, "max_model_len": 8000}),
        ("m --disable-radix-cache --disable-cuda-graph", {"enable_prefix_caching": False, "enforce_eager": True}),
        ("m --no-disable-radix-cache", {}),
        ("m --lora-paths a=1 b=2", {"enable_lora": True, "lora_modules": ("a=1", "b=2")}),
        ("m --tool-call-parser qwen25", {"tool_call_parser": "hermes"}),
        ("m --tool-call-parser deepseekv32", {"tool_call_parser": "deepseek_v32"}),
        ("m --reasoning-parser deepseek_v4", {"reasoning_parser": "deepseek_v3"}),
    ],
)  # fmt: skip
def test_spellings_of_vllm_and_sglang(line: str, options: dict[str, object]) -> None:
    assert changed(line) == {"model": "m"} | options


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-pp 65", "--pipeline-parallel-size must be at most 64, not 65."),
        ("-tp 65", "--tensor-parallel-size must be at most 64, not 65."),
        ("--tensor-parralel-size 2", "unknown option --tensor-parralel-size. Did you mean --tensor-parallel-size?"),
        ("--max-model-length 5", "unknown option --max-model-length. Did you mean --max-model-len?"),
        ("--max-model-len 1.5", "--max-model-len: must be a whole number such as 4096, 4k (4000) or 4K (4096), not 1.5."),
        ("--quantization awq", "--quantization: must be one of gguf, gguf_dynamic, int8_weight_only, int8_dynamic, widened, not awq. Leave it out"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype: must be one of auto, int8, fp8, fp8_e4m3, not fp8_e5m2. There is no KV"),
        ("--tool-call-parser nope", "--tool-call-parser: must be one of auto, mistral"),
        ("--gpu-memory-utilization x", "--gpu-memory-utilization: must be a number, not x."),
        ("--structured-outputs-config {\"bakend\":1}", "--structured-outputs-config.bakend 1: unknown key. Did you mean structured-outputs-config.backend?"),
        ("--structured-outputs-config x", "--structured-outputs-config x: must be a JSON object."),
        ("--structured-outputs-config.enable_in_reasoning true", "--structured-outputs-config.enable_in_reasoning: a schema binds"),
        ("--speculative-config {} --speculative-config.method off", "--speculative-config is given both as a JSON object and key by key"),
        ("--compilation-config.mode", "--compilation-config.mode: expected one argument."),
        ("-t 1", "unknown option -t."),
        ("--tensor 1", "unknown option --tensor."),
        ("--enable-lora --lora-modules {}", "--lora-modules: JSON must be such as"),
        ("--no-trust-remote-code --nope", "unknown option --nope."),
    ],
)  # fmt: skip
def test_a_refusal_says_what_is_wrong(line: str, message: str, capsys) -> None:
    assert main(["serve", "m", *line.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rootgraft serve: {message}")
    assert error.count("\n") == 1


def test_a_model_behind_an_option_of_several_words_is_not_swallowed() -> None:
    for line in ("--served-model-name a models/x", "--port 1 --api-key k models/x --host h"):
        with pytest.raises(ConfigError, match="put it first or give it with --model"):
            serve(line)
    assert serve("--model models/x --api-key a b")[1].api_key == ("a", "b")
    assert serve("models/x --api-key a b")[1].api_key == ("a", "b")
    assert serve("--api-key a --port 1 models/x")[0].model == "models/x"
    assert serve("--enable-lora models/x --served-model-name a b")[0].model == "models/x"
    assert serve("--enable-lora --lora-modules a=1 b=2 --adapter-sources hf://org 10.0.0.0/8")[0].model is None


def test_adapters_of_vllm_may_be_json() -> None:
    line = 'm --enable-lora --lora-modules {"name":"a","path":"/p","base_model_name":"m"} b=/q'
    assert serve(line)[0].named_adapters == {"a": "/p", "b": "/q"}


def test_a_file_of_options_counts_less_than_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: m\nport: 8001\nmax_model_len: 4k\nenable-lora: true\nenable-prefix-caching: false\n"
        "lora-modules: [a=1, b=2]\napi-key: [k1, k2]\ntensor-parallel-size: 1\n"
        "speculative-config: {method: ngram}\ntokenizer: null\n"
    )
    engine, server = serve(f"--config {file} --port 8002 --lora-modules c=3")
    assert (engine.model, engine.max_model_len, engine.enable_prefix_caching) == ("m", 4000, False)
    assert engine.named_adapters == {"c": "3"}
    assert engine.speculative.method == "ngram"
    assert (server.port, server.api_key) == (8002, ("k1", "k2"))
    assert serve(f"other --config={file}")[0].model == "other"
    assert serve(f"--config {file} --max-model-len auto")[0].max_model_len is None
    assert serve(f"--config {file} --served-model-name a b")[0].model == "m"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "unknown option --prot. Did you mean --port?"),
        ("port: x", "--port: must be a whole number"),
        ("node-rank: 2", "--node-rank 2: all ranks are on one machine"),
        ("- port", "must contain options, one per line"),
        ("port: [", "is not YAML"),
        ("config: other.yaml", "the file must not contain the option 'config'"),
    ],
)
def test_a_mistake_in_a_file_of_options_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        serve(f"m --config {file}")
    assert str(refusal.value).startswith(f"--config {file}") or str(refusal.value).startswith(f"--config: {file}")
    assert message in str(refusal.value)


def test_a_file_of_options_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"--config: /nowhere\.yaml cannot be read: No such file"):
        serve("m --config /nowhere.yaml")


def test_environment_variables_count_least(monkeypatch, tmp_path: Path) -> None:
    for name in environment():
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv("VLLM_PORT", "9999")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    engine, server = serve("m")
    assert engine.batch_invariant
    assert (server.api_key, server.log_level, server.port, engine.kv_cache_memory) == (("secret",), "debug", 8000, 3.0)
    assert serve("m --api-key other --log-level error")[1] == ServerConfig(api_key=("other",), log_level="error")
    file = tmp_path / "serve.yaml"
    file.write_text("log-level: warning")
    assert serve(f"m --config {file}")[1].log_level == "warning"
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "loud")
    with pytest.raises(ConfigError, match=r"^VLLM_LOGGING_LEVEL=loud: --log-level: must be one of"):
        serve("m")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match=r"^VLLM_USE_MODELSCOPE=True: fetch the model yourself"):
        serve("m")


def test_keywords_of_llm() -> None:
    options, notes = engine_keywords(
        {
            "model": "m",
            "dtype": "half",
            "tensor_parallel_size": 2,
            "trust_remote_code": True,
            "max_num_seqs": 1024,
            "kv_cache_memory_bytes": 1 << 31,
            "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3},
            "tokenizer": "m",
            "quantization": None,
            "hf_overrides": None,
            "compilation_config": {"mode": 3},
            "structured_outputs_config": {"backend": "xgrammar"},
            "limit_mm_per_prompt": {"image": 0},
            "disable_log_stats": False,
            "lora_modules": ["a=1"],
            "enable_lora": True,
            "max_logprobs": 5,
        }
    )
    config = EngineConfig(**options)
    assert config == EngineConfig(
        model="m",
        dtype="float16",
        tensor_parallel_size=2,
        max_num_seqs=1024,
        kv_cache_memory=2.0,
        speculative_config='{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}',
        enable_lora=True,
        lora_modules=("a=1",),
    )
    assert config.speculative.num_speculative_tokens == 4
    assert [note.split("=")[0] for note in notes] == [
        "trust_remote_code", "compilation_config", "structured_outputs_config.backend", "limit_mm_per_prompt",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("nnodes", 2, "nnodes=2: all ranks are on one machine"),
        ("quantization", "awq", "quantization must be one of gguf"),
        ("rope_scaling", {"a": 1}, "rope_scaling: write --hf-overrides with the key rope_scaling"),
        ("logits_processors", [print], "logits_processors: no code is loaded"),
        ("max_model_length", 5, "There is no option 'max_model_length'. Did you mean max_model_len?"),
        ("port", 8000, "There is no option 'port'."),
        ("max_logprobs", 21, "max_logprobs=21: a request may ask for 20."),
        ("structured_outputs_config", {"bakend": 1}, "structured_outputs_config.bakend=1: unknown key."),
    ],
)
def test_keywords_of_llm_that_are_refused(keyword: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        engine_keywords({keyword: value})
    assert str(refusal.value).startswith(message)


def test_llm_takes_the_keywords_of_vllm(tmp_path: Path) -> None:
    from rootgraft import LLM

    with pytest.raises(ConfigError, match="nnodes=2: all ranks are on one machine"):
        LLM(str(tmp_path), nnodes=2)
    with pytest.raises(ConfigError, match="Did you mean gpu_memory_utilization"):
        LLM(str(tmp_path), gpu_memory_utilisation=0.5)


@pytest.mark.parametrize(
    ("text", "number"),
    [("1", 1), ("-1", -1), ("1k", 1000), ("1K", 1024), ("2M", 2 << 20), ("2m", 2_000_000), ("1g", 10**9), ("1T", 1 << 40),
     ("25.6k", 25600), ("0.001k", 1), ("1.5K", 1536), (" 7 ", 7)],
)  # fmt: skip
def test_whole_numbers_as_vllm_takes_them(text: str, number: int) -> None:
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.0001k", "1kk", "1e3", "0x10", "1 k", "nan", "--1"])
def test_what_is_no_whole_number(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a whole number"):
        whole_number(text)


def test_the_environment_of_the_tests_sets_no_option() -> None:
    assert not [name for name, option in environment().items() if option.ours and os.environ.get(name)]


@pytest.mark.parametrize("line", ["--data-parallel-size 4", "-dp 4", "--dp-size 4", "--dp 4"])
def test_data_parallel_ranks_are_replicas(line: str) -> None:
    assert changed(line) == {"replicas": 4}
    assert changed(line.replace("4", "1")) == {}
    with pytest.raises(ConfigError, match="--replicas must be at most 16, not 17"):
        serve(line.replace("4", "17"))


@pytest.mark.parametrize("line", ["--api-server-count 4", "-asc 4"])
def test_api_servers_are_gateways(line: str) -> None:
    assert changed(line) == {"gateways": 4}
    assert changed(line.replace("4", "1")) == {}
    with pytest.raises(ConfigError, match="--gateways must be at most 16, not 17"):
        serve(line.replace("4", "17"))


def test_an_engine_in_process_is_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_keywords({"data_parallel_size": 1}) == ({}, [])
    with pytest.raises(ConfigError, match=r"data_parallel_size=2: rootgraft serve has it, as --replicas\."):
        engine_keywords({"data_parallel_size": 2})
    parse("p", "about", (EngineConfig,), "", ["--data-parallel-size", "1"], lambda note: None)
    with pytest.raises(ConfigError, match="rootgraft serve has it"):
        parse("p", "about", (EngineConfig,), "", ["-dp", "2"], lambda note: None)
