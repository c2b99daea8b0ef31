"""A scorer that keeps the models it is given, and settings that have some models scored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from klear_core.config.evaluate import InlineEvalConfig
from klear_core.config.train import SftConfig
from klear_core.errors import ResourceError
from klear_core.train.inline_eval import ModelScorer


class CountingScorer:
    """Reports the number of models so far as the score, and keeps their weights."""

    def __init__(self, fail_at: int = -1) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []
        self.fail_at = fail_at
        self.stopped = threading.Event()

    def score(self, model: Path) -> dict[str, float]:
        if len(self.seen) == self.fail_at:
            self.fail_at = -1
            raise ResourceError("the engine died")
        self.seen.append(load_file(model / "model.safetensors"))
        return {"avg": float(len(self.seen)), "tokens_mean": 1.0, "truncated_frac": 0.0, "unscored_frac": 0.0}

    def stop(self) -> None:
        self.stopped.set()


def opened(scorer: ModelScorer) -> Callable[[Path], AbstractContextManager[ModelScorer]]:
    @contextmanager
    def open_scorer(_folder: Path) -> Iterator[ModelScorer]:
        yield scorer

    return open_scorer


def with_curve(cfg: SftConfig, *, every_steps: int) -> SftConfig:
    curve = InlineEvalConfig(benchmark="toy", num_problems=2, every_steps=every_steps)
    return cfg.model_copy(update={"runtime": cfg.runtime.model_copy(update={"curve": curve})})
