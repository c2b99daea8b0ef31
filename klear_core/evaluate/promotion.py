"""Decide whether a model becomes champion, by a rule of several parts that must all be passed.

The new model must be non-inferior to the champion on every benchmark and better on at least one. Asking for all needs
no correction for several tests (an intersection-union test, Berger 1982); asking for one of several does (Holm).
docs/promotion.md explains the parts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from klear_core.artifacts.ledger import StageSummary
from klear_core.config.promote import PromoteConfig
from klear_core.config.settings import result_settings
from klear_core.evaluate.asked_problems import num_other_references
from klear_core.evaluate.decision import (
    DECISION_FILE,
    PROBLEMS_FILE,
    Check,
    Contender,
    Decision,
    RivalIs,
    RuleName,
    SharedProblems,
    short_name,
)
from klear_core.evaluate.gate import Comparison, Evaluation, compare_sampled, read_evaluation
from klear_core.evaluate.intervals import least_half_width
from klear_core.report.compared_runs import different_settings
from klear_core.report.text import p_value, percent, points, range_text
from klear_core.scores import EvalReport

_MAX_NAMED = 4
"""Settings that a sentence names."""
_ROUNDING = 1e-6
"""Points within which the end of an interval is at the margin, so not above it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The model to compare with."""

    contender: Contender
    is_: RivalIs
    evaluation: Path | None
    """Folder of its scores; None if it is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """The model to decide on."""

    contender: Contender
    evaluation: Path
    contaminated: Mapping[str, int | None]
    """Problems that overlap with its training data, by benchmark; None where that is not known."""
    withdrawn: str
    """Why it was rolled back earlier; empty if it was not."""
    chosen_on: Mapping[str, str]
    """Why it is marked as chosen by its score, by benchmark: a gain there does not count."""


def decide(rule: PromoteConfig, candidate: Candidate, rival: Rival | None, *, workdir: Path) -> StageSummary:
    """Write the decision with its evidence to `workdir`."""
    new = read_evaluation(candidate.evaluation)
    old = read_evaluation(rival.evaluation) if rival and rival.evaluation else None
    checks = [_not_rolled_back(candidate.withdrawn)]
    for report in new.reports.values():
        checks += _own_checks(rule, report, candidate.contaminated.get(report.benchmark))
    comparisons: tuple[Comparison, ...] = ()
    if rival is None:
        checks.append(_without_rival(rule))
    else:
        reasons = _comparable(new, old, is_=rival.is_) if old else [_gone(rival)]
        checks += reasons
        is_comparable = all(check.is_passed for check in reasons)
        if old is not None and is_comparable:
            comparisons = compare_sampled(old, new)
            checks += [_non_inferior(rule, c) for c in comparisons]
            checks.append(_better(comparisons, candidate.chosen_on))
    failed = [check for check in checks if not check.is_passed]
    rival_contender = rival.contender if rival else None
    rival_is: RivalIs = rival.is_ if rival else "nobody"
    decision = Decision(
        is_passed=not failed,
        sentence=_sentence(candidate, rival, checks),
        candidate=candidate.contender,
        rival=rival_contender,
        rival_is=rival_is,
        rule=rule,
        checks=tuple(checks),
        comparisons=comparisons,
        shared=tuple(_shared(new, old)),
    )
    _write(decision, new, old, workdir)
    counts = {"promoted": int(decision.is_passed), "checks": len(checks), "failed_checks": len(failed)}
    return StageSummary(counts=counts)


def are_comparable(new: Path, old: Path) -> bool:
    """Return whether two evaluations have the same benchmarks, problems, decoding and judge."""
    checks = _comparable(read_evaluation(new), read_evaluation(old), is_="champion")
    return all(check.is_passed for check in checks)


