"""The rule by which a model becomes champion, part by part, on answers that nobody sampled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from evaluate_fakes import RIGHT, SILENT, UNJUDGED, WRONG, make_problem, make_sample
from manifests import manifest
from stored_evaluations import evaluation, sample

from klear_core.artifacts.manifest import InputRecord, write_manifest
from klear_core.artifacts.records import read_shard, write_shard
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.pipeline import PromoteConfig
from klear_core.config.verify import MathConfig, VerifyConfig
from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.paired import FlippedAnswer
from klear_core.evaluate.compare.promotion import (
    FLIPPED_FILE,
    Candidate,
    Contender,
    Decision,
    Rival,
    are_comparable,
    decide,
    read_decision,
)
from klear_core.evaluate.counts import tally
from klear_core.evaluate.score import make_report
from klear_core.scores import JudgeRecord, write_reports
from klear_core.types import Verdict

JUDGE = JudgeRecord(settings=VerifyConfig(), cpu="a", num_cores=2, math_workers=2, code_workers=2)
HARD, EASY = (WRONG, WRONG), (RIGHT, RIGHT)
RULE = PromoteConfig(margin=5)


def scored(
    folder: Path,
    cfg: EvaluateConfig | None = None,
    judge: JudgeRecord | None = JUDGE,
    start: int = 0,
    apart: bool = False,
    **pairs: list[tuple[Verdict, ...]],
) -> Path:
    """Write an evaluation with these verdicts of each problem's samples, by benchmark; problems count from `start`.

    All benchmarks have the same problems, or with `apart` each has its own.
    """
    cfg = cfg or EvaluateConfig()
    samples, reports = [], []
    for benchmark, verdicts in pairs.items():
        own = []
        for i, pair in enumerate(verdicts, start=start):
            for j, verdict in enumerate(pair):
                cut = "length" if verdict is SILENT else "stop"
                own.append(make_sample(i, j, verdict, benchmark=benchmark, finish_reason=cut))
        problems = [make_problem(i) for i in range(start, start + len(verdicts))]
        reports.append(make_report(tally(own, problems), cfg, benchmark=benchmark, num_samples=2, seed=0, judge=judge))
        samples += own
        start += len(verdicts) if apart else 0
    write_shard(folder / "samples" / "a.parquet", samples)
    write_reports(folder, tuple(reports))
    asked = InputRecord(role="benchmarks", kind="benchmarks", fingerprint="b" * 20)
    write_manifest(folder, manifest("evaluate", inputs=(asked,)))
    return folder


def decided(
    tmp_path: Path,
    new: Path,
    old: Path | None,
    rule: PromoteConfig = RULE,
    withdrawn: str = "",
    chosen_on=(),
    **contaminated,
) -> Decision:
    names = [*read_benchmarks(new)]
    candidate = Candidate(
        contender=Contender(model="rl/new", evaluation="evaluate/new", run="r2"),
        evaluation=new,
        contaminated=dict.fromkeys(names, 0) | contaminated,
        withdrawn=withdrawn,
        chosen_on=dict.fromkeys(chosen_on, "best of 12"),
    )
    champion = Contender(model="rl/old", evaluation="evaluate/old", run="r1", version=1)
    rival = Rival(contender=champion, is_="champion", evaluation=old) if old else None
    summary = decide(rule, candidate, rival, workdir=tmp_path)
    decision = read_decision(tmp_path)
    assert summary.counts["promoted"] == decision.is_passed
    return decision


def test_the_decision_has_every_answer_that_is_right_of_one_model_alone(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[(RIGHT, WRONG), (WRONG, WRONG), (RIGHT, UNJUDGED)])
    new = scored(tmp_path / "new", a=[(RIGHT, RIGHT), (WRONG, RIGHT), (WRONG, RIGHT)])
    decided(tmp_path, new, old)
    flipped = read_shard(tmp_path / FLIPPED_FILE, FlippedAnswer)
    assert [(f.after.problem_id, f.after.sample_idx, f.after.verdict.is_correct) for f in flipped] == [
        (make_problem(0).problem_id, 1, True), (make_problem(1).problem_id, 1, True), (make_problem(2).problem_id, 0, False),
    ]  # fmt: skip
    assert all(f.before.verdict.is_correct != f.after.verdict.is_correct for f in flipped)


def read_benchmarks(folder: Path) -> list[str]:
    return [report["benchmark"] for report in json.loads((folder / "report.json").read_text())]


def failed(decision: Decision) -> list[tuple[str, str]]:
    return [(check.rule, check.benchmark) for check in decision.checks if not check.is_passed]


def test_a_model_that_is_better_on_one_benchmark_and_as_good_on_the_other_passes(tmp_path: Path) -> None:
    """Ten of 100 problems gained: p = 2 / 2^10 twice. On the other nothing changes: the floor is 2 points, below 5."""
    old = scored(tmp_path / "old", a=[EASY] * 50 + [HARD] * 50, b=[EASY] * 100)
    new = scored(tmp_path / "new", a=[EASY] * 60 + [HARD] * 40, b=[EASY] * 100)
    decision = decided(tmp_path, new, old)
    assert failed(decision) == []
    assert decision.is_passed
    gain, same = decision.comparisons
    assert (gain.difference, gain.p, gain.p_corrected) == (pytest.approx(0.1), 2 / 2**10, 4 / 2**10)
    assert (same.difference, same.new_problems.low, same.p) == (0, pytest.approx(-0.02), 1)
    assert [(s.benchmark, s.num_shared) for s in decision.shared] == [("a", 100), ("b", 100)]
    assert json.loads((tmp_path / "problems.json").read_text())["b"][0] == "p000"
    assert (
        decision.sentence == "rl new becomes champion: it passes all 13 checks against the champion (rl old, version 1)"
    )


def test_an_equal_model_does_not_take_the_champions_place(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[EASY] * 50 + [HARD] * 50)
    assert failed(decided(tmp_path, old, old)) == [("better", "")]


def test_a_gain_on_one_benchmark_does_not_pay_for_a_loss_on_another(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[HARD] * 100, b=[EASY] * 100)
    new = scored(tmp_path / "new", a=[EASY] * 100, b=[EASY] * 90 + [HARD] * 10)
    assert failed(decided(tmp_path, new, old)) == [("non-inferior", "b")]
    # unless the whole interval of the loss is within what is allowed there
    low = decided(tmp_path, new, old).comparisons[1].new_problems.low
    assert failed(decided(tmp_path, new, old, RULE.model_copy(update={"margins": {"b": -100 * low + 0.1}}))) == []
    assert failed(decided(tmp_path, new, old, RULE.model_copy(update={"margins": {"b": -100 * low - 0.1}}))) != []


def test_the_p_value_is_corrected_for_all_benchmarks(tmp_path: Path) -> None:
    """Six of six problems changed: p = 2 / 2^6 = 0.031 is a gain on one benchmark, and none on one of two."""
    rule = PromoteConfig(margin=100)
    old, new = [HARD] * 6 + [EASY] * 20, [EASY] * 26
    alone = scored(tmp_path / "a", a=old), scored(tmp_path / "b", a=new)
    assert failed(decided(tmp_path, alone[1], alone[0], rule)) == []
    two = scored(tmp_path / "c", a=old, b=new), scored(tmp_path / "d", a=new, b=new)
    assert failed(decided(tmp_path, two[1], two[0], rule)) == [("better", "")]


@pytest.mark.parametrize("apart", [True, False])
def test_a_gain_that_no_benchmark_shows_may_be_shown_by_all_together(tmp_path: Path, apart: bool) -> None:
    """Five of 40 problems gained on each: p = 2 / 2^5. Together p is 2 / 2^10, twice; the same problems count once."""
    rule = PromoteConfig(margin=5)
    before, after = [EASY] * 30 + [HARD] * 10, [EASY] * 35 + [HARD] * 5
    old = scored(tmp_path / "old", apart=apart, a=before, b=before)
    decision = decided(tmp_path, scored(tmp_path / "new", apart=apart, a=after, b=after), old, rule)
    assert decision.is_passed == apart
    text = decision.checks[-1].text
    assert ("a gain is shown on all together +12.5 points, p = 0.0039" in text) == apart


def test_few_problems_cannot_show_that_an_equal_model_is_as_good(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[HARD] * 100, aime=[EASY] * 30)
    new = scored(tmp_path / "new", a=[EASY] * 100, aime=[EASY] * 30)
    decision = decided(tmp_path, new, old)
    assert failed(decision) == [("non-inferior", "aime")]
    text = next(check.text for check in decision.checks if not check.is_passed)
    assert "30 problems never show less than a loss of 6.7 points" in text


@pytest.mark.parametrize(("margin", "is_passed"), [(4.9, False), (5.0, False), (5.1, True)])
def test_an_interval_that_ends_at_the_margin_is_not_above_it(tmp_path: Path, margin: float, is_passed: bool) -> None:
    """An equal model on 40 problems: the interval ends at 2 of 40, a loss of 5 points."""
    old = scored(tmp_path / "old", a=[HARD] * 100, few=[EASY] * 40)
    new = scored(tmp_path / "new", a=[EASY] * 100, few=[EASY] * 40)
    decision = decided(tmp_path, new, old, PromoteConfig(margin=margin))
    assert decision.is_passed == is_passed
    text = next(check.text for check in decision.checks if check.name == "non-inferior on few")
    assert ("40 problems never show less than a loss of 5.0 points" in text) == (not is_passed)


@pytest.mark.parametrize(("confidence", "least"), [(0.9, 4.2), (0.99, 6.6)])
def test_the_least_loss_that_few_problems_show_is_that_of_the_level(
    tmp_path: Path, confidence: float, least: float
) -> None:
    """z is 1.645 at 90 % and 2.576 at 99 %: 2 of 40 problems times z / 1.96."""
    cfg = EvaluateConfig(confidence=confidence)
    old = scored(tmp_path / "old", cfg, a=[HARD] * 200, few=[EASY] * 40)
    new = scored(tmp_path / "new", cfg, a=[EASY] * 200, few=[EASY] * 40)
    assert failed(decided(tmp_path, new, old, PromoteConfig(margin=least + 0.1))) == []
    decision = decided(tmp_path, new, old, PromoteConfig(margin=least - 0.1))
    text = next(check.text for check in decision.checks if check.name == "non-inferior on few")
    assert f"40 problems never show less than a loss of {least} points" in text


@pytest.mark.parametrize(
    ("verdict", "rule", "num_in_limit"),
    [(SILENT, "truncated", 10), (SILENT, "no answer", 10), (UNJUDGED, "judge failed", 1)],
)
def test_failures_up_to_their_limit_pass(tmp_path: Path, verdict: Verdict, rule: str, num_in_limit: int) -> None:
    """Limits are shares of all samples: 10 of 100 may be cut off or without an answer, 1 of 100 not judged."""
    old = scored(tmp_path / "old", a=[HARD] * 50)
    for num, is_passed in ((num_in_limit, True), (num_in_limit + 1, False)):
        pairs = [(RIGHT, verdict)] * num + [EASY] * (50 - num)
        decision = decided(tmp_path, scored(tmp_path / f"new{num}", a=pairs), old)
        assert ((rule, "a") not in failed(decision)) is is_passed


def test_contaminated_problems_and_unknown_data_refuse_a_model(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[HARD] * 50)
    new = scored(tmp_path / "new", a=[EASY] * 50)
    assert failed(decided(tmp_path, new, old, a=1)) == [("contaminated", "a")]
    assert failed(decided(tmp_path, new, old, a=None)) == [("contaminated", "a")]
    assert failed(decided(tmp_path, new, old, PromoteConfig(margin=5, max_contaminated=0.02), a=1)) == []
    assert failed(decided(tmp_path, new, old, PromoteConfig(margin=5, max_contaminated=1), a=None)) == []


def test_a_model_that_was_rolled_back_is_not_promoted_again(tmp_path: Path) -> None:
    old, new = scored(tmp_path / "old", a=[HARD] * 50), scored(tmp_path / "new", a=[EASY] * 50)
    decision = decided(tmp_path, new, old, withdrawn="rolled back to version 1 by ann: rude")
    assert failed(decision) == [("not rolled back", "")]
    assert "rude" in decision.checks[0].text


def test_a_gain_on_a_benchmark_that_the_model_was_chosen_on_does_not_count(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[HARD] * 50, b=[HARD] * 50)
    new = scored(tmp_path / "new", a=[EASY] * 50, b=[EASY] * 50)
    assert failed(decided(tmp_path, new, old, chosen_on=["a"])) == []  # there is another gain
    decision = decided(tmp_path, new, old, chosen_on=["a", "b"])
    assert failed(decision) == [("better", "")]
    assert "A gain on b does not count: best of 12" in decision.checks[-1].text


def test_scores_that_do_not_compare_are_refused_by_name(tmp_path: Path) -> None:
    pairs = [EASY] * 50
    old = scored(tmp_path / "old", a=[HARD] * 50)
    warm = EvaluateConfig(sampling=EvaluateSamplingConfig(temperature=0.9))
    strict = JUDGE.model_copy(update={"settings": VerifyConfig(math=MathConfig(box="required"))})
    cases = {
        "other problems: 40 are shared, 10 are new, 10 are gone": scored(tmp_path / "1", start=10, a=pairs),
        "decoded otherwise: sampling.temperature 0.6 -> 0.9": scored(tmp_path / "2", warm, a=pairs),
        'judged otherwise: math.box "optional" -> "required"': scored(tmp_path / "3", judge=strict, a=pairs),
        "the judge of the scores was not recorded": scored(tmp_path / "4", judge=None, a=pairs),
        "only the new model was scored on it": scored(tmp_path / "5", a=pairs, b=pairs),
    }
    for reason, new in cases.items():
        decision = decided(tmp_path, new, old)
        assert [check.text for check in decision.checks if not check.is_passed] == [reason]
        assert decision.comparisons == ()
    gone = Rival(
        contender=Contender(model="rl/old", evaluation="evaluate/old", run="r1", version=1),
        is_="champion",
        evaluation=None,
    )
    candidate = Candidate(
        contender=Contender(model="rl/new", evaluation="evaluate/new", run="r2"),
        evaluation=old,
        contaminated={"a": 0},
        withdrawn="",
        chosen_on={},
    )
    decide(RULE, candidate, gone, workdir=tmp_path)
    assert failed(read_decision(tmp_path)) == [("comparable", "")]


def test_a_benchmark_whose_references_were_corrected_is_another_one(tmp_path: Path) -> None:
    """The questions and their ids are the same, but an answer that was wrong for the champion may be right now."""
    wrong = [sample(i, 0, "", WRONG) for i in range(40)]
    right = [sample(i, 0, "", RIGHT) for i in range(40)]
    old = evaluation(tmp_path, wrong, seed=1, judged=True)
    same = evaluation(tmp_path, right, seed=2, judged=True)
    other = evaluation(tmp_path, right, seed=3, judged=True, corrected={3: "30", 7: "70"})
    rule = PromoteConfig(margin=10)
    assert failed(decided(tmp_path, same.path, old.path, rule)) == []
    decision = decided(tmp_path, other.path, old.path, rule)
    assert [check.text for check in decision.checks if not check.is_passed] == [
        "2 of the problems have another reference now"
    ]
    assert not are_comparable(other.path, old.path)


def test_another_machine_or_number_of_samples_is_no_reason_against_a_comparison(tmp_path: Path) -> None:
    elsewhere = JUDGE.model_copy(update={"cpu": "b", "num_cores": 64})
    old, new = scored(tmp_path / "old", a=[HARD] * 50), scored(tmp_path / "new", judge=elsewhere, a=[EASY] * 50)
    assert failed(decided(tmp_path, new, old)) == []


def test_two_models_of_one_server_are_compared_and_another_temperature_is_not(tmp_path: Path) -> None:
    """The name of a served model says which it is; the address and its price are no decoding either."""

    def served(model: str, port: int, temperature: float = 0.6) -> EvaluateConfig:
        engine = {"kind": "served", "model": model, "base_url": f"http://127.0.0.1:{port}/v1"}
        return EvaluateConfig.model_validate({"engine": engine, "sampling": {"temperature": temperature}})

    old = scored(tmp_path / "old", served("teacher-7b", 8000), a=[HARD] * 50)
    new = scored(tmp_path / "new", served("teacher-32b", 8001), a=[EASY] * 50)
    warm = scored(tmp_path / "warm", served("teacher-32b", 8001, 0.9), a=[EASY] * 50)
    decision = decided(tmp_path, new, old)
    assert failed(decision) == []
    assert [c.is_same_decoding for c in decision.comparisons] == [True]
    assert not are_comparable(warm, old)


def test_without_a_champion_and_without_another_model_the_rule_must_say_that_any_will_do(tmp_path: Path) -> None:
    new = scored(tmp_path / "new", a=[EASY] * 50)
    assert failed(decided(tmp_path, new, None)) == [("better", "")]
    decision = decided(tmp_path, new, None, PromoteConfig(first="any"))
    assert (decision.is_passed, decision.rival, decision.rival_is) == (True, None, "nobody")


def test_a_gain_that_a_few_lost_problems_could_undo_is_inconclusive(tmp_path: Path) -> None:
    """Six of 30 problems gain a quarter, 5 points in all: the test sees it, but 2 of 30 lost ones may not be drawn."""
    mostly, always = (RIGHT, RIGHT, RIGHT, WRONG), (RIGHT,) * 4
    old = scored(tmp_path / "old", a=[always] * 20 + [mostly] * 10)
    new = scored(tmp_path / "new", a=[always] * 26 + [mostly] * 4)
    decision = decided(tmp_path, new, old, PromoteConfig(margin=8))
    (comparison,) = decision.comparisons
    assert comparison.corrected is not None
    assert (comparison.p_corrected, comparison.is_better) == (2 / 2**6, True)
    assert comparison.corrected.low < 0 < comparison.difference  # the floor alone is 6.7 points
    assert failed(decision) == [("better", "")]
    assert decision.is_inconclusive
    assert "inconclusive, 1 of 8 checks" in decision.sentence


def test_a_loss_that_is_shown_is_no_question_of_more_problems(tmp_path: Path) -> None:
    old = scored(tmp_path / "old", a=[EASY] * 100)
    new = scored(tmp_path / "new", a=[EASY] * 60 + [HARD] * 40)
    decision = decided(tmp_path, new, old)
    assert failed(decision) == [("non-inferior", "a"), ("better", "")]
    assert not decision.is_inconclusive


def test_losses_within_the_margin_do_not_add_up_over_champions(tmp_path: Path) -> None:
    """Each step loses 4 points on b, within the margin, and gains on a; the second is held against the first champion."""
    gains = [[EASY] * num + [HARD] * (200 - num) for num in (100, 130, 160)]
    losses = [[EASY] * num + [HARD] * (200 - num) for num in (200, 192, 184)]
    folders = [scored(tmp_path / str(i), a=a, b=b) for i, (a, b) in enumerate(zip(gains, losses, strict=True))]
    rule = PromoteConfig(margin=8)
    assert decided(tmp_path, folders[2], folders[1], rule).is_passed
    first = Contender(model="rl/first", evaluation="evaluate/first", run="r0", version=1)
    candidate = Candidate(
        contender=Contender(model="rl/new", evaluation="evaluate/new", run="r2"),
        evaluation=folders[2],
        contaminated={"a": 0, "b": 0},
        withdrawn="",
        chosen_on={},
    )
    rival = Rival(contender=first, is_="champion", evaluation=folders[1])
    best = Rival(contender=first, is_="best champion", evaluation=folders[0])
    decide(rule, candidate, rival, best=best, workdir=tmp_path)
    decision = read_decision(tmp_path)
    assert failed(decision) == [("no worse than the best champion", "")]
    elsewhere = Rival(contender=first, is_="best champion", evaluation=None)
    decide(rule, candidate, rival, best=elsewhere, workdir=tmp_path)
    assert read_decision(tmp_path).is_passed
    assert "is left out, for it cannot be compared" in read_decision(tmp_path).checks[-1].text


def test_a_damaged_decision_is_named(tmp_path: Path) -> None:
    (tmp_path / "decision.json").write_text("{}")
    with pytest.raises(ArtifactError, match="not a decision"):
        read_decision(tmp_path)
