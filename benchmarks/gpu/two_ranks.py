"""Two ranks of a model on one device against one rank: what tensor parallelism computes on a GPU, shown with one GPU.

    benchmarks/gpu/run.sh --parts ranks
    PYTHONPATH=tests python -m benchmarks.gpu.two_ranks [--device cuda|cpu] [--families llama deepseek_v3 ...]

NCCL wants a GPU for each rank, so here sums go through the host's memory, by gloo; shards, kernels and the places of
sums are those of several GPUs. The models are tiny, of random weights, in float32. What decides: no logit differs from
one rank's by more than 1e-4 of the largest. As a program, it ends with code 1 if one does.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from support.models.paged_run import run_whole
from support.models.tiny_models import VOCAB, save
from torch import Tensor

from benchmarks.gpu.measure import Line, Machine
from rootgraft.engine.checkpoint.read_config import read_model_config
from rootgraft.engine.loading.load_model import load_model
from rootgraft.engine.loading.shards import Shard
from rootgraft.kernels.collectives import ALONE, Ranks

SIZE = 2
TOLERANCE = 1e-4
TOKENS = [(7 * i + i * i) % VOCAB for i in range(40)]
FAMILIES = ("llama", "mixtral", "deepseek_v3", "qwen3_next")


class HostRanks:
    """A rank of a group over gloo whose tensors may be on a GPU that the other ranks use too. See ``Ranks``."""

    size = SIZE

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def add(self, part: Tensor) -> Tensor:
        host = part.cpu()
        dist.all_reduce(host)
        return part.copy_(host)

    def gather(self, part: Tensor) -> list[Tensor]:
        host = part.cpu()
        parts = [torch.empty_like(host) for _ in range(SIZE)] if self.rank == 0 else None
        dist.gather(host, parts)
        return [each.to(part.device) for each in parts or []]

    def least(self, number: int) -> int:
        value = torch.tensor([number], device="cpu")
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value.item())

    def send(self, part: Tensor, to: int) -> None:
        raise AssertionError("there is one stage")

    def receive(self, out: Tensor, source: int) -> None:
        raise AssertionError("there is one stage")

    def split(self, size: int) -> Ranks:
        return self if size == SIZE else ALONE

    def close(self) -> None:
        return


def logits(folder: Path, device: torch.device, ranks: Ranks) -> Tensor:
    """Logits [T, V] of the tokens, of the vocabulary's part of a rank above 0."""
    shard = None if ranks is ALONE else Shard.of(read_model_config(folder), ranks)
    model = load_model(folder, dtype=torch.float32, device=device, shard=shard)
    with device:
        found: Tensor = run_whole(model, TOKENS).cpu()
    return found


def follow(rank: int, folder: Path, device: str) -> None:
    """Compute as one of the ranks; rank 0 writes the logits into the folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    found = logits(folder, torch.device(device), HostRanks(rank))
    if rank == 0:
        torch.save(found, folder / "found.pt")
    dist.destroy_process_group()


def difference(family: str, device: str) -> float:
    """Return the largest difference of two ranks' logits from one rank's, as a share of the largest logit."""
    with tempfile.TemporaryDirectory() as name:
        folder = save(family, Path(name))
        expected = logits(folder, torch.device(device), ALONE)
        multiprocessing: Any = torch.multiprocessing
        multiprocessing.spawn(follow, (folder, device), nprocs=SIZE)
        found = torch.load(folder / "found.pt")
    return float((found - expected).abs().max() / expected.abs().max())


def run(machine: Machine) -> Iterator[Line]:
    """Differences of each family as a share of what is tolerated, and the largest of all."""
    worst = 0.0
    for family in FAMILIES[:1] if machine.tiny else FAMILIES:
        error = difference(family, machine.device.type) / TOLERANCE
        worst = max(worst, error)
        yield Line("ranks", f"two ranks against one, {family}", error, "of tolerance")
    yield Line("ranks", "two ranks against one", worst, "of tolerance")


def main() -> int:
    """Compare, and print the largest difference of each family."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--families", nargs="+", default=FAMILIES)
    args = parser.parse_args()
    worst = 0.0
    for family in args.families:
        error = difference(family, args.device)
        print(f"{family}: the largest difference is {error:.1e} of the largest logit", flush=True)
        worst = max(worst, error)
    return 0 if worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