def _write(decision: Decision, new: Evaluation, old: Evaluation | None, workdir: Path) -> None:
    ids: dict[str, list[str]] = {}
    for shared in decision.shared:
        assert old is not None, "problems are shared with another evaluation"
        # A set of texts has another order in every process, and the same decision must write the same file.
        ids[shared.benchmark] = sorted(new.problem_ids(shared.benchmark) & old.problem_ids(shared.benchmark))
    (workdir / PROBLEMS_FILE).write_text(json.dumps(ids, indent=1) + "\n")
    (workdir / DECISION_FILE).write_text(decision.model_dump_json(indent=2) + "\n")


# ---- the parts of the rule ----


def _not_rolled_back(withdrawn: str) -> Check:
    return Check(rule="not rolled back", is_passed=not withdrawn, text=withdrawn or "this model was never rolled back")


def _own_checks(rule: PromoteConfig, report: EvalReport, num_contaminated: int | None) -> list[Check]:
    """Return the checks of the new model's own answers to one benchmark."""
    num_samples = report.num_problems * report.num_samples
    contaminated = None if num_contaminated is None else num_contaminated / report.num_problems
    shares: list[tuple[RuleName, float | None, float]] = [
        ("contaminated", contaminated, rule.max_contaminated),
        ("truncated", report.truncated_frac, rule.max_truncated),
        ("no answer", report.no_answer_frac, rule.max_no_answer),
        ("judge failed", sum(report.unscored.values()) / num_samples, rule.max_judge_failed),
    ]
    checks = []
    for name, share, limit in shares:
        # what is not known counts as everything
        is_passed = (1.0 if share is None else share) <= limit
        found = "not known" if share is None else percent(share)
        text = f"{found}, at most {percent(limit)} allowed"
        checks.append(Check(rule=name, benchmark=report.benchmark, is_passed=is_passed, text=text))
    return checks


def _without_rival(rule: PromoteConfig) -> Check:
    if rule.first == "any":
        text = 'there is no champion, and promote.first = "any" asks for no comparison'
        return Check(rule="better", is_passed=True, text=text)
    text = (
        "there is no champion, and the run scored no other model to compare with; "
        'promote.first = "any" promotes without a comparison'
    )
    return Check(rule="better", is_passed=False, text=text)


def _gone(rival: Rival) -> Check:
    text = f"the scores of the {rival.is_} ({rival.contender.evaluation}) are gone"
    return Check(rule="comparable", is_passed=False, text=text)


def _comparable(new: Evaluation, old: Evaluation, *, is_: RivalIs) -> list[Check]:
    """Return a check for each reason for which the scores cannot be compared, or one that they can."""
    failed = []
    for name in sorted(new.reports.keys() ^ old.reports.keys()):
        which = "new model" if name in new.reports else is_
        text = f"only the {which} was scored on it"
        failed.append(Check(rule="comparable", benchmark=name, is_passed=False, text=text))
    for name in new.reports:
        if name in old.reports:
            reasons = [
                _other_problems(new, old, name),
                _other_references(new, old, name),
                *_other_settings(new.reports[name], old.reports[name]),
            ]
            failed += [
                Check(rule="comparable", benchmark=name, is_passed=False, text=reason) for reason in reasons if reason
            ]
    if failed:
        return failed
    text = f"same problems, decoding and judge as the {is_}"
    return [Check(rule="comparable", is_passed=True, text=text)]


def _other_problems(new: Evaluation, old: Evaluation, benchmark: str) -> str:
    """Return how the problems differ; empty if they are the same."""
    ours, theirs = new.problem_ids(benchmark), old.problem_ids(benchmark)
    if ours == theirs:
        scored = new.counts.get((benchmark, "sampled"), {}).keys() & old.counts.get((benchmark, "sampled"), {}).keys()
        return "" if scored else "no problem has a judged answer of both models"
    return (
        f"other problems: {len(ours & theirs):,} are shared, {len(ours - theirs):,} are new, "
        f"{len(theirs - ours):,} are gone"
    )


def _other_references(new: Evaluation, old: Evaluation, benchmark: str) -> str:
    """Return how many references differ; empty if none does."""
    num = num_other_references(new.folder, old.folder, benchmark)
    return f"{num:,} of the problems have another reference now" if num else ""


