"""The prompt stream: every problem once an epoch, or a curriculum by what is known of pass rates."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping

import pytest
from rl_builders import problem

from klear_core.config.rl import CurriculumConfig
from klear_core.rl.groups import reason_ledger
from klear_core.rl.state import RlState
from klear_core.rl.step_metrics import describe_groups
from klear_core.rl.stream import Curriculum, CurriculumState, PromptStream, Seen, mixed_probability
from klear_core.types import Completion, Outcome, PassRate, Rollout, RolloutGroup, Verdict

TEN = [problem(f"q{i}") for i in range(10)]
NO_REVISITS = CurriculumConfig(revisit_frac=0)


def group(name: str, num_right: int, num_wrong: int, *, num_failed: int = 0) -> RolloutGroup:
    outcomes = [(Outcome.SCORED, True)] * num_right + [(Outcome.SCORED, False)] * num_wrong
    outcomes += [(Outcome.JUDGE_FAILED, False)] * num_failed
    answer = Completion(text="a", token_ids=(1,), logps=(-1.0,), finish_reason="stop", policy_versions=(0,))
    rollouts = []
    for outcome, is_right in outcomes:
        verdict = Verdict(outcome=outcome, score=float(is_right))
        rollouts.append(
            Rollout(prompt_ids=(1,), completion=answer, verdict=verdict, reward=float(is_right), is_positive=is_right)
        )
    return RolloutGroup(problem=problem(name), rollouts=tuple(rollouts))


def curriculum(
    cfg: CurriculumConfig = NO_REVISITS,
    names: str = "abcdef",
    *,
    seed: int = 0,
    rates: Mapping[str, tuple[int, int]] | None = None,
    **state: object,
) -> PromptStream:
    problems = [problem(name) for name in names]
    tags = {
        name: PassRate(problem_id=name, num_correct=right, num_scored=judged)
        for name, (right, judged) in (rates or {}).items()
    }
    drawn = Curriculum(problems, cfg, seed=seed, samples_per_group=8, pass_rates=tags, **state)  # type: ignore[arg-type]
    return PromptStream(problems, seed=seed, curriculum=drawn)


def ids(stream: PromptStream, count: int) -> list[str]:
    return [item.problem.problem_id for item in stream.take(count)]


def pools(stream: PromptStream, count: int) -> dict[str, str | None]:
    return {item.problem.problem_id: item.pool for item in stream.take(count)}


# ---- without a curriculum ----


def test_every_epoch_visits_every_problem_once_in_an_order_of_its_own() -> None:
    stream = PromptStream(TEN, seed=0)
    first, second = (ids(stream, 10) for _ in range(2))
    assert sorted(first) == sorted(second) == [f"q{i}" for i in range(10)]
    assert first != second


def test_a_stream_resumes_from_its_position_alone() -> None:
    whole = PromptStream(TEN, seed=3)
    whole.take(7)
    assert PromptStream(TEN[::-1], seed=3, position=7).take(8) == whole.take(8)


def test_without_a_curriculum_nothing_is_remembered() -> None:
    stream = PromptStream(TEN, seed=0)
    assert {item.pool for item in stream.take(3)} == {None}
    assert stream.end_step([group("q0", 4, 4)]) == CurriculumState()
    assert RlState().counters().keys() == {*RlState.of(None).counters()}


# ---- with one ----


@pytest.mark.parametrize(
    ("a", "b", "num_samples", "expected"),
    [
        (1, 1, 2, 1 - 1 / 3 - 1 / 3),  # uniform: E[p^2] = 1/3
        (1, 1, 8, 1 - 2 / 9),
        (0.5, 0.5, 2, 1 - 2 * (0.5 * 1.5) / (1 * 2)),
        (3, 1, 2, 1 - (3 * 4) / (4 * 5) - (1 * 2) / (4 * 5)),
        (1e6, 1e6, 4, 1 - 2 / 2**4),  # p is known to be a half
        (1e6, 1e-6, 4, 0),  # p is known to be 1
    ],
)
def test_a_groups_chance_of_right_and_wrong_answers_by_hand(
    a: float, b: float, num_samples: int, expected: float
) -> None:
    assert mixed_probability(a, b, num_samples) == pytest.approx(expected, abs=1e-5)


def test_the_prior_has_the_mean_and_the_spread_of_the_problems() -> None:
    """a: 8 of 8, b: 4 of 8, and one problem with 1/2 and 1/8: mean 2/3; within 0 + 2/7 + 1/8 over 3, of 2/9."""
    cfg = CurriculumConfig(half_life_steps=1e9)
    state = CurriculumState(seen={name: Seen(right=right, judged=8, step=0) for name, right in (("a", 8), ("b", 4))})
    share = (2 / 7 + 1 / 8) / 3 / (2 / 9)
    strength = share / (1 - share)
    own = curriculum(cfg, "abc", step=0, state=state).curriculum
    assert own is not None
    assert own.prior() == pytest.approx((strength * 2 / 3, strength / 3))
    nothing_known = curriculum(cfg, "abc").curriculum
    assert nothing_known is not None
    assert nothing_known.prior() == (0.5, 0.5)


def test_a_curriculum_finds_more_informative_groups_than_a_uniform_stream() -> None:
    """A policy that stays as it is: of 300 problems it solves 60 half of the time, and the others always or never."""
    names = [f"{i:03}" for i in range(300)]
    problems = [problem(name) for name in names]
    rates = {name: (0.5, 0.0, 1.0, 0.0, 1.0)[i % 5] for i, name in enumerate(names)}

    def num_informative(curriculum: Curriculum | None) -> int:
        stream, rng, found = PromptStream(problems, seed=0, curriculum=curriculum), random.Random(0), 0
        for _ in range(30):
            groups = []
            for name in ids(stream, 16):
                num_right = sum(rng.random() < rates[name] for _ in range(8))
                groups.append(group(name, num_right, 8 - num_right))
                found += 0 < num_right < 8
            stream.end_step(groups)
        return found

    drawn = Curriculum(problems, CurriculumConfig(), seed=0, samples_per_group=8, pass_rates={})
    assert num_informative(None) < 0.25 * 480
    assert num_informative(drawn) > 0.35 * 480


def test_a_step_draws_no_problem_twice_before_all_were_drawn() -> None:
    stream = curriculum()
    assert sorted(ids(stream, 6)) == list("abcdef")
    assert sorted(ids(stream, 6)) == list("abcdef")


def test_pools_follow_from_the_answers() -> None:
    """The chance is 0.3 for a and b, of which one group was all right or all wrong, and above 0.9 for c and d."""
    cfg = CurriculumConfig(revisit_frac=0, admit=0.4)
    stream = curriculum(cfg)
    asked = {item.problem.problem_id: item for item in stream.take(6)}
    stream.reject(asked["e"])
    groups = [group("a", 8, 0), group("b", 0, 8), group("c", 4, 4), group("d", 3, 5), group("f", 0, 0, num_failed=8)]
    state = stream.end_step(groups)
    assert state.seen["e"] == state.seen["f"] == Seen(right=0, judged=0, step=0)
    assert pools(stream, 6) == {
        "a": "easy",
        "b": "hard",
        "c": "mixed",
        "d": "mixed",
        "e": "unusable",
        "f": "unusable",
    }
    assert curriculum().take(1)[0].pool == "new"


def test_a_tagged_problem_that_cannot_be_asked_is_unusable_whatever_its_tag_says() -> None:
    stream = curriculum(CurriculumConfig(revisit_frac=0, admit=0.4), rates={"a": (4, 8), "b": (4, 8)})
    asked = {item.problem.problem_id: item for item in stream.take(6)}
    stream.reject(asked["a"])
    stream.end_step([group("b", 0, 0, num_failed=8), group("c", 4, 4)])  # the judge failed, not b
    found = pools(stream, 6)
    assert (found["a"], found["b"], found["c"], found["d"]) == ("unusable", "mixed", "mixed", "new")


def test_problems_are_drawn_in_proportion_to_their_chance_of_an_informative_group() -> None:
    """The first of three draws; c has 4 of 8 right, a all, b none. Mean 1/2; within problems (1/8 + 2/7) / 4 of 1/4."""
    state = CurriculumState(
        seen={name: Seen(right=right, judged=8, step=0) for name, right in (("a", 8), ("b", 0), ("c", 4))}
    )
    cfg = CurriculumConfig(admit=0, revisit_frac=0, half_life_steps=1e9)
    firsts = Counter(ids(curriculum(cfg, "abc", seed=s, step=1, state=state), 1)[0] for s in range(3000))
    within = 1 / 8 + 2 / 7
    half = 0.5 * within / (1 - within)
    counts = {"a": (8, 0), "b": (0, 8), "c": (4, 4)}
    weights = {name: mixed_probability(half + right, half + wrong, 8) for name, (right, wrong) in counts.items()}
    assert weights["a"] == pytest.approx(weights["b"])
    for name, weight in weights.items():
        assert firsts[name] / 3000 == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_a_remembered_answer_counts_half_after_the_half_life() -> None:
    stream = curriculum(CurriculumConfig(half_life_steps=2), "ab")
    stream.end_step([group("a", 6, 2)])
    stream.end_step([])
    state = stream.end_step([group("a", 0, 8)])
    assert state.seen == {"a": Seen(right=3, judged=4 + 8, step=2)}


def test_what_was_solved_comes_back_when_memory_of_it_has_faded() -> None:
    def pool_after(steps: int) -> str | None:
        stream = curriculum(CurriculumConfig(half_life_steps=4), "abcd", rates={"b": (4, 8)})
        stream.end_step([group(name, 8, 0) for name in "acd"])
        for _ in range(steps - 1):
            stream.end_step([])
        return pools(stream, 4)["a"]

    assert pool_after(1) == "easy"
    assert pool_after(12) == "mixed"
    assert pool_after(9000) == "mixed"  # its counts have become 0


def test_revisits_take_the_problem_that_was_not_asked_for_the_longest_time() -> None:
    seen = {name: Seen(right=800, judged=800, step=step) for name, step in zip("abcd", (3, 1, 2, 0), strict=True)}
    cfg = CurriculumConfig(revisit_frac=1, half_life_steps=1e9)
    assert ids(curriculum(cfg, "abcdef", step=4, state=CurriculumState(seen=seen)), 5)[:4] == list("dbca")


def test_a_tenth_of_the_draws_are_revisits() -> None:
    names = [f"{i:03}" for i in range(400)]
    problems = [problem(name) for name in names]
    # The first half is solved, the second mixed.
    seen = {name: Seen(right=8e6 if i < 200 else 4e6, judged=8e6, step=0) for i, name in enumerate(names)}
    cfg = CurriculumConfig(revisit_frac=0.1, half_life_steps=1e9)
    drawn = Curriculum(
        problems, cfg, seed=0, samples_per_group=8, pass_rates={}, step=1, state=CurriculumState(seen=seen)
    )
    found = Counter(item.pool for item in PromptStream(problems, seed=0, curriculum=drawn).take(200))
    assert found["easy"] == pytest.approx(20, abs=10)
    assert found["easy"] + found["mixed"] == 200


def test_a_tag_counts_as_the_answers_of_one_group_at_most() -> None:
    """12 of 16 count as 6 of 8; half of that after the half-life, when RL's own answers are added."""
    stream = curriculum(CurriculumConfig(half_life_steps=1), "ab", rates={"a": (12, 16)})
    own = stream.curriculum
    assert own is not None
    assert own.known("a") == Seen(right=6, judged=8, step=0)
    stream.end_step([group("a", 0, 8)])
    assert own.known("a") == Seen(right=3, judged=4 + 4, step=1)
    assert pools(stream, 2) == {"a": "mixed", "b": "new"}


