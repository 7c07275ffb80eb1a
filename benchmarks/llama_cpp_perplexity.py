"""llama.cpp's side of ``benchmarks.form_quality``, for a Python that has llama-cpp-python and numpy.

python llama_cpp_perplexity.py quantize FROM.gguf TO.gguf TYPE
python llama_cpp_perplexity.py read FILE.gguf < windows.json
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np


def quantize(source: str, out: str, kind: str) -> dict[str, Any]:
    """Write a GGUF file in another type, from the values of one that may be quantised itself."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    params.nthread = len(os.sched_getaffinity(0))
    failed = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(params))
    if failed:
        raise SystemExit(f"llama.cpp did not write {kind}")
    return {"bytes": os.path.getsize(out)}


def read(path: str, texts: list[list[int]]) -> dict[str, Any]:
    """Return the perplexity of texts, each from its own beginning, and the most likely token at each place."""
    model = llama_cpp.Llama(
        path, n_ctx=len(texts[0]), n_batch=len(texts[0]), logits_all=True, verbose=False,
        n_threads=len(os.sched_getaffinity(0)), n_threads_batch=len(os.sched_getaffinity(0)),
    )  # fmt: skip
    surprise, places, likely = 0.0, 0, []
    for tokens in texts:
        model.reset()
        model.eval(tokens)
        logits = np.asarray(model.scores[: len(tokens)], dtype=np.float64)
        top = logits.max(-1, keepdims=True)
        sums = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        surprise += float((sums[:-1] - logits[np.arange(len(tokens) - 1), tokens[1:]]).sum())
        places += len(tokens) - 1
        likely.append(logits.argmax(-1).tolist())
    return {"perplexity": float(np.exp(surprise / places)), "likely": likely}


if __name__ == "__main__":
    command, path, *others = sys.argv[1:]
    found = quantize(path, *others) if command == "quantize" else read(path, json.load(sys.stdin))
    print(json.dumps(found))
