"""Rows to learn from, and their cut into mini-batches."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from klear_core.artifacts.records import read_shard
from klear_core.config.rewards import GrpoAdvantage, OverlongConfig
from klear_core.config.rl import RlConfig
from klear_core.rl.groups import cut_minibatches, to_samples
from klear_core.types import (
    Completion,
    Difficulty,
    Domain,
    FinishReason,
    MathReference,
    Outcome,
    Problem,
    Rollout,
    RolloutGroup,
    TrainSample,
    Verdict,
)

CENTRED = RlConfig(advantage=GrpoAdvantage(std="none"))
MASKED = CENTRED.model_copy(update={"overlong": OverlongConfig(handling="mask")})


def rollout(reward: float, *, finish: FinishReason = "stop", versions: tuple[int, ...] = (3, 3)) -> Rollout:
    completion = Completion(
        text="", token_ids=(7, 8), logps=(-0.1, -0.2), finish_reason=finish, policy_versions=versions
    )
    verdict = Verdict(outcome=Outcome.SCORED, score=float(reward > 0))
    return Rollout(prompt_ids=(1, 2, 3), completion=completion, verdict=verdict, reward=reward, is_positive=reward == 1)


def group(*rollouts: Rollout) -> RolloutGroup:
    reference = MathReference(answers=("1",))
    problem = Problem(
        problem_id="p", source="s", domain=Domain.MATH, question="q", reference=reference, difficulty=Difficulty.EASY
    )
    return RolloutGroup(problem=problem, rollouts=rollouts)


def sample(problem_id: str) -> TrainSample:
    return TrainSample(
        problem_id=problem_id,
        token_ids=(1, 2),
        loss_mask=(False, True),
        sampler_logps=(0.0, -1.0),
        advantage=1.0,
        is_positive=True,
        oldest_version=0,
    )


def test_a_step_that_was_saved_with_the_earlier_name_of_its_log_probs_is_read(tmp_path: Path) -> None:
    table = pa.table({"old_logps" if name == "sampler_logps" else name: [v] for name, v in asdict(sample("p")).items()})
    pq.write_table(table, tmp_path / "samples.parquet")
    assert read_shard(tmp_path / "samples.parquet", TrainSample) == [sample("p")]


def test_a_row_is_prompt_and_answer_with_loss_on_the_answer() -> None:
    right, wrong = to_samples([group(rollout(1), rollout(-1))], CENTRED, oldest_allowed=3).samples
    assert right.token_ids == (1, 2, 3, 7, 8)
    assert right.loss_mask == (False, False, False, True, True)
    assert right.sampler_logps == (0, 0, 0, -0.1, -0.2)
    assert (right.advantage, right.is_positive, wrong.advantage, wrong.is_positive) == (1, True, -1, False)


def test_the_language_model_loss_does_not_learn_what_the_policy_loss_unlearns() -> None:
    """Right, but without a tag: reward -2, below the mean of its group."""
    right = rollout(1)
    tagless = replace(right, reward=-2.0, is_positive=False)
    rows = to_samples([group(right, tagless)], CENTRED, oldest_allowed=0).samples
    assert [(r.advantage, r.is_positive) for r in rows] == [(1.5, True), (-1.5, False)]


def test_masked_overlong_answers_shape_the_advantages_but_are_not_learnt() -> None:
    found = to_samples(
        [group(rollout(1), rollout(-1, finish="length"))],
        MASKED,
        oldest_allowed=0,
    )
    assert [r.advantage for r in found.samples] == [1]
    assert found.reasons.counts == {"rollout/trained": 1, "rollout/overlong": 1, "group/trained": 1}


def test_answers_older_than_the_bound_never_train() -> None:
    old, young = rollout(1, versions=(2, 3)), rollout(-1, versions=(3, 4))
    found = to_samples([group(old, young)], CENTRED, oldest_allowed=3)
    assert [r.oldest_version for r in found.samples] == [3]
    assert found.reasons.counts["rollout/stale"] == 1


def test_a_group_without_a_row_left_is_counted() -> None:
    found = to_samples([group(rollout(1, versions=(0,)), rollout(-1, versions=(0,)))], CENTRED, oldest_allowed=1)
    assert found.reasons.counts == {"rollout/stale": 2, "group/all_masked": 1}


def test_minibatches_hold_every_row_once_and_differ_by_at_most_one_row() -> None:
    rows = [sample(f"p{i // 3}") for i in range(15)]
    cut = cut_minibatches(rows, 4, seed=1)
    assert sorted(len(c) for c in cut) == [3, 4, 4, 4]
    assert sorted(r.problem_id for c in cut for r in c) == sorted(r.problem_id for r in rows)


def test_rows_of_a_group_stay_together_and_groups_move_with_the_seed() -> None:
    rows = [sample(f"p{i // 2}") for i in range(16)]
    cut = cut_minibatches(rows, 8, seed=1)
    assert all(len({r.problem_id for r in c}) == 1 for c in cut)
    assert [c[0].problem_id for c in cut] != [c[0].problem_id for c in cut_minibatches(rows, 8, seed=2)]


@pytest.mark.parametrize(("num_rows", "num_batches"), [(0, 0), (1, 1), (3, 3), (9, 4)])
def test_there_is_no_empty_minibatch(num_rows: int, num_batches: int) -> None:
    cut = cut_minibatches([sample("p")] * num_rows, 4, seed=0)
    assert len(cut) == num_batches
    assert all(cut)
