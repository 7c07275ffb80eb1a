# ruff: noqa: E501 (command lines)
"""Command lines that people bring from vLLM and SGLang: typical ones start, and of those in public documentation each
option starts or is refused with what to do instead.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from support.cli.command_lines import commands, options_of, outcome

from rootgraft.api.cli import main as command_line
from rootgraft.api.cli import serve_command
from rootgraft.engine.errors import ModelError
from rootgraft.engine.peer_options import peer_options

USES = Path(__file__).parent / "option_use.tsv"
# Written by us after the pages that are named, with models of families that are served, for one device.
LINES = {
    # docs.vllm.ai: quickstart; OpenAI-compatible server; LoRA adapters; tool calling; reasoning outputs; speculation;
    # structured outputs; prefix caching; optimization; GGUF; engine arguments
    "vllm serve Qwen/Qwen2.5-1.5B-Instruct": "starts",
    "vllm serve meta-llama/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123": "starts",
    "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --lora-modules sql-lora=adapters/sql": "starts",
    "vllm serve meta-llama/Llama-2-7b-hf --enable-lora --max-lora-rank 64 --max-loras 4 --max-cpu-loras 8 "
    """--lora-modules '{"name": "sql", "path": "adapters/sql", "base_model_name": "meta-llama/Llama-2-7b-hf"}'""": "starts",
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --enable-auto-tool-choice --tool-call-parser llama3_json "
    "--chat-template examples/tool_chat_template_llama3.1_json.jinja": "starts",
    "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --enable-reasoning --reasoning-parser deepseek_r1": "starts",
    """vllm serve Qwen/Qwen3-8B --speculative-config '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'""": "starts",
    "vllm serve Qwen/Qwen2.5-7B-Instruct --guided-decoding-backend auto --structured-outputs-config.backend xgrammar": "starts",
    "vllm serve mistralai/Mistral-7B-v0.1 --enable-prefix-caching --enable-chunked-prefill --max-num-batched-tokens 16384 "
    "--max-num-seqs 1024 --gpu-memory-utilization 0.95": "starts",
    "vllm serve ./tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf --tokenizer TinyLlama/TinyLlama-1.1B-Chat-v1.0": "starts",
    "vllm serve Qwen/Qwen3-4B --max-model-len 16k --kv-cache-memory-bytes 2G --block-size 32 --seed 0 -O3 "
    """--compilation-config '{"cudagraph_mode": "FULL_AND_PIECEWISE"}'""": "starts",
    # qwen.readthedocs.io; model cards of Mistral, Gemma, Granite and SmolLM3; unsloth.ai's guide to vLLM
    "vllm serve Qwen/Qwen3-8B --port 8000 --tensor-parallel-size 1 --max-model-len 32768 --reasoning-parser qwen3": "starts",
    "vllm serve Qwen/Qwen3-8B --enable-auto-tool-choice --tool-call-parser hermes": "starts",
    "python -m vllm.entrypoints.openai.api_server --model mistralai/Mistral-7B-Instruct-v0.3 --dtype half --max-model-len 8192 "
    "--swap-space 16 --disable-log-requests --trust-remote-code": "starts",
    "vllm serve models/gemma2-2b --gpu-memory-utilization=1 --port 6002 --served-model-name=gemma --trust-remote-code "
    "--max_model_len 8192 --disable-log-requests --enable-lora --lora-modules lora=output/lora --max_lora_rank 64": "starts",
    "vllm serve HuggingFaceTB/SmolLM3-3B --enable-auto-tool-choice --tool-call-parser=hermes --generation-config vllm": "starts",
    # Kubernetes manifests: production-stack, gateway-api-inference-extension
    "vllm serve meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --port 8000 --no-enable-prefix-caching --max-num-seqs 256 "
    "--disable-uvicorn-access-log --served-model-name llama chat --uvicorn-log-level warning": "starts",
    # docs.sglang.io: quickstart; server arguments; LoRA serving
    "python -m sglang.launch_server --model-path meta-llama/Meta-Llama-3-8B-Instruct --host 0.0.0.0 --port 30000": "starts",
    "python3 -m sglang.launch_server --model-path Qwen/Qwen2.5-7B-Instruct --tp 1 --mem-fraction-static 0.8 "
    "--context-length 32768 --chunked-prefill-size 4096 --enable-metrics --grammar-backend xgrammar": "starts",
    "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B-Instruct --lora-paths sql=adapters/sql "
    "chat=adapters/chat --max-loras-per-batch 2 --lora-backend triton --disable-radix-cache": "starts",
    "vllm serve meta-llama/Llama-3.3-70B-Instruct --tensor-parallel-size 4 --max-model-len 8192": "starts",
}  # fmt: skip


def uses() -> list[list[str]]:
    """What ``support/cli/command_lines.py`` collected: peer, option, value, number of commands, place."""
    return [line.split("\t") for line in USES.read_text("utf-8").splitlines()]


def words_of(line: str) -> list[str]:
    """The words after the launcher, which are those after ``rootgraft serve``."""
    ((_, words),) = commands(line)
    return words


@pytest.mark.parametrize("line", LINES)
def test_a_typical_line_starts(line: str) -> None:
    assert outcome(words_of(line)) == LINES[line]


def test_all_typical_lines_reach_the_check_of_the_model(monkeypatch, capsys) -> None:
    asked = []

    def fetch(model: str | None, revision: str | None) -> Path:
        asked.append(model)
        raise ModelError("not fetched in tests")

    monkeypatch.setattr(serve_command, "fetch_model", fetch)
    codes = Counter(command_line.main(["serve", *words_of(line)]) for line in LINES)
    assert codes == {1: len(LINES)}
    assert len(asked) == len(LINES) and all(asked)
    lines = capsys.readouterr().err.splitlines()
    assert all(re.match(r"rootgraft serve: (not fetched|-)", line) for line in lines)


def test_options_in_public_documentation_are_known(capsys) -> None:
    """Counted by uses; beside each option stands a model, so that others cannot hide it."""
    outcomes: dict[str, Counter[str]] = {"vllm": Counter(), "sglang": Counter()}
    unknown = set()
    for peer, name, value, count, _ in uses():
        words = [*([] if name in ("--model", "--model-path") else ["m"]), name, *filter(None, [value])]
        outcomes[peer][found := outcome(words)] += int(count)
        unknown |= {name} if found == "unknown" else set()
    with capsys.disabled():
        print("\noptions of public command lines:", {peer: dict(found) for peer, found in outcomes.items()})
    for found in outcomes.values():
        assert found.total() > 500
        assert found["unknown"] <= 0.01 * found.total(), unknown
        assert found["starts"] >= 0.6 * found.total()


def test_every_use_of_a_refused_option_says_what_to_do(capsys) -> None:
    refused = {(name, value) for _, name, value, *_ in uses() if name.removeprefix("--") in peer_options()}
    for name, value in sorted(refused):
        option = peer_options()[name.removeprefix("--")]
        if option.ours or outcome(["m", name, *filter(None, [value])]) != "refused":
            continue
        assert command_line.main(["serve", "m", name, *filter(None, [value])]) == 2
        assert option.refuse in capsys.readouterr().err


def test_the_collector_reads_commands_out_of_pages() -> None:
    page = """
    CUDA_VISIBLE_DEVICES=0 vllm serve org/a --max_model_len 8k \\
        -tp 2 --api-key secret > log 2>&1 &
    python3 -m sglang.launch_server --model-path org/b --tp=1 # one GPU
    vllm serve <model> --port 1
    vllm serve org/c --served-model-name "two words" it`s
    run `vllm serve org/d --speculative-config '{"method": "ngram"}'` first
    """
    found = [(peer, options_of(words)) for peer, words in commands(page)]
    assert found == [
        ("vllm", (("--api-key", ("a",)), ("--max-model-len", ("8k",)), ("-tp", ("2",)))),
        ("sglang", (("--model-path", ("m",)), ("--tp", ("1",)))),
        ("vllm", (("--served-model-name", ("a",)),)),
        ("vllm", (("--speculative-config", ('{"method": "ngram"}',)),)),
    ]
