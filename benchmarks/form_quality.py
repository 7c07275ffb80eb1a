"""Measure the quality of a model's stored forms: perplexity, greedy agreement, schema validity and a task's score.

    python -m benchmarks.form_quality [--model FILE.gguf] [--peer PYTHON] [--only NAME ...] [--out FILE]

The default model's GGUF file is widened to float32; `rootgraft quantize` writes a folder of each scheme from that, and
llama.cpp (a Python that has llama-cpp-python, by ``--peer``) a GGUF file of each type, which both programs then read.
Texts and *agreement* are those of ``benchmarks.quality``: the share of places at which a form's most likely token is
that of float32. *valid* is the share of answers that follow their JSON schema, with the schema as grammar and with the
schema only in mind (*unguided*); *fields* is the share of fields that name what the sentence says, with the grammar.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jsonschema
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.quality import CPU, WINDOW, log_probs, windows
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.model_tools.quantize_folder import SCHEMES, quantize_folder
from rootgraft.engine.offline.llm import LLM
from rootgraft.engine.types import SamplingParams
from rootgraft.grammar.spec import GrammarSpec
from rootgraft.kernels import ops
from rootgraft.kernels.layouts import int8_kv_layout

TYPES = ("Q8_0", "Q4_K_M", "Q3_K_M", "Q2_K")
"""Types of llama.cpp: each is a mixture, as rows of 576 values take the next larger type without super-blocks."""
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
_NAMES = ("Maria", "Jonas", "Aisha", "Pedro", "Yuki", "Olga", "Samuel", "Ingrid", "Tom", "Leila")
_CITIES = ("Basel", "Oslo", "Porto", "Lima", "Kyoto", "Cairo", "Boston", "Prague", "Dublin", "Nairobi")
_SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "At the age of {age}, {name} moved to {city}.",
    "{name} from {city} turned {age} last week.",
    "Our guide in {city} was {name}, who is {age}.",
)
_TASK = 'Write name, age and city as JSON, like {"name": "A", "age": 1, "city": "B"}.'
_QUESTIONS, _WINDOWS = 24, 3
_PEER = Path(__file__).with_name("llama_cpp_perplexity.py")


@dataclass(frozen=True)
class FormQuality:
    """One form: megabytes of its files, and the figures that the module names; those of llama.cpp are of this file."""

    form: str
    megabytes: float
    perplexity: float
    agreement: float
    valid: float
    unguided: float
    fields: float
    llama_cpp_perplexity: float | None = None
    llama_cpp_agreement: float | None = None


@dataclass(frozen=True)
class Form:
    """A form to measure: its name, its files, and how they are loaded; ``quantization`` is an option."""

    name: str
    model: Path
    weights: WeightForm = "stored_widened"
    quantization: str | None = None
    kv: str = "auto"
    dtype: torch.dtype = torch.bfloat16


def widen(gguf: Path, out: Path) -> None:
    """Write a GGUF file as a folder in float32."""
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    out.mkdir()
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    (out / "config.json").write_text(json.dumps(config))
    tensors = {name: each.contiguous() for name, each in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def people() -> list[tuple[str, dict[str, Any]]]:
    """Return sentences and what they say, the same ones each time."""
    draw, found = random.Random(7), []
    for _ in range(_QUESTIONS):
        person = {"name": draw.choice(_NAMES), "age": draw.randrange(18, 90), "city": draw.choice(_CITIES)}
        found.append((draw.choice(_SENTENCES).format(**person), person))
    return found


def answer_scores(form: Form, threads: int) -> tuple[float, float, float]:
    """Return the shares of valid answers with the grammar and without it, and of right fields with it."""
    asked = people()
    chats = [[{"role": "user", "content": f"{text}\n{_TASK}"}] for text, _ in asked]
    params = SamplingParams(max_tokens=64, temperature=0.0)
    options: dict[str, Any] = {
        "device": "cpu",
        "dtype": str(form.dtype).removeprefix("torch."),
        "quantization": form.quantization,
        "kv_cache_dtype": form.kv,
        "max_model_len": 1024,
        "kv_cache_memory": 0.5,
        "threads": threads,
    }
    with closing(LLM(str(form.model), **options)) as llm:
        guided = llm.chat(chats, params, use_tqdm=False, grammar=GrammarSpec.json_schema(SCHEMA))
        free = llm.chat(chats, params, use_tqdm=False)
    answers = [read_answer(each.outputs[0].text) for each in guided]
    right = sum(
        isinstance(answer, dict) and answer.get(field) == value
        for answer, (_, person) in zip(answers, asked, strict=True)
        for field, value in person.items()
    )
    valid = sum(answer is not None for answer in answers)
    unguided = sum(read_answer(each.outputs[0].text) is not None for each in free)
    return valid / len(asked), unguided / len(asked), right / (3 * len(asked))


def read_answer(text: str) -> dict[str, Any] | None:
    """Return an answer that follows the schema; None for any other."""
    try:
        answer: dict[str, Any] = json.loads(text)
        jsonschema.validate(answer, SCHEMA)
    except (ValueError, jsonschema.ValidationError):
        return None
    return answer


def read_texts(form: Form, texts: list[list[int]]) -> tuple[float, list[Tensor]]:
    """Return the perplexity of texts, and the most likely token at each place."""
    loaded = load_model(form.model, dtype=form.dtype, device=CPU, max_positions=WINDOW, weights=form.weights)
    surprise, likely = 0.0, list[Tensor]()
    for tokens in texts:
        found = log_probs(loaded, tokens, int8_kv_layout.DTYPE if form.kv == "int8" else form.dtype)
        surprise -= found[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).double().sum().item()
        likely.append(found.argmax(-1))
    return torch.tensor(surprise / (len(texts) * (WINDOW - 1))).exp().item(), likely


def agreement(found: list[Tensor], exact: list[Tensor]) -> float:
    return torch.stack([mine == other for mine, other in zip(found, exact, strict=True)]).float().mean().item()


def ask_peer(python: Path, *command: str, texts: list[list[int]] | None = None) -> Any:
    """Run llama.cpp in a Python that has it, and return what it printed."""
    done = subprocess.run(
        [python, _PEER, *command], input=json.dumps(texts), capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def forms(source: Path, gguf: Path, work: Path, peer: Path | None, only: list[str] | None) -> Iterator[Form]:
    """Write the forms, one by one, those of some names alone if these are given."""
    made = [
        Form("float32", source, "plain", dtype=torch.float32),
        Form("bfloat16", source, "plain"),
        Form("bfloat16, int8 KV", source, "plain", kv="int8"),
        Form("bfloat16, int8_weight_only", source, "int8_weight_only", "int8_weight_only"),
        Form("bfloat16, int8_dynamic", source, "int8_dynamic", "int8_dynamic"),
        Form("Q4_1", gguf),
        Form("Q4_1, gguf_dynamic", gguf, "stored_dynamic", "gguf_dynamic"),
        *(Form(scheme, work / scheme) for scheme in SCHEMES),
        *(Form(kind, work / f"{kind}.gguf") for kind in TYPES if peer is not None),
    ]
    for form in made:
        if only is not None and form.name not in only:
            continue
        scheme = next((each for each in SCHEMES if each == form.name), None)
        if scheme is not None:
            quantize_folder(source, form.model, scheme)
        elif form.name in TYPES:
            assert peer is not None
            ask_peer(peer, "quantize", str(gguf), str(form.model), form.name)
        yield form


def megabytes(model: Path) -> float:
    files = [model] if model.is_file() else list(model.glob("*.safetensors"))
    return round(sum(file.stat().st_size for file in files) / 1e6, 1)


def measure(gguf: Path, work: Path, peer: Path | None, threads: int, only: list[str] | None) -> list[FormQuality]:
    """Measure the forms, float32 first."""
    source, texts, lines = work / "float32", windows(gguf)[:_WINDOWS], list[FormQuality]()
    widen(gguf, source)
    exact = read_texts(Form("float32", source, "plain", dtype=torch.float32), texts)[1]
    for form in forms(source, gguf, work, peer, only):
        perplexity, likely = read_texts(form, texts)
        theirs: tuple[float, float] | tuple[()] = ()
        if peer is not None and form.model.is_file() and form.quantization is None:
            found = ask_peer(peer, "read", str(form.model), texts=texts)
            theirs = found["perplexity"], agreement([torch.tensor(each) for each in found["likely"]], exact)
        scores = answer_scores(form, threads)
        line = FormQuality(form.name, megabytes(form.model), perplexity, agreement(likely, exact), *scores, *theirs)
        print(line, flush=True)
        lines.append(line)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="GGUF file; the default model without it")
    parser.add_argument("--peer", type=Path, help="a Python that has llama-cpp-python")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="forms to measure; all without it")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    gguf = resolve_model(options.model or EngineConfig().model).path
    ops.set_threads(options.threads)
    with tempfile.TemporaryDirectory() as work:
        lines = measure(gguf, Path(work), options.peer, options.threads, options.only)
    if options.out:
        about = {"command": " ".join(["python -m benchmarks.form_quality", *sys.argv[1:]]), "model": gguf.name}
        result = about | {"kernels": ops.native_status(), "forms": [asdict(line) for line in lines]}
        options.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
