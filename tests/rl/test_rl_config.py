"""Settings of RL that contradict each other are refused, with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from klear_core.config.evaluate import VllmEngineConfig
from klear_core.config.opd import OpdConfig
from klear_core.config.rewards import OverlongConfig
from klear_core.config.rl import MismatchConfig, RlConfig, RolloutConfig


def rl(sampling: dict[str, object], **settings: object) -> RlConfig:
    return RlConfig.model_validate({"rollout": {"sampling": sampling}} | settings)


@pytest.mark.parametrize(
    ("sampling", "found"),
    [
        ({"top_p": 0.95}, "top_p = 0.95"),
        ({"top_k": 20}, "top_k = 20"),
        ({"repetition_penalty": 1.05}, "repetition_penalty = 1.05"),
    ],
)
def test_log_probs_of_a_cut_distribution_are_no_old_log_probs(sampling: dict[str, object], found: str) -> None:
    with pytest.raises(ValueError, match=f"{found}: the sampler's log-probs are then of another distribution"):
        rl(sampling, old_logps="sampler")
    assert rl(sampling, old_logps="learner")
    assert rl({"temperature": 0.7}, old_logps="sampler")


def test_engines_cannot_sleep_while_they_sample() -> None:
    engine = {"kind": "vllm", "runtime": {"sleep_mode": True}}
    assert RlConfig.model_validate({"rollout": {"engine": engine}}).rollout.sleeps_between_rollouts
    with pytest.raises(
        ValueError, match="sleep_mode with max_staleness = 1: engines that sample while the learner works"
    ):
        RlConfig.model_validate({"rollout": {"engine": engine}, "max_staleness": 1})
    assert not RlConfig.model_validate(
        {"rollout": {"engine": {"kind": "vllm"}}, "max_staleness": 1}
    ).rollout.sleeps_between_rollouts


def test_engines_sample_with_the_positions_that_the_learner_has() -> None:
    with pytest.raises(
        ValueError, match=r"rollout\.engine\.yarn_factor = 2\.5: the learner's positions are not stretched"
    ):
        RlConfig.model_validate({"rollout": {"engine": {"kind": "vllm", "yarn_factor": 2.5}}})


def test_the_torch_engine_has_no_sleep() -> None:
    with pytest.raises(ValueError, match="sleep_mode"):
        RlConfig.model_validate({"rollout": {"engine": {"kind": "torch", "runtime": {"sleep_mode": True}}}})


def test_a_length_penalty_needs_room_for_answers_without_it() -> None:
    with pytest.raises(ValueError, match="penalty_tokens = 4097 exceeds max_new_tokens = 4096"):
        rl({"max_new_tokens": 4096}, overlong=OverlongConfig(penalty_tokens=4097))
    assert rl({"max_new_tokens": 4096}, overlong=OverlongConfig(penalty_tokens=4096))


@pytest.mark.parametrize(
    ("settings", "num_cpus"),
    [
        ({}, 2),  # sampler and learner work in turn
        ({"max_staleness": 1}, 4),
        ({"max_staleness": 1, "old_logps": "sampler", "rollout": {"mode": "delayed"}}, 2),  # samples in turn, too
        ({"curve": {"benchmark": "heldout"}}, 4),  # sampled while the learner works
    ],
)
def test_a_synchronous_step_gives_all_cores_to_the_sampler_and_then_to_the_learner(
    settings: dict[str, Any], num_cpus: int
):
    curve = settings.pop("curve", None)
    runtime = {"num_workers": 1, "num_threads": 2, "num_rollout_actors": 1, "rollout_threads": 2, "curve": curve}
    assert RlConfig.model_validate({"runtime": runtime, **settings}).num_cpus == num_cpus


def test_tokens_are_corrected_for_the_mismatch_wherever_vllm_samples() -> None:
    vllm = RolloutConfig(engine=VllmEngineConfig())
    assert RlConfig(rollout=vllm).truncate_at == 2.0
    assert RlConfig().truncate_at is None  # our sampler agrees to the last bits
    assert RlConfig(rollout=vllm, old_logps="sampler").truncate_at is None  # the ratio itself is over the sampler
    assert RlConfig(rollout=vllm, mismatch=MismatchConfig(truncate_at=5)).truncate_at == 5
    assert RlConfig(rollout=vllm, mismatch=MismatchConfig(truncate_at="off")).truncate_at is None
    assert RlConfig(rollout=vllm, mismatch=MismatchConfig(truncate_at=None)).truncate_at is None
    with pytest.raises(ValueError, match=r"greater than or equal to 1|'auto' or 'off'"):
        MismatchConfig(truncate_at=0.5)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"old_logps": "learner", "mismatch": {"truncate_at": 2}}, ""),  # below 16 versions
        ({"old_logps": "learner", "mismatch": {"truncate_at": "off"}}, "was not tried without mismatch.truncate_at"),
        ({"old_logps": "sampler"}, "collapsed with it on 3 of 8 seeds"),
        ({"old_logps": "sampler", "loss": {"kind": "gppo", "beta_low": 0.5}}, ""),
        ({"old_logps": "sampler", "loss": {"kind": "m2po"}}, ""),
        (
            {
                "old_logps": "sampler",
                "loss": {
                    "kind": "gppo",
                    "beta_low": 0,
                    "schedule": {"start_step": 1, "end_step": 2, "beta_low": 1, "beta_high": 1},
                },
            },
            "beta_low = 1",
        ),
    ],
)
def test_what_a_plan_says_of_stale_samples_is_what_was_seen_on_them(settings: dict[str, Any], told: str) -> None:
    cfg = RlConfig.model_validate(settings)
    assert cfg.stale_risk(3) == ""
    assert (told in cfg.stale_risk(4)) if told else (cfg.stale_risk(4) == "")


@pytest.mark.parametrize(("old_logps", "num_steps"), [("sampler", 8), ("learner", 8), ("learner", 200)])
def test_distillation_is_warned_of_old_samples_and_told_only_what_it_can_set(old_logps: str, num_steps: int) -> None:
    train = {"old_logps": old_logps, "num_steps": num_steps}
    risk = OpdConfig.model_validate({"teacher": {"top_k": 0}, "train": train}).stale_risk
    assert ("take one of these" in risk) == (old_logps == "sampler")
    assert "mismatch" not in risk


def test_at_16_versions_the_learners_log_probs_are_no_remedy() -> None:
    corrected = RlConfig.model_validate({"old_logps": "learner", "mismatch": {"truncate_at": 2.0}})
    assert 'old_logps = "learner" gained nothing' in corrected.stale_risk(16)
    by_sampler = RlConfig(old_logps="sampler").stale_risk(16)
    assert "8 of 8 seeds" in by_sampler
    assert "learner" not in by_sampler


def test_an_entropy_bonus_starts_within_its_bound() -> None:
    with pytest.raises(ValueError, match=r"entropy_coef = 0\.5 is above .*max_coef = 0\.1"):
        RlConfig.model_validate({"entropy_coef": 0.5, "entropy_target": {}})
    assert RlConfig.model_validate({"entropy_coef": 0.1, "entropy_target": {}})
