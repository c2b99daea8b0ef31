"""RL steps of ranks that share rows are those of one process, for losses that look at a token and for those that look at its row."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from rl_builders import ONE, rl_config, scored_samples, tiny_base
from torch import Tensor

from klear_core.config.losses import DppoConfig, ErcConfig, GppoConfig, GspoConfig, M2poConfig, TrmConfig
from klear_core.config.rl import MismatchConfig, RlConfig, RlRuntime, TeacherTermConfig
from klear_core.config.train import TrainRuntime
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.rl.learner import Learner
from klear_core.train.distributed import World

SAMPLES = scored_samples(8)
RUNTIME = {"device": "cpu", "tokens_per_microbatch": 24}


def config(**changes: object) -> RlConfig:
    return rl_config(runtime=RlRuntime.model_validate(RUNTIME), **changes)


CASES = {
    "gppo": config(loss=GppoConfig(), lm_coef=0.1, kl_coef=0.01, entropy_coef=0.01, erc=ErcConfig()),
    "gspo": config(loss=GspoConfig(eps_low=0.01, eps_high=0.01), normalise="sample"),
    "trm": config(loss=TrmConfig(max_divergence=0.6)),
    "m2po": config(loss=M2poConfig(max_second_moment=0.1)),
    "negative rows": config(loss=DppoConfig(max_divergence=1e-3), max_negative_kl=0.5),
    "distillation": config(distill=TeacherTermConfig(coef=0.5, normalise="sample"), lm_coef=0.1),
    "sequence masking": config(old_logps="learner", mismatch=MismatchConfig(truncate_at=2.0, max_sequence_ratio=1.05)),
}


def learn(
    base: Path, workdir: Path, world: World, _telemetry: Telemetry
) -> dict[str, tuple[list[dict[str, float]], dict[str, Tensor]]]:
    """Metrics and weights of two steps with each case."""
    found = {}
    for name, cfg in CASES.items():
        learner = Learner(cfg, base, seed=0, workdir=workdir / name, world=world)
        metrics = [learner.step(SAMPLES) for _ in range(2)]
        found[name] = (metrics, {k: w.clone() for k, w in learner.weights().items()})
    return found


@pytest.mark.slow
def test_two_ranks_of_a_context_learn_as_one_process(tmp_path: Path) -> None:
    """Sequence ratios are clipped and some sequences masked on the way, so a mean over half a row would be seen."""
    base = tiny_base(tmp_path / "base")
    one = run_ranks(partial(learn, base, tmp_path / "one"), TrainRuntime(device="cpu"), NullTelemetry())
    two = run_ranks(
        partial(learn, base, tmp_path / "two"),
        TrainRuntime(device="cpu", num_workers=2, context_parallel=2),
        NullTelemetry(),
    )
    assert 0 < one["gspo"][0][1]["rl/clip/low_frac"] + one["gspo"][0][1]["rl/clip/high_frac"] < 1
    assert 0 < one["trm"][0][1]["rl/clip/positive_frac"] + one["trm"][0][1]["rl/clip/negative_frac"] < 1
    for name in ("m2po", "negative rows"):
        assert 0 < one[name][0][1]["rl/clip/masked_frac"] < 1
    assert "rl/distill/kl" in one["distillation"][0][0]
    assert 0 < one["sequence masking"][0][0]["rl/mismatch/masked_frac"] <= 1
    for name, (metrics, weights) in one.items():
        for a, b in zip(metrics, two[name][0], strict=True):
            # lines of an even number of tokens; what several ranks say of their times
            of_two = {name: b[name] for name in b if name == "rl/batch/fill" or name.startswith("rl/speed/")}
            assert b == pytest.approx(a | of_two, abs=1e-5)
        torch.testing.assert_close(two[name][1], weights, atol=1e-5, rtol=0)


def test_the_learner_refuses_a_context_that_the_heads_do_not_fit(tmp_path: Path) -> None:
    cfg = rl_config(runtime=RlRuntime(device="cpu", num_workers=3, context_parallel=3))
    with pytest.raises(ConfigError, match="context_parallel = 3 does not divide the 2 attention heads"):
        Learner(cfg, tiny_base(tmp_path / "base"), seed=0, workdir=tmp_path, world=ONE)
