"""Milliseconds per call of the sampler, by what its rows ask for. Run: python -m benchmarks.sampler [--device cuda].

Logits are drawn with a spread of 3, which gives a nucleus (top_p 0.9) of thousands of tokens; "peaked" ones add a few
tokens far above the rest, as models do: a nucleus of about ten.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from rootgraft.engine.batch import Row, RowStart
from rootgraft.engine.sampling.logprobs import prompt_logprobs
from rootgraft.engine.sampling.sampler import DeviceMasks, Sampler
from rootgraft.engine.types import SamplingParams

WORKLOADS = {
    "greedy": SamplingParams(temperature=0),
    "temperature 0.8": SamplingParams(temperature=0.8),
    "min_p 0.05": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k 50": SamplingParams(temperature=0.8, top_k=50),
    "top_p 0.9": SamplingParams(temperature=0.8, top_p=0.9),
    "top_k 50, top_p 0.9": SamplingParams(temperature=0.8, top_k=50, top_p=0.9),
    "greedy, penalties": SamplingParams(temperature=0, repetition_penalty=1.1, frequency_penalty=0.5),
    "greedy, logit_bias": SamplingParams(temperature=0, logit_bias=tuple((i, 1.0) for i in range(100))),
    "greedy, logprobs 5": SamplingParams(temperature=0, logprobs=5),
}


def median_ms(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    times = []
    for i in range(repeats + 3):
        begin = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i >= 3:
            times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--prompt", type=int, default=1000, help="tokens in each prompt, counted by the penalties")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    device = torch.device(args.device)

    flat = torch.randn(args.rows, args.vocab, device=device) * 3
    peaked = flat.clone()
    peaked[:, torch.randperm(args.vocab, device=device)[:10]] += 20
    rows = [Row(i, 0, (), 0, (), draws=True, num_generated=0) for i in range(args.rows)]
    prompts = torch.randint(args.vocab, (args.rows, args.prompt)).tolist()
    masks = torch.randint(-(1 << 31), 1 << 31, (args.rows, -(-args.vocab // 32)), device=device).to(torch.int32)

    print(f"{args.rows} rows x {args.vocab} tokens on {args.device}, ms per call: peaked, flat")
    for name, params in WORKLOADS.items():
        sampler = Sampler(args.rows, args.vocab, device)
        sampler.start([RowStart(i, params, prompt, len(prompt), (), i) for i, prompt in enumerate(prompts)])
        times = [median_ms(lambda s=sampler, x=x: s.sample(x, rows), device, args.repeats) for x in (peaked, flat)]
        print(f"{name:22s} {times[0]:8.2f} {times[1]:8.2f}")
    sampler = Sampler(args.rows, args.vocab, device)
    sampler.start([RowStart(i, WORKLOADS["greedy"], (), 0, (), 0) for i in range(args.rows)])
    allowed = DeviceMasks(torch.arange(args.rows, device=device), masks)
    masked = median_ms(lambda: sampler.sample(flat, rows, allowed), device, args.repeats)
    print(f"{'greedy, masks':22s} {masked:8.2f}")
    wanted = [0] * args.rows
    scored = median_ms(lambda: prompt_logprobs(flat, wanted, 5)(), device, args.repeats)
    print(f"{'prompt_logprobs 5':22s} {scored:8.2f}")


if __name__ == "__main__":
    main()
