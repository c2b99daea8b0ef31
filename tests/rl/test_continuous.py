"""Rollouts without rounds, on a virtual clock: engines stay busy, nothing is too old, and nothing is lost or used twice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rl_builders import low_byte_judge, problem, rl_config
from virtual_clock import run_virtually

from klear_core.config.rl import CurriculumConfig, RlConfig
from klear_core.errors import TrainingError
from klear_core.generate.engine import SamplingParams
from klear_core.rl.continuous import ContinuousRollouts
from klear_core.rl.groups import to_samples
from klear_core.rl.interfaces import RlSetup
from klear_core.rl.loop import stream_of
from klear_core.rl.rollout import RolloutClient, StallWatch, StepRollouts
from klear_core.rl.state import RlState
from klear_core.rl.stream import PromptStream
from klear_core.types import Completion, Judge

PROBLEMS = [problem(f"q{i}") for i in range(1000)]


class Tokenizer:
    """Every prompt is its question's bytes."""

    def apply_chat_template(self, messages, **_settings):
        return messages[-1]["content"]

    def encode(self, text, **_settings):
        return list(text.encode())


class SlowEngine:
    """Answers after a time that the request's seed decides; half of the tokens have the version at the end."""

    def __init__(self, *, mean_s: float = 10.0, tail: float = 1.0, version: int = 0) -> None:
        self.version = version
        self.prompts: list[str] = []
        self.num_open = 0
        self.open_over_time: list[int] = []
        self._mean_s, self._tail = mean_s, tail

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        self.prompts.append(bytes(prompt_ids).decode())
        self.num_open += 1
        self.open_over_time.append(self.num_open)
        first, rng = self.version, random.Random(params.seed)
        try:
            await asyncio.sleep(self._mean_s * rng.lognormvariate(0, self._tail))
        finally:
            self.num_open -= 1
        text = rng.choice("Aa") + "b"
        return [
            Completion(
                text=text,
                token_ids=(1, 2),
                logps=(-1.0, -1.0),
                finish_reason="stop",
                policy_versions=(first, self.version),
            )
        ]

    async def close(self) -> None: ...


@dataclass
class Run:
    """What a run of several steps did."""

    engine: SlowEngine
    steps: list[StepRollouts] = field(default_factory=list)
    state: RlState = field(default_factory=RlState)
    staleness: list[int] = field(default_factory=list)

    @property
    def trained(self) -> list[str]:
        return [group.problem.problem_id for step in self.steps for group in step.kept]


def config(bound: int = 2, num_steps: int = 6, requests: int = 16, **rollout: object) -> RlConfig:
    given_ = {"mode": "continuous", "groups_per_step": 4, "samples_per_group": 4, "max_rounds": 100}
    runtime = {"device": "cpu", "num_rollout_actors": 1, "requests_per_actor": requests, "stall_timeout_s": 1e6}
    return rl_config(max_staleness=bound, num_steps=num_steps, rollout=given_ | rollout, runtime=runtime)


async def drive(
    cfg: RlConfig,
    engine: SlowEngine,
    *,
    learn_s: float = 5.0,
    until: int | None = None,
    state: RlState | None = None,
    judge: Judge = low_byte_judge,
) -> Run:
    """Take steps as the RL loop does, up to step `until`, from a saved state or the beginning."""
    run = Run(engine, state=state or RlState())
    engine.version = run.state.step
    stream = stream_of(RlSetup(cfg=cfg, model=Path(), seed=0, workdir=Path()), PROBLEMS, {}, run.state)
    sampler = RolloutClient(engine, judge, Tokenizer(), cfg, seed=0, engine_status=lambda: "the slow engine")
    rollouts = ContinuousRollouts(sampler, stream, cfg, step=run.state.step, again=run.state.unfinished)
    async with rollouts as ahead:
        for step in range(run.state.step, until or cfg.num_steps):
            found = await ahead.next()
            selection = to_samples(found.kept, cfg, oldest_allowed=step - cfg.max_staleness)
            run.steps.append(found)
            run.staleness += [step - row.oldest_version for row in selection.samples]
            await asyncio.sleep(learn_s)
            engine.version = step + 1
            ahead.advance()
            found.reasons.add(selection.reasons)
            run.state.add_step(
                {"rl/optim/updates": 1, "rl/optim/skipped": 0},
                found.reasons,
                position=found.position,
                sampled_tokens=0,
                unfinished=found.unfinished,
                curriculum=found.curriculum,
            )
    assert engine.num_open == 0  # nothing runs on when the context is closed
    return run