def _other_settings(new: EvalReport, old: EvalReport) -> list[str]:
    """Return how decoding and judge differ; empty if they are the same."""
    reasons = []
    decodings = [result_settings(report.decoding) for report in (old, new)]
    judges = [result_settings(report.judge.settings) for report in (old, new) if report.judge]
    decoding = _differences(decodings)
    if decoding:
        reasons.append(f"decoded otherwise: {decoding}")
    if len(judges) < len(decodings):
        reasons.append("the judge of the scores was not recorded")
    elif _differences(judges):
        reasons.append(f"judged otherwise: {_differences(judges)}")
    return reasons


def _differences(settings: Sequence[Mapping[str, JsonValue]]) -> str:
    """Name the settings that differ with both values: `sampling.temperature 0.6 -> 1.0`."""
    found = [f"{d.key} {' -> '.join(d.values)}" for d in different_settings(settings, absent="none")]
    more = f" and {len(found) - _MAX_NAMED} more" if len(found) > _MAX_NAMED else ""
    return ", ".join(found[:_MAX_NAMED]) + more


def _non_inferior(rule: PromoteConfig, c: Comparison) -> Check:
    """Return whether the interval over other problems excludes a loss of the margin."""
    margin = rule.margins.get(c.benchmark, rule.margin)
    is_passed = 100 * c.new_problems.low > -margin + _ROUNDING
    text = f"{points(c.difference)} points ({range_text(c.new_problems)}); must stay above {points(-margin / 100)}"
    least = 100 * least_half_width(c.num_problems, confidence=c.confidence)
    if not is_passed and least + _ROUNDING >= margin:
        text += (
            f". {c.num_problems} problems never show less than a loss of {least:.1f} points, so that an equal model "
            f"cannot pass: more problems or a larger promote.margins.{c.benchmark} could"
        )
    return Check(rule="non-inferior", benchmark=c.benchmark, is_passed=is_passed, text=text)


def _better(comparisons: Sequence[Comparison], chosen_on: Mapping[str, str]) -> Check:
    """Return whether the sign-flip test, corrected for all benchmarks, shows a gain where the model was not chosen."""
    shown = [c for c in comparisons if c.is_better and c.benchmark not in chosen_on]
    listed = [f"{c.benchmark} {points(c.difference)} points, {p_value(c.p_corrected)}" for c in shown or comparisons]
    corrected = f", corrected for {len(comparisons)} benchmarks" if len(comparisons) > 1 else ""
    what = "a gain is shown on" if shown else "no gain is shown:"
    text = f"{what} {'; '.join(listed)}{corrected}"
    for benchmark, reason in chosen_on.items():
        text += f". A gain on {benchmark} does not count: {reason}"
    return Check(rule="better", is_passed=bool(shown), text=text)


def _shared(new: Evaluation, old: Evaluation | None) -> list[SharedProblems]:
    if old is None:
        return []
    found = []
    for name in new.reports:
        if name in old.reports:
            ours, theirs = new.problem_ids(name), old.problem_ids(name)
            shared = SharedProblems(
                benchmark=name,
                num_shared=len(ours & theirs),
                num_only_new=len(ours - theirs),
                num_only_old=len(theirs - ours),
            )
            found.append(shared)
    return found


def _sentence(candidate: Candidate, rival: Rival | None, checks: Sequence[Check]) -> str:
    against = "without a comparison"
    if rival is not None:
        version = f", version {rival.contender.version}" if rival.contender.version else ""
        against = f"against the {rival.is_} ({short_name(rival.contender.model)}{version})"
    failed = [check for check in checks if not check.is_passed]
    who = short_name(candidate.contender.model)
    if not failed:
        return f"{who} becomes champion: it passes all {len(checks)} checks {against}"
    names = dict.fromkeys(check.name for check in failed)
    return (
        f"{who} does not become champion: it fails {len(failed)} of {len(checks)} checks {against}: {', '.join(names)}"
    )
