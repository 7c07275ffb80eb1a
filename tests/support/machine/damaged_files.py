"""Damage to files, as a failing disk or an attacker does it."""

from __future__ import annotations

import random
from pathlib import Path


def swap_two(files: list[Path], rng: random.Random) -> None:
    """Exchange the contents of two files."""
    one, other = rng.sample(files, 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def cut_one(files: list[Path], rng: random.Random) -> None:
    """Cut a file off."""
    path = rng.choice(files)
    path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])


def rewrite_some(files: list[Path], rng: random.Random) -> None:
    """Put random bytes in the place of some."""
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    content[start : start + 100] = rng.randbytes(len(content[start : start + 100]))
    path.write_bytes(content)


def flip_bit(files: list[Path], rng: random.Random) -> None:
    """Flip a bit of a file."""
    path = rng.choice(files)
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
