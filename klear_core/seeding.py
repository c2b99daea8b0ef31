"""Derive the seed of every random draw in Klear from the run's seed, the place and the item."""

from __future__ import annotations

import hashlib

_BITS = 63  # numpy, torch and vLLM all take a non-negative int64


def seed_for(run_seed: int, where: str, *ids: str | int) -> int:
    """Return a seed in [0, 2^63) that depends on all arguments and on nothing else, the same in every process.

    `where` names the consumer ("rl/rollout"), `ids` the item (problem id, step, sample index).
    """
    parts = [str(run_seed), where, *(str(i) for i in ids)]
    text = "\x1f".join(f"{len(p)}:{p}" for p in parts)  # lengths, so that ("a", "bc") and ("ab", "c") differ
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - _BITS)
