"""How prompts become judged groups."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_engine import FakeAnswer, FakeEngine, Script
from rl_builders import problem, rl_config, tiny_base

from klear_core.config.evaluate import SamplingConfig
from klear_core.config.rewards import OverlongConfig, RewardConfig
from klear_core.config.rl import RlConfig, RlRuntime, RolloutConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import SamplingParams
from klear_core.prompts import build_byte_tokenizer, load_tokenizer
from klear_core.rl.rewards import terms_of
from klear_core.rl.rollout import Collector, RolloutClient, StepRollouts
from klear_core.rl.stream import PromptStream
from klear_core.train.base_model import model_folder
from klear_core.types import Judge, Outcome, Problem, Verdict

RIGHT, WRONG = (Verdict(outcome=Outcome.SCORED, score=s) for s in (1.0, 0.0))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_tokenizer(model_folder(tiny_base(tmp_path_factory.mktemp("base"))))


async def says_right(_problem: Problem, response: str) -> Verdict:
    return RIGHT if response.startswith("right") else WRONG


def alternating(_prompt: tuple[int, ...], params: SamplingParams, _index: int) -> FakeAnswer:
    """Right for about half of all seeds, always the same half."""
    return FakeAnswer(text="right" if params.seed % 2 else "wrong")


def config(**rollout: object) -> RlConfig:
    settings: dict[str, object] = {
        "groups_per_step": 4,
        "samples_per_group": 4,
        "sampling": SamplingConfig(max_new_tokens=8),
    }
    return rl_config(rollout=RolloutConfig.model_validate(settings | rollout))


def collector(
    script: Script, tokenizer: object, cfg: RlConfig, judge: Judge = says_right
) -> tuple[Collector, FakeEngine]:
    engine = FakeEngine(script)
    stream = PromptStream([problem(f"q{i}") for i in range(10)], seed=0)
    sampler = RolloutClient(engine, judge, tokenizer, cfg, seed=0, engine_status=lambda: "the fake engine")
    return Collector(sampler, stream, cfg), engine


def collect(
    script: Script, tokenizer: object, cfg: RlConfig, judge: Judge = says_right
) -> tuple[StepRollouts, FakeEngine]:
    it, engine = collector(script, tokenizer, cfg, judge)
    return asyncio.run(it.collect()), engine


def test_every_answer_is_a_request_of_its_own_with_a_seed_of_its_own(tokenizer: object) -> None:
    collected, engine = collect(alternating, tokenizer, config())
    assert len(collected.groups) == 4
    assert all(len(g.rollouts) == 4 for g in collected.groups)
    assert [p.num_samples for _, p in engine.requests] == [1] * 16
    assert len({p.seed for _, p in engine.requests}) == 16


def test_an_answer_whose_thinking_the_prompt_opened_is_judged_and_rewarded_as_a_whole() -> None:
    """The model writes `\\n7</think>7`: judge, format reward and record see the tag, the tokens to train do not have it."""
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "assistant\\n<think>\\n")
    judged: list[str] = []

    async def judge(_problem: Problem, response: str) -> Verdict:
        judged.append(response)
        return Verdict(outcome=Outcome.SCORED, score=1.0)

    cfg = config(groups_per_step=1, sampling=SamplingConfig(max_new_tokens=20))
    cfg = cfg.model_copy(update={"reward": RewardConfig()})  # requires both tags
    collected, _ = collect(lambda *_: FakeAnswer(text="7</think>7"), tokenizer, cfg, judge)
    (group,) = collected.groups
    assert {r.completion.text for r in group.rollouts} == set(judged) == {"<think>\n7</think>7"}
    assert {r.reward for r in group.rollouts} == {1.0}
    assert all(r.is_positive for r in group.rollouts)
    assert bytes(group.rollouts[0].completion.token_ids[:-1]) == b"7</think>7"


def test_the_same_seed_asks_the_same(tokenizer: object) -> None:
    (_, a), (_, b) = collect(alternating, tokenizer, config()), collect(alternating, tokenizer, config())
    assert a.requests == b.requests


def test_judging_starts_with_the_first_answer_while_others_are_sampled(tokenizer: object) -> None:
    async def run() -> list[str]:
        judged: list[str] = []
        gate = asyncio.Event()
        seen_first = asyncio.Event()

        def slow_but_one(_prompt: tuple[int, ...], _params: SamplingParams, _index: int) -> FakeAnswer:
            return FakeAnswer(text="right") if not judged_any() else FakeAnswer(text="wrong", after=gate)

        calls = iter(range(100))

        def judged_any() -> bool:
            return next(calls) > 0

        async def judge(_problem: Problem, response: str) -> Verdict:
            judged.append(response)
            seen_first.set()
            return RIGHT

        it, _ = collector(slow_but_one, tokenizer, config(), judge)
        task = asyncio.create_task(it.collect())
        await seen_first.wait()
        early = list(judged)
        gate.set()
        await task
        return early

    assert asyncio.run(run()) == ["right"]


def test_without_refill_a_step_takes_what_one_round_gives(tokenizer: object) -> None:
    collected, _ = collect(lambda *_: FakeAnswer(text="right"), tokenizer, config())
    assert collected.kept == ()
    assert collected.position == 4
    assert collected.reasons.of("group") == {"zero_advantage": 4}


def test_refill_ends_when_the_step_is_full_and_counts_the_surplus(tokenizer: object) -> None:
    collected, _ = collect(alternating, tokenizer, config(max_rounds=5, groups_per_step=3))
    assert len(collected.kept) == 3
    total = Counter(collected.reasons.of("group")).total() + len(collected.kept)
    assert total == len(collected.groups) == collected.position


def test_refill_is_bounded(tokenizer: object) -> None:
    collected, engine = collect(lambda *_: FakeAnswer(text="right"), tokenizer, config(max_rounds=3))
    assert collected.kept == ()
    assert len(engine.requests) == 3 * 4 * 4


def test_surplus_groups_are_given_up_once_enough_are_informative_if_so_set(tokenizer: object) -> None:
    """The first prompts' answers wait for ever, the last come at once: the step is full without the first."""
    never = asyncio.Event()
    positions = iter(range(1000))

    def late(_prompt: tuple[int, ...], _params: SamplingParams, _index: int) -> FakeAnswer:
        at = next(positions)
        return FakeAnswer(text="right" if at % 2 else "wrong", after=never if at < 16 else None)

    collected, engine = collect(late, tokenizer, config(oversample=2.0, surplus="cancel"))
    assert len(engine.requests) == 8 * 4
    assert len(collected.kept) == len(collected.groups) == 4
    assert collected.reasons.of("group") == {"cancelled": 4}
    assert collected.reasons.of("rollout") == {"group_cancelled": 16}
    assert collected.position == 8


