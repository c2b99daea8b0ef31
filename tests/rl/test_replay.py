"""A saved step is trained again: with the run's loss to the bit, with others from the same weights on the same samples."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from rl_builders import ONE, Recorder, constant_rate, low_byte_judge, problem, random_samples, rl_config, same_weights

from klear_core.config.losses import (
    LOSS_KINDS,
    AspoConfig,
    ClipConfig,
    GppoConfig,
    GspoConfig,
    LossConfig,
    SapoConfig,
    TrmConfig,
)
from klear_core.config.rl import RlConfig, RlRuntime, TeacherTermConfig
from klear_core.errors import ArtifactError
from klear_core.metrics import NullTelemetry, Telemetry
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.learner import SAVED_STEPS, Learner, SavedSteps
from klear_core.rl.loop import run_rl
from klear_core.rl.replay import Replay, Replayed, replay
from klear_core.train.distributed import World
from klear_core.types import TrainSample


def saving(*steps: int, **changes: object) -> RlConfig:
    """Ratios against the sampler's log-probs, of which many leave the clip range."""
    runtime = RlRuntime(device="cpu", save_steps=steps)
    return rl_config(runtime=runtime, **{"optim": constant_rate(3e-3)} | changes)


def learn(base: Path, folder: Path, cfg: RlConfig, *, num_steps: int = 3) -> list[dict[str, float]]:
    """Metrics of steps on fixed samples."""
    learner = Learner(cfg, base, seed=0, workdir=folder, world=ONE)
    return [learner.step(random_samples(8, seed=i)) for i in range(num_steps)]


def replayed(base: Path, folder: Path, cfg: RlConfig, step: int, **losses: LossConfig) -> Replayed:
    return replay(Replay(cfg=cfg, seed=0, model=base, folder=folder, step=step, losses=losses), run_ranks)


@pytest.mark.parametrize("old_logps", ["sampler", "learner"])
@pytest.mark.parametrize("entropy_target", [None, {"target": 10, "delta": 0.05}], ids=["constant", "adaptive"])
def test_the_runs_own_loss_repeats_the_step_to_the_bit(
    base: Path, tmp_path: Path, old_logps: str, entropy_target: dict[str, float] | None
) -> None:
    cfg = saving(1, 3, old_logps=old_logps, entropy_target=entropy_target)
    logged = learn(base, tmp_path, cfg)
    for step in (1, 3):
        found = replayed(base, tmp_path, cfg, step)
        assert found.own.metrics == logged[step - 1]
        assert found.difference == 0
        assert found.own.cosine == pytest.approx(1)
        assert found.num_samples == 8


def test_a_step_of_a_whole_run_is_repeated_as_it_was_logged(base: Path, tmp_path: Path) -> None:
    """Through the loop, with optimizer moments, sampled answers and a schedule."""
    cfg = saving(2)
    telemetry = Recorder()
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=tmp_path)
    asyncio.run(run_rl(setup, [problem(f"q{i}") for i in range(6)], low_byte_judge, telemetry, LocalWorkers()))
    found = replayed(base, tmp_path, cfg, 2)
    assert found.difference == 0
    assert found.own.metrics.items() <= telemetry.rows[1].items()
    assert found.own.metrics["rl/optim/updates"] > 0


def test_saving_steps_changes_no_weight(base: Path, tmp_path: Path) -> None:
    for name, steps in (("plain", ()), ("saved", (1, 2))):
        learner = Learner(saving(*steps), base, seed=0, workdir=tmp_path / name, world=ONE)
        for i in range(3):
            learner.step(random_samples(8, seed=i))
        learner.export(tmp_path / name / "model")
    assert same_weights(tmp_path / "plain", tmp_path / "saved")