def test_a_restored_curriculum_draws_what_the_first_would_have_drawn() -> None:
    whole = curriculum(CurriculumConfig(), "abcdefgh", rates={"a": (1, 8)})
    whole.take(4)
    state = whole.end_step([group("a", 8, 0), group("b", 2, 6), group("c", 0, 8)])
    saved = RlState(step=1, position=4, curriculum=state)
    restored = RlState.of(saved.counters())
    assert restored == saved
    again = curriculum(CurriculumConfig(), "abcdefgh", rates={"a": (1, 8)}, step=1, state=restored.curriculum)
    again.position = restored.position
    for _ in range(3):
        assert again.take(4) == whole.take(4)
        assert again.end_step([group("d", 3, 5)]) == whole.end_step([group("d", 3, 5)])


def test_positions_in_no_step_yet_keep_their_problem_and_are_not_drawn_again() -> None:
    stream = curriculum(names="abcdef")
    drawn = {item.position: item.problem.problem_id for item in stream.take(4)}
    state = stream.end_step([group(drawn[0], 4, 4), group(drawn[2], 4, 4)], unfinished=(1, 3))
    assert state.drawn == {1: drawn[1], 3: drawn[3]}
    state = CurriculumState.of(state.counters())
    again = curriculum(names="abcdef", step=1, state=state)
    assert [again.at(p).problem.problem_id for p in (1, 3)] == [drawn[1], drawn[3]]
    assert not {drawn[1], drawn[3]} & set(ids(again, 4))


