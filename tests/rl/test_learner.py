"""The learner on a tiny model: updates, exact resume, bad steps, and one step from any cut of the batch."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from rl_builders import ONE, constant_rate, random_samples, rl_config, scored_samples
from torch import Tensor

from klear_core.config.losses import LOSS_KINDS, ErcConfig
from klear_core.config.rl import RlConfig, RlOptimConfig, RlRuntime
from klear_core.config.train import LoraConfig
from klear_core.errors import ConfigError, TrainingError
from klear_core.rl.groups import cut_minibatches
from klear_core.rl.learner import Learner
from klear_core.rl.losses import k3
from klear_core.rl.sample_arrays import tokens_of, with_tokens, without_tokens
from klear_core.seeding import seed_for
from klear_core.train.base_model import model_folder
from klear_core.train.distributed import full_weights
from klear_core.train.logps import token_logps
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.types import TrainSample


def learner(base: Path, workdir: Path, cfg: RlConfig) -> Learner:
    return Learner(cfg, base, seed=0, workdir=workdir, world=ONE)


def weights_after(base: Path, workdir: Path, cfg: RlConfig, *batches: Sequence[TrainSample]) -> dict[str, Tensor]:
    it = learner(base, workdir, cfg)
    for batch in batches:
        it.step(batch)
    return {k: w.clone() for k, w in it.weights().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


def test_a_step_makes_one_update_for_each_minibatch_and_counts_one_version(base: Path, tmp_path: Path) -> None:
    it = learner(base, tmp_path, rl_config(minibatches_per_step=3, old_logps="learner"))
    metrics = it.step(random_samples(6))
    assert metrics["rl/optim/updates"] == 3
    assert it.version == 1


def test_the_first_ratio_is_one_when_the_learner_gives_the_old_log_probs(base: Path, tmp_path: Path) -> None:
    metrics = learner(base, tmp_path, rl_config(minibatches_per_step=1, old_logps="learner")).step(random_samples(6))
    assert metrics["rl/ratio/min"] == metrics["rl/ratio/max"] == 1.0


def test_several_updates_move_the_ratio(base: Path, tmp_path: Path) -> None:
    metrics = learner(base, tmp_path, rl_config(minibatches_per_step=2, old_logps="learner")).step(random_samples(6))
    assert metrics["rl/ratio/max"] > 1.0


def mean_logp(it: Learner, samples: Sequence[TrainSample], folder: Path) -> float:
    it.export(folder)
    (micro,) = pack(samples, tokens_per_microbatch=1 << 20).micro_batches
    out = load_model(folder, device="cpu")(micro, partial(token_logps, target_N=micro.target_N))
    return out.logp_N.mean().item()


def test_rewarded_answers_become_likelier_and_punished_ones_less(base: Path, tmp_path: Path) -> None:
    samples = random_samples(8)
    good, bad = ([s for s in samples if s.is_positive == sign] for sign in (True, False))
    it = learner(base, tmp_path, rl_config(num_steps=20, old_logps="learner", optim=constant_rate(1e-2)))
    before = mean_logp(it, good, tmp_path / "a"), mean_logp(it, bad, tmp_path / "b")
    for _ in range(5):
        it.step(samples)
    assert mean_logp(it, good, tmp_path / "c") > before[0] + 0.5
    assert mean_logp(it, bad, tmp_path / "d") < before[1] - 0.5


def test_no_sample_is_a_step_that_changes_nothing_but_the_version(base: Path, tmp_path: Path) -> None:
    it = learner(base, tmp_path, rl_config())
    before = {k: w.clone() for k, w in it.weights().items()}
    metrics = it.step([])
    assert metrics["rl/optim/updates"] == 0
    assert it.version == 1
    assert same(before, it.weights())


def test_mismatch_is_zero_against_the_learners_own_log_probs_and_logged_otherwise(base: Path, tmp_path: Path) -> None:
    metrics = learner(base, tmp_path, rl_config(minibatches_per_step=1)).step(random_samples(4))
    assert metrics["rl/mismatch/k3"] > 0
    assert metrics["rl/ratio/mean"] != pytest.approx(1.0)  # the ratio is against the sampler's


def mismatch_at(gap: float, base: Path, folder: Path) -> dict[str, float]:
    """Metrics of a step for a sampler whose log-prob is this much above the learner's at every token."""
    samples = random_samples(4)
    (micro,) = pack(samples, tokens_per_microbatch=1 << 20).micro_batches
    model = load_model(model_folder(base), device="cpu")
    logp_N = model(micro, partial(token_logps, target_N=micro.target_N)).logp_N.tolist()
    logps = [[0.0] * len(s.token_ids) for s in samples]
    for row, column, logp in zip(micro.row_N.tolist(), micro.column_N.tolist(), logp_N, strict=True):
        logps[row][column] = logp + gap
    moved = [replace(s, sampler_logps=tuple(p)) for s, p in zip(samples, logps, strict=True)]
    return learner(base, folder, rl_config(minibatches_per_step=1)).step(moved)


