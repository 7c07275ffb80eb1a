"""Measure the quality of forms of weights and KV: perplexity and greedy agreement, against float32 and bfloat16.

    python -m benchmarks.quality [--model PATH] [--out FILE]

All forms read ``quality.txt`` (a frozen copy of some pages of these docs) in windows, every token after its window's
own beginning. *agreement* is the share of places at which a form's most likely token is that of float32, and
*divergence* the mean Kullback-Leibler divergence of its distribution from that of float32, in nats. The figures
against bfloat16 are of the same kind: that is the form which a quantised one stands in for, and it does not agree with
float32 everywhere either.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.weight_forms import WeightForm
from rootgraft.engine.models.decoder import DecoderModel
from rootgraft.engine.models.forward_inputs import ForwardInputs
from rootgraft.engine.models.kv_pool import KvPool
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.kernels import ops
from rootgraft.kernels.layouts import int8_kv_layout

TEXT = Path(__file__).with_name("quality.txt")
WINDOW, PAGE = 512, 16
CPU = torch.device("cpu")
_KV_INT8 = "+int8_kv"  # at the end of a form's name: with KV of 8 bits
FORMS: dict[str, tuple[torch.dtype, WeightForm]] = {
    "float32": (torch.float32, "plain"),
    "float32+int8_kv": (torch.float32, "plain"),
    "bfloat16": (torch.bfloat16, "plain"),
    "bfloat16+int8_kv": (torch.bfloat16, "plain"),
    "stored": (torch.bfloat16, "stored"),
    "stored_dynamic": (torch.bfloat16, "stored_dynamic"),
    "int8_weight_only": (torch.bfloat16, "int8_weight_only"),
    "int8_dynamic": (torch.bfloat16, "int8_dynamic"),
    "int8_dynamic+int8_kv": (torch.bfloat16, "int8_dynamic"),
}


@dataclass(frozen=True)
class Quality:
    """Over all places: e to the mean surprise, and the comparison with float32 and with bfloat16."""

    form: str
    perplexity: float
    perplexity_ratio: float
    agreement: float
    divergence: float
    bfloat16_perplexity_ratio: float
    bfloat16_agreement: float
    load_seconds: float


def windows(path: Path) -> list[list[int]]:
    """The text's tokens, cut into whole windows."""
    tokens = list(Tokenizer.load(path).encode(TEXT.read_text("utf-8"), add_special_tokens=False))
    return [tokens[start : start + WINDOW] for start in range(0, len(tokens) - WINDOW + 1, WINDOW)]


@torch.inference_mode()
def log_probs(model: DecoderModel, tokens: list[int], kv_dtype: torch.dtype) -> Tensor:
    """[T, V] fp32 of one window, computed in one step."""
    count = len(tokens)
    pages = -(-count // PAGE)
    kv = KvPool(model.config, pages, PAGE, kv_dtype, CPU)
    inputs = ForwardInputs(
        token_ids=torch.tensor(tokens),
        positions=torch.arange(count),
        kv_loc=torch.arange(count),
        page_table=torch.arange(pages, dtype=torch.int32)[None],
        query_start=torch.tensor([0, count], dtype=torch.int32),
        context_len=torch.tensor([count], dtype=torch.int32),
        max_query=count,
        max_context=count,
    )
    return model.logits(model.forward(inputs, kv)).log_softmax(-1)


def measure(path: Path, texts: list[list[int]], forms: list[str]) -> list[Quality]:
    """One line for each form, float32 and bfloat16 among them; all models are in memory at once."""
    models, seconds, kv_dtypes = {}, {}, {}
    for form in forms:
        begin = time.monotonic()
        dtype, weights = FORMS[form]
        kv_dtypes[form] = int8_kv_layout.DTYPE if form.endswith(_KV_INT8) else dtype
        models[form] = load_model(path, dtype=dtype, device=CPU, max_positions=WINDOW, weights=weights)
        seconds[form] = time.monotonic() - begin
    surprise = dict.fromkeys(forms, 0.0)
    same, same_as_bf16, apart = dict.fromkeys(forms, 0), dict.fromkeys(forms, 0), dict.fromkeys(forms, 0.0)
    for tokens in texts:
        known = {form: log_probs(models[form], tokens, kv_dtypes[form]) for form in ("float32", "bfloat16")}
        exact, first_of_bf16 = known["float32"], known["bfloat16"].argmax(-1)
        for form, model in models.items():
            found = known[form] if form in known else log_probs(model, tokens, kv_dtypes[form])
            surprise[form] -= found[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).double().sum().item()
            same[form] += int((found.argmax(-1) == exact.argmax(-1)).sum())
            same_as_bf16[form] += int((found.argmax(-1) == first_of_bf16).sum())
            apart[form] += (exact.exp() * (exact - found)).sum().item()
    scored, places = len(texts) * (WINDOW - 1), len(texts) * WINDOW
    perplexity = {form: torch.tensor(surprise[form] / scored).exp().item() for form in forms}
    return [
        Quality(
            form,
            round(perplexity[form], 4),
            round(perplexity[form] / perplexity["float32"], 5),
            round(same[form] / places, 5),
            round(apart[form] / places, 6),
            round(perplexity[form] / perplexity["bfloat16"], 5),
            round(same_as_bf16[form] / places, 5),
            round(seconds[form], 2),
        )
        for form in forms
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or GGUF file; the default model without it")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    options = parser.parse_args()
    path = resolve_model(options.model).path
    ops.set_threads(torch.get_num_threads())
    texts = windows(path)
    lines = measure(path, texts, list(FORMS))
    for line in lines:
        print(line)
    if options.out:
        about = {
            "command": " ".join(["python -m benchmarks.quality", *sys.argv[1:]]),
            "model": path.name,
            "tokens": len(texts) * WINDOW,
            "torch": torch.__version__,
            "kernels": ops.native_status(),
            "machine": f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}",
        }
        result = about | {"forms": [asdict(line) for line in lines]}
        options.out.write_text(json.dumps(result, indent=2) + "\n", "utf-8")


if __name__ == "__main__":
    main()