def test_an_id_may_have_any_characters() -> None:
    state = CurriculumState(seen={"a/b/1": Seen(right=1.25, judged=2.5, step=3)}, drawn={7: "c/7/drawn/"})
    assert CurriculumState.of({**state.counters(), "step": 1, "fate/group/x": 2}) == state


def test_pools_are_in_the_ledger_and_in_the_metrics() -> None:
    state = RlState(curriculum=CurriculumState(seen={"a": Seen(right=1, judged=8, step=0)}))
    for pool, count in (("new", 3), ("mixed", 1)):
        state.reasons.count("pool", pool, count)
    state.reasons.count("group", "trained")
    state.reasons.count("group", "zero_advantage", 3)
    (groups, _) = reason_ledger(state.reasons)
    assert groups.noted == {"from_mixed": 1, "from_new": 3}
    metrics = describe_groups([group("a", 1, 7)], state.reasons)
    shares = {name: value for name, value in metrics.items() if name.startswith("rl/curriculum/")}
    assert shares == {
        "rl/curriculum/new_frac": 0.75,
        "rl/curriculum/mixed_frac": 0.25,
        "rl/curriculum/easy_frac": 0,
        "rl/curriculum/hard_frac": 0,
        "rl/curriculum/unusable_frac": 0,
    }