def test_mismatch_by_hand_for_a_sampler_that_says_twice_the_learners_probability(base: Path, tmp_path: Path) -> None:
    """log(learner / sampler) = -log 2 for every token, so k3 = 1/2 - 1 + log 2; with the sign reversed it would be 1 - log 2."""
    metrics = mismatch_at(math.log(2), base, tmp_path)
    assert metrics["rl/mismatch/k3"] == pytest.approx(math.log(2) - 0.5, abs=1e-4)
    assert metrics["rl/mismatch/max"] == pytest.approx(math.log(2), abs=1e-4)


def test_mismatch_is_right_for_a_sampler_that_hardly_differs(base: Path, tmp_path: Path) -> None:
    """A gap of 2^-13 is 256 steps of a float32 log-prob near -5, and k3 half its square, 7.5e-9: less than a float32 sees beside 1."""
    metrics = mismatch_at(2.0**-13, base, tmp_path)
    assert metrics["rl/mismatch/k3"] == pytest.approx(2.0**-27, rel=0.03, abs=0)
    assert metrics["rl/mismatch/max"] == pytest.approx(2.0**-13, rel=0.03, abs=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"old_logps": "learner"}, {"kl_coef": 0.1}, {"erc": ErcConfig()}, *({"loss": cls()} for cls in LOSS_KINDS)],
)
def test_every_form_of_the_loss_trains_on_finite_numbers(
    base: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    metrics = learner(base, tmp_path, rl_config(lm_coef=0.1, entropy_coef=0.01, **changes)).step(random_samples(6))
    assert metrics["rl/optim/updates"] == 2
    assert all(torch.isfinite(torch.tensor(v)) for v in metrics.values())


@pytest.mark.parametrize("entropy_target", [None, {"target": 10, "delta": 0.05}], ids=["constant", "adaptive"])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(
    base: Path, tmp_path: Path, entropy_target: dict[str, float] | None
) -> None:
    cfg = rl_config(num_steps=4, old_logps="learner", entropy_target=entropy_target)
    batches = [random_samples(6, seed=i) for i in range(4)]
    straight = weights_after(base, tmp_path / "a", cfg, *batches)
    first = learner(base, tmp_path / "b", cfg)
    for batch in batches[:2]:
        first.step(batch)
    first.save({"x": 7})
    second = learner(base, tmp_path / "b", cfg)
    assert second.restore() == {"x": 7}
    assert second.version == 2
    for batch in batches[2:]:
        second.step(batch)
    assert same(straight, second.weights())


def test_the_entropy_bonus_grows_each_step_below_the_target_and_acts_on_the_weights(base: Path, tmp_path: Path) -> None:
    """The untrained model has nearly log(256) = 5.5 nats: below 10, above 0."""
    batches = [random_samples(6, seed=i) for i in range(3)]
    for target, expected in ((10, [0.01, 0.06, 0.1]), (0, [0.01, 0, 0])):
        adaptive = {"target": target, "delta": 0.05, "max_coef": 0.1}
        it = learner(base, tmp_path / f"at_{target}", rl_config(entropy_coef=0.01, entropy_target=adaptive))
        assert [it.step(batch)["rl/entropy/coef"] for batch in batches] == pytest.approx(expected)
    constant = weights_after(base, tmp_path / "constant", rl_config(entropy_coef=0.01), *batches)
    assert not same(constant, it.weights())


def test_without_a_checkpoint_there_is_nothing_to_restore(base: Path, tmp_path: Path) -> None:
    assert learner(base, tmp_path, rl_config()).restore() is None


@pytest.mark.parametrize("kind", ["gppo", "gspo", "trm"])
def test_weights_do_not_depend_on_micro_batches(base: Path, tmp_path: Path, kind: str) -> None:
    def runtime(tokens: int) -> RlRuntime:
        return RlRuntime(device="cpu", tokens_per_microbatch=tokens)

    small, large = (rl_config(loss={"kind": kind}, old_logps="learner", runtime=runtime(t)) for t in (16, 4096))
    a = weights_after(base, tmp_path / "a", small, random_samples(8))
    b = weights_after(base, tmp_path / "b", large, random_samples(8))
    for name in a:
        torch.testing.assert_close(a[name], b[name], atol=2e-6, rtol=0)


def test_arrays_of_scored_rows_train_as_the_records_do(base: Path, tmp_path: Path) -> None:
    cfg, samples = rl_config(distill={"coef": 0.5}, lm_coef=0.1), scored_samples(8)
    rows = with_tokens(without_tokens(samples), tokens_of(samples, range(8)))
    a, b = learner(base, tmp_path / "a", cfg), learner(base, tmp_path / "b", cfg)
    records, arrays = a.step(samples), b.step(rows)
    assert {k: v for k, v in records.items() if "speed" not in k} == {
        k: v for k, v in arrays.items() if "speed" not in k
    }
    assert same({k: w.clone() for k, w in a.weights().items()}, b.weights())


def test_a_policy_learns_its_teachers_log_probs_of_its_answers_without_any_reward(base: Path, tmp_path: Path) -> None:
    """The teacher gives every token of every answer the probability 1/e, where the policy starts near 1/261."""
    samples = [replace(s, advantage=0.0, teacher_logps=(-1.0,) * s.num_tokens) for s in random_samples(8)]
    cfg = rl_config(num_steps=40, old_logps="learner", optim=constant_rate(1e-2), distill={})
    it = learner(base, tmp_path, cfg)
    gaps = [it.step(samples)["rl/distill/kl"] for _ in range(40)]
    assert gaps[0] == pytest.approx(1 - math.log(261), abs=0.5)
    assert abs(gaps[-1]) < 0.5
    assert all(abs(b) < abs(a) + 0.05 for a, b in pairwise(gaps[::5]))


def test_m2po_masks_the_largest_log_ratios_of_the_mini_batch_in_any_micro_batches(base: Path, tmp_path: Path) -> None:
    """The share is that of taking away the largest, one by one, until the mean of the leaving tokens is in bounds."""
    samples, bound = random_samples(8, logp=-5.5), 0.01
    (micro,) = pack(samples, tokens_per_microbatch=1 << 20).micro_batches
    logp_N = load_model(model_folder(base), device="cpu")(micro, partial(token_logps, target_N=micro.target_N)).logp_N
    gaps = [
        (samples[row].advantage, logp + 5.5) for row, logp in zip(micro.row_N.tolist(), logp_N.tolist(), strict=True)
    ]
    leaving = sorted(gap**2 for advantage, gap in gaps if advantage * gap > 0)
    kept = list(leaving)
    while sum(kept) > bound * len(kept):
        kept.pop()
    found = []
    for tokens in (16, 4096):
        cfg = rl_config(
            loss={"kind": "m2po", "max_second_moment": bound},
            minibatches_per_step=1,
            runtime=RlRuntime(device="cpu", tokens_per_microbatch=tokens),
        )
        it = learner(base, tmp_path / str(tokens), cfg)
        assert it.step(samples)["rl/clip/masked_frac"] == pytest.approx((len(leaving) - len(kept)) / len(gaps))
        found.append({name: w.clone() for name, w in it.weights().items()})
    assert 0 < len(kept) < len(leaving)
    torch.testing.assert_close(found[0], found[1], atol=2e-6, rtol=0)


def test_a_bad_update_is_skipped_saved_and_fatal_when_there_are_too_many(base: Path, tmp_path: Path) -> None:
    runtime = RlRuntime(device="cpu", max_nonfinite_steps=1)
    it = learner(base, tmp_path, rl_config(minibatches_per_step=1, runtime=runtime))
    first, second = random_samples(2)
    bad = [replace(first, advantage=math.nan), second]
    before = {k: w.clone() for k, w in it.weights().items()}
    metrics = it.step(bad)
    assert (metrics["rl/optim/updates"], metrics["rl/optim/skipped"]) == (0, 1)
    assert same(before, it.weights())
    (saved,) = (tmp_path / "skipped").glob("*.json")
    kept = {tuple(r["token_ids"]): r for r in json.loads(saved.read_text())}
    assert kept.keys() == {s.token_ids for s in bad}
    assert math.isnan(float(kept[bad[0].token_ids]["advantage"]))
    json.loads(saved.read_text(), parse_constant=pytest.fail)  # NaN and Infinity are no JSON
    assert tuple(kept[bad[1].token_ids]["sampler_logps"]) == bad[1].sampler_logps
    with pytest.raises(TrainingError, match="2 updates with a loss or gradient that is not finite"):
        it.step(bad)


def test_each_bad_update_of_a_step_is_kept_and_counted_in_that_step_alone(base: Path, tmp_path: Path) -> None:
    runtime = RlRuntime(device="cpu", max_nonfinite_steps=9)
    it = learner(base, tmp_path, rl_config(minibatches_per_step=3, runtime=runtime))
    bad = [replace(s, advantage=math.nan) for s in random_samples(6)]
    metrics = [it.step(rows) for rows in (bad, random_samples(6), bad[:2])]
    assert [(m["rl/optim/updates"], m["rl/optim/skipped"]) for m in metrics] == [(0, 3), (3, 0), (0, 2)]
    names = sorted(f.name for f in (tmp_path / "skipped").glob("*.json"))
    assert names == [
        "step-00000001-1.json",
        "step-00000001-2.json",
        "step-00000001-3.json",
        "step-00000003-4.json",
        "step-00000003-5.json",
    ]


OF_UPDATES = (
    "rl/loss/",
    "rl/grad/",
    "rl/batch/",
    "rl/entropy/",
    "rl/ratio/",
    "rl/clip/",
    "rl/outside/",
    "rl/mismatch/",
    "rl/optim/lr",
)


def of_updates(metrics: dict[str, float]) -> dict[str, float]:
    """The statistics of the updates."""
    return {name: value for name, value in metrics.items() if name.startswith(OF_UPDATES)}


@pytest.mark.parametrize("advantage", [math.inf, 3e38], ids=["infinite", "overflows in the loss"])
@pytest.mark.parametrize("place", [0, 1])
def test_statistics_are_of_the_updates_that_were_applied(
    base: Path, tmp_path: Path, advantage: float, place: int
) -> None:
    """Of two mini-batches one is skipped: what is left is a step of the other alone, whichever comes first."""
    samples = random_samples(8)
    halves = cut_minibatches(samples, 2, seed=seed_for(0, "rl/minibatches", 0))
    bad, good = halves[place], halves[1 - place]
    longest = max(bad, key=lambda s: len(s.token_ids))
    with_bad = [replace(s, advantage=advantage) if s is longest else s for s in samples]
    metrics = learner(base, tmp_path / "both", rl_config(minibatches_per_step=2)).step(with_bad)
    alone = learner(base, tmp_path / "good", rl_config(minibatches_per_step=1)).step(good)
    assert (metrics["rl/optim/updates"], metrics["rl/optim/skipped"]) == (1, 1)
    assert of_updates(metrics) == pytest.approx(of_updates(alone), rel=1e-5)
    assert set(of_updates(alone)) > {
        "rl/ratio/max",
        "rl/clip/pull_frac",
        "rl/grad/max",
        "rl/mismatch/k3",
        "rl/batch/tokens",
    }


def test_a_step_without_an_applied_update_has_no_statistics(base: Path, tmp_path: Path) -> None:
    bad = [replace(s, advantage=math.inf) for s in random_samples(4)]
    metrics = learner(base, tmp_path, rl_config(minibatches_per_step=2)).step(bad)
    assert metrics == {"rl/optim/updates": 0, "rl/optim/skipped": 2, "rl/staleness/mean": 0, "rl/staleness/max": 0}


def test_staleness_is_counted_in_versions(base: Path, tmp_path: Path) -> None:
    it = learner(base, tmp_path, rl_config())
    it.step(random_samples(2))
    metrics = it.step(random_samples(2))
    assert (metrics["rl/staleness/mean"], metrics["rl/staleness/max"]) == (1, 1)


def test_the_exported_folder_loads_with_the_trained_weights(base: Path, tmp_path: Path) -> None:
    it = learner(base, tmp_path, rl_config())
    it.step(random_samples(4))
    it.export(tmp_path / "model")
    loaded = load_model(tmp_path / "model", device="cpu")
    for name, w in it.weights().items():
        if name in dict(loaded.hf.named_parameters()):
            assert torch.equal(dict(loaded.hf.named_parameters())[name], w)
    assert not torch.equal(
        it.weights()["model.embed_tokens.weight"],
        load_model(model_folder(base), device="cpu").hf.get_input_embeddings().weight,
    )


def test_a_later_stage_continues_with_the_kept_optimizer(base: Path, tmp_path: Path) -> None:
    """Two stages of two steps with the state handed on are one run of four, for the same batches at a constant rate."""
    batches = [random_samples(6, seed=i) for i in range(4)]
    straight = weights_after(base, tmp_path / "a", rl_config(minibatches_per_step=1, num_steps=4), *batches)
    first = learner(base, tmp_path / "math", rl_config(minibatches_per_step=1, keep_optimizer=True))
    for batch in batches[:2]:
        first.step(batch)
    first.export(tmp_path / "math" / "model")
    second = rl_config(minibatches_per_step=1, continue_optimizer=True)
    continued = weights_after(tmp_path / "math", tmp_path / "code", second, *batches[2:])
    for name in straight:
        torch.testing.assert_close(continued[name], straight[name], atol=1e-6, rtol=0)  # rows are shuffled by version


def test_a_later_stage_takes_over_the_moments_and_keeps_its_own_settings(base: Path, tmp_path: Path) -> None:
    first = learner(
        base,
        tmp_path / "math",
        rl_config(keep_optimizer=True, optim=RlOptimConfig(lr=1e-3, weight_decay=0.5, betas=(0.8, 0.9))),
    )
    first.step(random_samples(6))
    first.export(tmp_path / "math" / "model")
    cfg = rl_config(continue_optimizer=True, optim=RlOptimConfig(lr=1e-3, weight_decay=0.1, betas=(0.9, 0.99)))
    optimizer = learner(tmp_path / "math", tmp_path / "code", cfg)._updater.optimizer
    assert [(g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [(0.1, (0.9, 0.99)), (0.0, (0.9, 0.99))]
    assert {int(s["step"]) for s in optimizer.state.values()} == {2}


def test_continuing_from_a_stage_that_kept_nothing_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set keep_optimizer in the stage that made the model"):
        learner(base, tmp_path, rl_config(continue_optimizer=True))


def logps_of(it: Learner, samples: Sequence[TrainSample]) -> Tensor:
    return torch.cat([out.logp_N for out in it.logps(samples)])


LORA = {"lora": LoraConfig(rank=4), "optim": constant_rate(1e-2)}


def test_the_engines_get_the_model_with_its_adapters_merged(base: Path, tmp_path: Path) -> None:
    plain = load_model(model_folder(base), device="cpu")
    it = learner(base, tmp_path, rl_config(**LORA))
    assert same(it.weights(), full_weights(plain))
    it.step(random_samples(6))
    it.export(tmp_path / "model")
    engine, sent = it.weights(), dict(it.each_weight())
    assert list(engine) == list(sent) == [spec.name for spec in it.weight_specs()] == list(full_weights(plain))
    exported = full_weights(load_model(tmp_path / "model", device="cpu"))
    assert same(engine, sent)
    assert same(engine, exported)
    samples = random_samples(3)
    merged = learner(tmp_path, tmp_path / "merged", rl_config())  # its input is the model exported just now
    torch.testing.assert_close(logps_of(it, samples), logps_of(merged, samples), atol=1e-4, rtol=0)
    changed = {name for name in engine if not torch.equal(engine[name], full_weights(plain)[name])}
    assert changed == {name for name in engine if "_proj" in name}


def test_a_resumed_learner_with_adapters_goes_on_as_an_unbroken_one(base: Path, tmp_path: Path) -> None:
    cfg = rl_config(minibatches_per_step=2, **LORA)
    whole = learner(base, tmp_path / "a", cfg)
    whole.step(random_samples(6))
    whole.save({})
    whole.step(random_samples(4))
    resumed = learner(base, tmp_path / "a", cfg)
    assert resumed.restore() == {}
    resumed.step(random_samples(4))
    assert same(whole.weights(), resumed.weights())


def test_the_reference_of_a_policy_with_adapters_is_the_initial_model(base: Path, tmp_path: Path) -> None:
    """The same step with and without a KL term differs by the KL against a copy of the initial model."""
    samples, cfg = random_samples(6), rl_config(minibatches_per_step=1, **LORA)
    before, plain = learner(base, tmp_path, cfg), learner(base, tmp_path, cfg)
    before.step(samples)
    before.save({})
    plain.restore()
    kl = k3(logps_of(learner(base, tmp_path / "other", cfg), samples) - logps_of(plain, samples)).mean().item()
    assert kl > 1e-3
    held = learner(base, tmp_path, cfg.model_copy(update={"kl_coef": 0.5}))
    held.restore()
    losses = [it.step(samples)["rl/loss/mean"] for it in (plain, held)]
    assert losses[1] - losses[0] == pytest.approx(0.5 * kl, rel=1e-3)