def run(cfg: RlConfig, *, learn_s: float = 5.0, **engine: float) -> Run:
    return run_virtually(drive(cfg, SlowEngine(**engine), learn_s=learn_s))


@settings(max_examples=25)
@given(
    bound=st.integers(1, 4),
    learn_s=st.sampled_from([0.1, 5.0, 60.0]),
    tail=st.floats(0, 2),
    requests=st.integers(1, 99),
)
def test_no_answer_is_ever_too_old_and_the_books_add_up(bound, learn_s, tail, requests):
    done = run(config(bound, requests=requests), learn_s=learn_s, tail=tail)
    assert max(done.staleness, default=0) <= bound
    groups, answers = done.state.reasons.of("group"), done.state.reasons.of("rollout")
    assert "stale" not in answers
    assert sum(answers.values()) == 4 * sum(groups.values())
    assert sum(groups.values()) == done.state.position == len(set(done.engine.prompts))
    assert len(done.engine.prompts) == 4 * done.state.position
    assert len(done.trained) == len(set(done.trained)) == groups["trained"]
    assert all(len(step.kept) == 4 for step in done.steps)


def test_requests_in_flight_stay_at_the_set_number():
    done = run(config(bound=4, num_steps=20, requests=16), learn_s=1.0)
    assert max(done.engine.open_over_time) == 16
    # Each time a request comes in, at most a group is missing; the last groups of all wait for nothing new.
    assert min(done.engine.open_over_time[16:-24]) > 16 - 4


def test_a_slow_answer_delays_no_step_before_its_deadline():
    """One answer of the first group takes 35 s, all others 1 s, a step of the learner 10 s: its deadline is the third step."""

    class OneSlow(SlowEngine):
        async def generate(self, prompt_ids, params):
            self._mean_s = 35.0 if not self.prompts else 1.0
            return await super().generate(prompt_ids, params)

    done = run_virtually(drive(config(bound=2, num_steps=4, requests=16), OneSlow(tail=0), learn_s=10.0))
    first = PromptStream(PROBLEMS, seed=0).at(0).problem.problem_id
    at = [first in {g.problem.problem_id for g in step.groups} for step in done.steps]
    assert at == [False, False, True, False]
    waited = [step.seconds for step in done.steps]
    assert waited[1] <= 11
    assert waited[2] == pytest.approx(35 - 12, abs=1)  # from the step before to the end of the slow answer


def test_a_step_takes_the_oldest_finished_groups():
    done = run(config(bound=4, num_steps=8, requests=64), learn_s=50.0, tail=0.0)
    versions = [min(r.completion.policy_versions) for step in done.steps for g in step.kept for r in g.rollouts]
    assert versions == sorted(versions)


@pytest.mark.parametrize("until", [1, 3, 5])
def test_a_resumed_run_asks_what_was_in_flight_again_and_trains_nothing_twice(until):
    cfg = config(bound=3, num_steps=8, requests=24)
    before = run_virtually(drive(cfg, SlowEngine(), until=until))
    saved = RlState.of(before.state.counters())
    assert saved == before.state
    assert saved.unfinished
    after = run_virtually(drive(cfg, SlowEngine(), state=saved))
    first_asked = {stream_id(position) for position in before.state.unfinished[:6]}
    assert set(after.engine.prompts[:24]) == first_asked
    trained = before.trained + after.trained
    assert len(trained) == len(set(trained)) == 8 * 4
    assert max(after.staleness) <= 3
    # Every prompt up to the last has one fate: none was forgotten between the two.
    groups = saved.reasons.of("group")
    assert sum(groups.values()) == saved.position