def test_another_loss_gives_what_a_run_with_it_would_have_logged(base: Path, tmp_path: Path) -> None:
    """For the first step both runs have the same weights and samples."""
    learn(base, tmp_path / "gppo", saving(1), num_steps=1)
    losses = {cls().kind: cls() for cls in LOSS_KINDS}
    found = replayed(base, tmp_path / "gppo", saving(1), 1, **losses)
    assert found.others.keys() == losses.keys()
    for kind, loss in losses.items():
        (logged,) = learn(base, tmp_path / kind, saving(loss=loss), num_steps=1)
        assert found.others[kind].metrics == logged
    assert found.others["gppo"] == found.own


def test_losses_of_whole_answers_are_left_out_where_a_teachers_likeliest_tokens_are_learnt(
    base: Path, tmp_path: Path
) -> None:
    cfg = saving(1, distill=TeacherTermConfig())
    rows = []
    for row in random_samples(8):
        tops = {"top_ids": (1, 2) * row.num_loss_tokens, "top_logps": (-0.5, -1.5) * row.num_loss_tokens}
        rows.append(replace(row, teacher_logps=tuple(-1.0 * is_loss for is_loss in row.loss_mask), **tops))
    Learner(cfg, base, seed=0, workdir=tmp_path, world=ONE).step(rows)
    found = replayed(base, tmp_path, cfg, 1, clip=ClipConfig(), gspo=GspoConfig(), trm=TrmConfig())
    assert found.left_out == ("gspo", "trm")
    assert found.others.keys() == {"clip"}
    assert found.difference == 0


def test_losses_that_weigh_tokens_otherwise_move_the_weights_elsewhere(base: Path, tmp_path: Path) -> None:
    cfg = saving(1, minibatches_per_step=4)
    learn(base, tmp_path, cfg, num_steps=1)
    found = replayed(base, tmp_path, cfg, 1, same=GppoConfig(), clip=ClipConfig(), aspo=AspoConfig())
    assert found.others["same"].cosine == pytest.approx(1)
    assert 0 < found.others["aspo"].cosine < found.others["clip"].cosine < 1 - 1e-6
    assert found.own.kl > 0


def test_one_update_from_ratios_of_one_is_the_same_with_every_loss(base: Path, tmp_path: Path) -> None:
    cfg = saving(1, minibatches_per_step=1, old_logps="learner")
    learn(base, tmp_path, cfg, num_steps=1)
    found = replayed(base, tmp_path, cfg, 1, sapo=SapoConfig(), clip=ClipConfig())
    for effect in found.others.values():
        assert effect.cosine == pytest.approx(1)
        assert effect.kl == pytest.approx(found.own.kl, rel=1e-5)


def test_kl_and_change_of_entropy_are_those_of_the_step(base: Path, tmp_path: Path) -> None:
    cfg = saving(1)
    samples = random_samples(8)
    learner = Learner(cfg, base, seed=0, workdir=tmp_path, world=ONE)
    before = logps_of(learner, samples)
    learner.step(samples)
    after = logps_of(learner, samples)
    gap_N = after[0] - before[0]
    found = replayed(base, tmp_path, cfg, 1).own
    assert found.kl == pytest.approx((gap_N.exp() - 1 - gap_N).mean().item(), rel=1e-6)
    assert found.entropy_change == pytest.approx((after[1] - before[1]).mean().item(), rel=1e-6)


def logps_of(learner: Learner, samples: list[TrainSample]) -> tuple[torch.Tensor, torch.Tensor]:
    outputs = learner.logps(samples)
    return torch.cat([o.logp_N for o in outputs]).double(), torch.cat([o.entropy_N for o in outputs]).double()


def test_a_loss_that_changes_no_weight_has_no_direction(base: Path, tmp_path: Path) -> None:
    """All updates of the step are skipped, in the run and again in the replay."""
    cfg = saving(1)
    samples = [replace(s, advantage=math.inf) for s in random_samples(8)]
    Learner(cfg, base, seed=0, workdir=tmp_path, world=ONE).step(samples)
    found = replayed(base, tmp_path, cfg, 1)
    assert found.own.metrics["rl/optim/skipped"] == 2
    assert (found.difference, found.own.kl, found.own.entropy_change) == (0, 0, 0)
    assert math.isnan(found.own.cosine)


