"""A run that goes wrong is noticed: shares of bad answers by hand, limits, warnings, and what must not be one."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from rl_builders import RAW_REWARD, Recorder, low_byte_judge, problem, rl_config
from test_rl_loop import run

from klear_core.config.rewards import RewardConfig
from klear_core.config.rl import BadAnswerLimits, RlConfig, RlRuntime
from klear_core.errors import CollapseError
from klear_core.metrics import METRICS_FILE, SILENT, MetricsFile
from klear_core.rl.state import CollapseGuard
from klear_core.rl.step_metrics import describe_answers, ends_in_loop
from klear_core.types import Completion, FinishReason, Outcome, Rollout, RolloutGroup, Verdict

TAGGED = rl_config(reward=RewardConfig())


def group(*texts: str, question: str = "What is 1+2?", finish: FinishReason = "stop") -> RolloutGroup:
    rollouts = [
        Rollout(
            prompt_ids=(1,),
            completion=Completion(
                text=text, token_ids=(1, 2), logps=(0.0, 0.0), finish_reason=finish, policy_versions=(0, 0)
            ),
            verdict=Verdict(outcome=Outcome.SCORED, score=0.0),
            reward=0.0,
            is_positive=False,
        )
        for text in texts
    ]
    return RolloutGroup(problem=problem(question), rollouts=tuple(rollouts))


# ---- answers ----


def test_the_shares_of_four_answers_by_hand() -> None:
    answers = group(
        "<think>1+2</think>3",
        "<think>1+2=3</think>3",  # the same final answer
        "<think>1+2",  # malformed
        "<think>a</think>5<think>b</think> ",  # tags twice, and empty behind the last
    )
    assert describe_answers([answers], TAGGED) == {
        "rl/answers/malformed_frac": 1 / 4,
        "rl/answers/repeated_frac": 0,
        "rl/answers/empty_frac": 1 / 4,
        "rl/answers/extra_tags_frac": 1 / 4,
        "rl/answers/same_frac": 2 / 4,
        "rl/answers/other_script_frac": 0,
    }
    assert describe_answers([], TAGGED) == {}


def test_a_model_that_needs_no_tags_writes_no_malformed_answer() -> None:
    shares = describe_answers([group("3", " \n")], rl_config(reward=RAW_REWARD))
    assert shares["rl/answers/malformed_frac"] == 0
    assert shares["rl/answers/empty_frac"] == 1 / 2


@pytest.mark.parametrize(
    ("question", "text", "share"),
    [
        ("What is x?", "ab да", 2 / 4),
        ("Сколько?", "да ab", 0),  # the question's own, and Latin, which formulas have
        ("What is x?", "α ≤ β, 𝑥 ∈ ℝ, 5 µm", 0),  # noqa: RUF001
        ("2+2=?", "数 ab", 1 / 3),
        ("What is x?", "7 = 7 ✓", 0),  # no letter at all
    ],
)
def test_letters_of_another_writing_system(question: str, text: str, share: float) -> None:
    metrics = describe_answers([group(text, question=question)], TAGGED)
    assert metrics["rl/answers/other_script_frac"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("ids", "is_loop"),
    [
        ([7] * 32, True),
        ([7] * 31, False),
        ([1, 2, 3, *[8, 9] * 16], True),
        ([*range(20)] * 4, True),
        ([*range(20)] * 3, False),  # three times is no loop
        ([*range(64)] * 4, True),
        ([*range(65)] * 9, False),  # a longer piece than is looked for
        ([*[8, 9] * 40, 1], False),  # it got out
        ([], False),
        (list(range(500)), False),
    ],
)
def test_a_loop_is_a_piece_four_times_or_more_at_the_end(ids: Sequence[int], *, is_loop: bool) -> None:
    assert ends_in_loop(ids) is is_loop


def test_the_end_of_the_turn_hides_no_loop_before_it() -> None:
    looped = Completion(
        text="", token_ids=(*[5] * 40, 2), logps=(0.0,) * 41, finish_reason="stop", policy_versions=(0,) * 41
    )
    (base,) = group("").rollouts
    rollout = Rollout(
        prompt_ids=(1,), completion=looped, verdict=base.verdict, reward=0.0, is_positive=False, custom_rewards={}
    )
    metrics = describe_answers([RolloutGroup(problem=problem("q"), rollouts=(rollout,))], TAGGED)
    assert metrics["rl/answers/repeated_frac"] == 1


# ---- run ----

FINE = {
    "rl/answers/malformed_frac": 0.02,
    "rl/answers/repeated_frac": 0.0,
    "rl/answers/empty_frac": 0.0,
    "rl/answers/extra_tags_frac": 0.0,
    "rl/answers/same_frac": 0.1,
    "rl/answers/other_script_frac": 0.0,
    "rl/response/truncated_frac": 0.02,
    "rl/response/mean_tokens": 100.0,
    "rl/entropy/mean": 0.3,
    "rl/pass/rate": 0.4,
    "rl/groups/kept": 8.0,
    "rl/groups/asked": 12.0,
    "rl/grad/norm": 1.0,
}


def watch(
    tmp_path: Path, later: Mapping[str, float], *, start: Mapping[str, float] | None = None, cfg: RlConfig = TAGGED
) -> CollapseGuard:
    """A run of five steps like `start`, then five like `later`."""
    watched = CollapseGuard(cfg, SILENT, tmp_path / METRICS_FILE)
    for step in range(1, 11):
        watched.log({**FINE, **(start or {}), **(later if step > 5 else {})}, step=step)
    return watched


@pytest.mark.parametrize(
    ("metric", "setting"),
    [
        ("rl/answers/malformed_frac", "malformed"),
        ("rl/response/truncated_frac", "truncated"),
        ("rl/answers/repeated_frac", "repeated"),
        ("rl/answers/empty_frac", "empty"),
    ],
)
def test_a_share_that_runs_away_stops_the_stage_and_names_its_setting(
    tmp_path: Path, metric: str, setting: str
) -> None:
    with pytest.raises(CollapseError, match=rf"step 10: 80% .*rl\.runtime\.bad_answers\.{setting} = 0\.5"):
        watch(tmp_path, {metric: 0.8}).check(10)
    lenient = rl_config(runtime=RlRuntime(bad_answers=BadAnswerLimits.model_validate({setting: 1})))
    watch(tmp_path, {metric: 0.8}, cfg=lenient).check(10)


def test_a_model_that_starts_with_bad_answers_is_not_stopped(tmp_path: Path) -> None:
    bad = {"rl/answers/malformed_frac": 0.9, "rl/response/truncated_frac": 0.9}
    watch(tmp_path, {}, start=bad).check(10)
    watch(tmp_path, {"rl/answers/malformed_frac": 1.0}, start=bad).check(10)


def test_nothing_is_said_of_a_run_that_is_well(tmp_path: Path) -> None:
    better = {"rl/pass/rate": 0.95, "rl/entropy/mean": 0.01, "rl/response/mean_tokens": 40.0, "rl/groups/kept": 1.0}
    assert watch(tmp_path, {}).notes() == ()
    assert watch(tmp_path, better).notes() == ()  # solved: it is sure, and short
    longer = {"rl/pass/rate": 0.6, "rl/response/mean_tokens": 300.0}
    assert watch(tmp_path, longer).notes() == ()  # it thinks more, and is right more often


@pytest.mark.parametrize(
    ("later", "said"),
    [
        ({"rl/answers/malformed_frac": 0.3}, "30% .* lack a tag"),
        ({"rl/answers/same_frac": 0.7}, "70% .* one and the same"),
        ({"rl/answers/extra_tags_frac": 0.7}, "70% .* think tag twice"),
        ({"rl/answers/other_script_frac": 0.7}, "70% .* another writing system"),
        ({"rl/groups/kept": 0.0}, "0.0 of 12 groups .* at a pass rate of 0.40"),
        ({"rl/response/mean_tokens": 40.0}, "40 tokens .* collapse of the length"),
        ({"rl/response/mean_tokens": 300.0}, "300 tokens .* is length rewarded"),
        ({"rl/entropy/mean": 0.02}, "entropy is 0.02 .* explores no more"),
        ({"rl/entropy/mean": 2.0, "rl/pass/rate": 0.3}, "entropy is 2 .* lower rl.optim.lr"),
        ({"rl/pass/rate": 0.1, "rl/grad/norm": 9.0}, "from 0.40 to 0.10; the gradient norm is 9"),
    ],
)
def test_each_way_to_die_has_a_warning_with_its_numbers(
    tmp_path: Path, later: Mapping[str, float], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    watched = watch(tmp_path, later)
    assert [note for note in watched.notes() if _matches(said, note)] == list(watched.notes()) != []
    with caplog.at_level(logging.WARNING):
        watched.check(10)
        watched.check(10)
    assert len(caplog.records) == 1  # once


def _matches(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def test_answers_that_are_cut_off_from_the_start_are_another_matter(tmp_path: Path) -> None:
    (note,) = watch(tmp_path, {}, start={"rl/response/truncated_frac": 0.9}).notes()
    assert "end of the turn" in note


def test_a_pass_rate_that_the_fixed_set_does_not_confirm_points_at_the_judge(tmp_path: Path) -> None:
    watched = watch(tmp_path, {"rl/pass/rate": 0.9})
    watched.add({"rl/eval/avg": 0.4}, step=0)
    watched.add({"rl/eval/avg": 0.42}, step=10)
    (note,) = watched.notes()
    assert "hole in the judge" in note
    watched.add({"rl/eval/avg": 0.85}, step=10)
    assert watched.notes() == ()


def test_a_run_that_resumes_remembers_its_first_steps(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / METRICS_FILE)
    for step in range(1, 8):
        file.append(FINE, step=step)
    watched = CollapseGuard(TAGGED, SILENT, file.path)
    for step in range(6, 11):  # the sixth and seventh are repeated after a restart
        watched.log(FINE | {"rl/answers/empty_frac": 0.9}, step=step)
    with pytest.raises(CollapseError, match="step 10"):
        watched.check(10)


def test_steps_after_the_checkpoint_that_a_run_resumes_from_count_for_nothing(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / METRICS_FILE)
    for step in range(1, 16):
        file.append(FINE | ({"rl/answers/empty_frac": 0.9} if step > 10 else {}), step=step)
    CollapseGuard(TAGGED, SILENT, file.path).check(10)


# ---- stage ----


def test_a_stopped_stage_goes_on_from_its_checkpoint_once_the_setting_is_changed(base: Path, tmp_path: Path) -> None:
    """A random model fills its budget of eight tokens; with any limit below that it would be stopped if it had risen."""

    class Rising(Recorder):
        """Writes the metrics file, as a task does."""

        def log(self, metrics: Mapping[str, float], *, step: int) -> None:
            super().log(metrics, step=step)
            file = MetricsFile(tmp_path / METRICS_FILE)
            file.rewind(step)
            # The first five steps of this run were better.
            shares = {"rl/response/truncated_frac": 0.1} if step <= 5 else {}
            file.append(dict(metrics) | shares, step=step)

    cfg = rl_config(num_steps=5)
    run(cfg, base, tmp_path, telemetry=Rising())
    longer = rl_config(num_steps=12)
    with pytest.raises(CollapseError, match=r"bad_answers\.truncated"):
        run(longer, base, tmp_path, telemetry=Rising(), judge=low_byte_judge)
    runtime = longer.runtime.model_copy(update={"bad_answers": BadAnswerLimits(truncated=1)})
    state, telemetry = run(rl_config(num_steps=12, runtime=runtime), base, tmp_path, telemetry=Rising())
    assert (state.step, telemetry.steps) == (12, [11, 12])
    assert any("cut off" in note for note in state.notes)