def test_a_resumed_curriculum_asks_the_same_problems_again():
    cfg = config(bound=3, num_steps=8, requests=24).model_copy(update={"curriculum": CurriculumConfig()})
    before = run_virtually(drive(cfg, SlowEngine(), until=3))
    saved = RlState.of(before.state.counters())
    assert saved == before.state
    unfinished, drawn = saved.unfinished, saved.curriculum.drawn
    assert set(drawn) == set(unfinished)
    num_seen = len(saved.curriculum.seen)
    after = run_virtually(drive(cfg, SlowEngine(), state=saved))
    assert set(after.engine.prompts[:24]) == {drawn[position] for position in unfinished[:6]}
    counts = after.state.reasons
    assert sum(counts.of("pool").values()) == sum(counts.of("group").values()) == after.state.position
    assert len(after.state.curriculum.seen) > num_seen > 0
    assert after.state.curriculum.drawn == {}


def stream_id(position: int) -> str:
    return PromptStream(PROBLEMS, seed=0).at(position).problem.problem_id


def test_steps_go_on_with_fewer_groups_after_max_rounds_of_prompts():
    """Every answer is wrong, so no group is informative: each of 6 steps gives up after 2 rounds of 4 prompts."""

    async def all_wrong(asked, response):
        return await low_byte_judge(asked, "z")

    done = run_virtually(drive(config(max_rounds=2), SlowEngine(), judge=all_wrong))
    assert done.trained == []
    assert done.state.reasons.of("group")["zero_advantage"] >= 6 * 8
    assert sum(done.state.reasons.of("group").values()) == done.state.position


def test_prompts_that_are_too_long_end_in_the_books_and_not_in_a_loop():
    done = run(config(max_rounds=2, max_prompt_tokens=1))
    assert done.engine.prompts == []
    assert Counter(done.state.reasons.of("group")) == {"prompt_too_long": 6 * 8}


def test_groups_for_which_no_step_is_left_end_in_the_books():
    """After one round of prompts a step goes on with fewer groups; so more are left than the last step has room for."""

    async def two_thirds_are_too_hard(asked, response):
        return await low_byte_judge(asked, "z" if int(asked.problem_id[1:]) % 3 else response)

    cfg = config(bound=2, num_steps=3, requests=99, max_rounds=1)
    done = run_virtually(drive(cfg, SlowEngine(), judge=two_thirds_are_too_hard))
    groups, answers = done.state.reasons.of("group"), done.state.reasons.of("rollout")
    assert [len(step.kept) for step in done.steps] == [2, 2, 4]
    assert groups["surplus"] == 1
    assert answers["group_surplus"] == 4
    assert sum(groups.values()) == done.state.position
    assert sum(answers.values()) == 4 * sum(groups.values())
    assert done.state.unfinished == ()


def test_an_error_of_one_answer_is_raised_by_the_next_step():
    async def broken(_asked, _response):
        raise RuntimeError("the judge broke")

    with pytest.raises(RuntimeError, match="the judge broke"):
        run_virtually(drive(config(), SlowEngine(), judge=broken))


def test_a_stall_is_an_error_that_says_what_is_pending():
    cfg = config().model_copy(update={"runtime": config().runtime.model_copy(update={"stall_timeout_s": 60.0})})
    with pytest.raises(TrainingError, match=r"16 answers from the slow engine, 0 verdicts"):
        run_virtually(drive(cfg, SlowEngine(mean_s=1e9, tail=0)))


def test_a_pause_after_many_answers_is_no_silence(caplog: pytest.LogCaptureFixture):
    """A check is made where a wait times out: the first one after 90 s of answers sees those, and 15 s of quiet."""

    class Busy:
        num_finished_requests, stall_timeout_s = 0, 1e6

        def pending(self) -> str:
            return "the engine"

    async def watched() -> None:
        watch = StallWatch(busy := Busy())
        await asyncio.sleep(90)
        busy.num_finished_requests = 40
        await asyncio.sleep(15)
        watch.check()
        assert caplog.messages == []
        await asyncio.sleep(60)
        watch.check()

    run_virtually(watched())
    assert caplog.messages == ["nothing has happened for 60 s: waiting for the engine"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_staleness": 0, "rollout": {"mode": "continuous"}}, "max_staleness to 1 or more"),
        ({"max_staleness": 1, "rollout": {"mode": "continuous", "surplus": "cancel"}}, "leave surplus out"),
    ],
)
def test_continuous_settings_that_contradict_each_other_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        RlConfig.model_validate(changes)