def test_metrics_that_differ_from_the_logged_are_told(base: Path, tmp_path: Path) -> None:
    cfg = saving(1)
    learn(base, tmp_path, cfg, num_steps=1)
    assert replayed(base, tmp_path, cfg.model_copy(update={"optim": constant_rate(6e-3)}), 1).difference >= 0.5


def test_a_step_without_samples_is_repeated_as_one(base: Path, tmp_path: Path) -> None:
    cfg = saving(1)
    Learner(cfg, base, seed=0, workdir=tmp_path, world=ONE).step([])
    found = replayed(base, tmp_path, cfg, 1)
    assert (found.difference, found.num_samples, found.own.kl) == (0, 0, 0)


def test_a_step_that_is_not_saved_is_an_error_that_names_those_that_are(base: Path, tmp_path: Path) -> None:
    learn(base, tmp_path, saving(1, 3))
    with pytest.raises(
        ArtifactError, match=r"step 2 is not saved; saved steps: 1, 3\. .*--set 'rl\.runtime\.save_steps=\[2\]'"
    ):
        replayed(base, tmp_path, saving(1, 3), 2)
    with pytest.raises(ArtifactError, match="RL step 1 is not saved; saved steps: none"):
        replayed(base, tmp_path / "no", saving(1), 1)


def test_a_step_that_a_kill_cut_short_is_not_saved_and_is_saved_anew(base: Path, tmp_path: Path) -> None:
    learner = Learner(saving(1), base, seed=0, workdir=tmp_path, world=ONE)
    steps = SavedSteps(tmp_path / SAVED_STEPS, ONE)
    learner.step(random_samples(4))
    (tmp_path / SAVED_STEPS / "00000001" / "metrics.json").unlink()  # a kill before the end of the step
    assert steps.steps() == []
    learn(base, tmp_path, saving(1), num_steps=1)
    assert steps.steps() == [1]
    assert len(steps.load(1).samples) == 8


def test_a_damaged_state_is_an_error(base: Path, tmp_path: Path) -> None:
    learn(base, tmp_path, saving(1), num_steps=1)
    shard = next((tmp_path / SAVED_STEPS).rglob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(ArtifactError, match="the files of step 1 are damaged"):
        replayed(base, tmp_path, saving(1), 1)


def test_steps_beyond_the_last_are_refused() -> None:
    with pytest.raises(ValueError, match=r"runtime\.save_steps: \[9\] are beyond num_steps = 3"):
        saving(1, 9)


def save_on_every_rank(base: Path, folder: Path, cfg: RlConfig, world: World, _telemetry: Telemetry) -> None:
    Learner(cfg, base, seed=0, workdir=folder, world=world).step(random_samples(8))


@pytest.mark.slow
def test_one_process_repeats_what_two_ranks_saved_and_two_what_one_saved(base: Path, tmp_path: Path) -> None:
    one = saving(1, loss=TrmConfig(max_divergence=0.6))
    two = one.model_copy(update={"runtime": one.runtime.model_copy(update={"num_workers": 2})})
    found: list[Replayed] = []
    for name, made, read in (("one", one, two), ("two", two, one)):
        run_ranks(partial(save_on_every_rank, base, tmp_path / name, made), made.runtime, NullTelemetry())
        found.append(replayed(base, tmp_path / name, read, 1, clip=ClipConfig()))
    assert all(0 < each.difference < 1e-3 for each in found)
    for a, b in zip(*([each.own, each.others["clip"]] for each in found), strict=True):
        assert (a.cosine, a.kl, a.entropy_change) == pytest.approx((b.cosine, b.kl, b.entropy_change), rel=1e-3)