def test_oversampling_asks_more_prompts_than_it_trains_on(tokenizer: object) -> None:
    collected, _ = collect(alternating, tokenizer, config(oversample=2.0, groups_per_step=2))
    assert len(collected.groups) == 4
    assert len(collected.kept) <= 2


def test_long_prompts_are_left_out_and_counted(tokenizer: object) -> None:
    collected, engine = collect(alternating, tokenizer, config(max_prompt_tokens=5))
    assert collected.groups == ()
    assert engine.requests == []
    assert collected.reasons.counts == {"group/prompt_too_long": 4}


def test_length_penalty_comes_off_the_reward(tokenizer: object) -> None:
    cfg = config().model_copy(update={"overlong": OverlongConfig(penalty_tokens=4, penalty=0.8)})
    collected, _ = collect(lambda *_: FakeAnswer(text="right!"), tokenizer, cfg)  # 6 bytes and the end: 7 of 8 tokens
    assert {(r.reward, r.is_positive) for g in collected.groups for r in g.rollouts} == {
        (1 - 0.8 * 3 / 4, True)
    }  # and is no format fault
    terms = terms_of(collected.groups[0].rollouts[0], cfg)
    assert terms == {"answer": 1, "format": 0, "custom": 0, "overlong": -0.8 * 3 / 4, "length": 0}


def test_a_right_answer_without_tags_is_rewarded_as_such_and_not_positive(tokenizer: object) -> None:
    cfg = config(sampling=SamplingConfig(max_new_tokens=20)).model_copy(update={"reward": RewardConfig()})
    collected, _ = collect(lambda *_: FakeAnswer(text="right</think>"), tokenizer, cfg)
    assert {(r.verdict.is_correct, r.reward, r.is_positive) for g in collected.groups for r in g.rollouts} == {
        (True, -2.0, False)
    }
    terms = terms_of(collected.groups[0].rollouts[0], cfg)
    assert terms == {"answer": 0, "format": -2.0, "custom": 0, "overlong": 0, "length": 0}


def failing_judge(error: Exception) -> Callable[[Problem, str], object]:
    async def judge(_problem: Problem, _response: str) -> Verdict:
        raise error

    return judge


def test_an_error_of_engine_or_judge_ends_the_step(tokenizer: object) -> None:
    with pytest.raises(ValueError, match="no room"):
        collect(lambda *_: ValueError("no room"), tokenizer, config())
    with pytest.raises(RuntimeError, match="boom"):
        collect(alternating, tokenizer, config(), failing_judge(RuntimeError("boom")))  # type: ignore[arg-type]


def test_a_stall_names_who_waits_for_what(tokenizer: object, tmp_path: Path) -> None:
    async def run(script: Script, judge: Judge, stall_timeout_s: float) -> None:
        cfg = config().model_copy(update={"runtime": RlRuntime(stall_timeout_s=stall_timeout_s)})
        it, _ = collector(script, tokenizer, cfg, judge)
        await it.collect()

    never = asyncio.Event()
    with pytest.raises(TrainingError, match="16 answers from the fake engine, 0 verdicts from the judges"):
        asyncio.run(run(lambda *_: FakeAnswer(text="x", after=never), says_right, 0.05))

    async def silent(_problem: Problem, _response: str) -> Verdict:
        await asyncio.Event().wait()
        return RIGHT

    with pytest.raises(TrainingError, match="0 answers from the fake engine, 16 verdicts from the judges"):
        asyncio.run(run(alternating, silent, 1.0))


def test_unjudged_answers_leave_their_group(tokenizer: object) -> None:
    async def fails_on_wrong(_problem: Problem, response: str) -> Verdict:
        return RIGHT if response == "right" else replace(WRONG, outcome=Outcome.JUDGE_FAILED)

    collected, _ = collect(alternating, tokenizer, config(), fails_on_wrong)
    assert collected.reasons.of("rollout").get("judge_failed", 0) > 0
    assert collected.kept == ()
