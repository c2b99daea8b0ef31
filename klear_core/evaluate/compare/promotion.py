"""Decide whether a model becomes champion, by a rule of several parts that must all be passed.

The new model must be non-inferior to the champion, and to the best champion before it, on every benchmark, and better
than the champion on at least one, or on the problems of all together. Asking for all needs no correction for several
tests (an intersection-union test, Berger 1982); asking for one of several does. "Better" needs both the sign-flip test
(Holm), which holds for models that are exchangeable on every problem, and the interval over other problems
(Bonferroni), which holds for rare large losses. docs/promotion.md explains the parts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from klear_core.artifacts.manifest import MANIFEST, InputRecord, StageSummary, read_manifest
from klear_core.artifacts.records import read_shards, write_shard
from klear_core.artifacts.remote_paths import store_of
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.pipeline import PromoteConfig
from klear_core.config.settings import Settings, different_settings, result_settings
from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.paired import (
    Evaluation,
    PairedComparison,
    compare_sampled,
    compare_together,
    flipped_answers,
    read_evaluation,
)
from klear_core.evaluate.stats.intervals import least_half_width
from klear_core.scores import EvalReport, p_value, percent, points, range_text
from klear_core.types import CodeReference, Problem, Reference, StoredTests

# ---- decision ----
# Define the record of a decision on the champion, as stored in `decision.json`.


DECISION_FILE = "decision.json"
PROBLEMS_FILE = "problems.json"
"""Ids of the problems that both models were asked, by benchmark."""
FLIPPED_FILE = "flipped.parquet"
"""The answers whose verdict differs between the two models."""

RuleName = Literal[
    "comparable",
    "non-inferior",
    "better",
    "no worse than the best champion",
    "not worse",
    "reported",
    "contaminated",
    "truncated",
    "no answer",
    "judge failed",
    "not rolled back",
]
RivalIs = Literal["champion", "first model of the run", "best champion", "first evaluation", "nobody"]


class Contender(Settings):
    """A model of the comparison and its scores, as artifacts `kind/fingerprint`."""

    model: str
    evaluation: str
    run: str
    """Flow run that made it champion, or that is being decided on."""
    version: int | None = None
    """Version in the registry; None for a model that is not champion."""


class Check(Settings):
    """One part of the rule, on one benchmark or on all."""

    rule: RuleName
    benchmark: str = ""
    """Empty: all benchmarks."""
    is_passed: bool
    is_inconclusive: bool = False
    """Whether the part is not passed because the data can neither show nor exclude what it asks for."""
    text: str
    """Figures and limit."""

    @property
    def name(self) -> str:
        """The rule, and the benchmark if it is about one: `non-inferior on aime24`."""
        return f"{self.rule} on {self.benchmark}" if self.benchmark else self.rule


class SharedProblems(Settings):
    """The problems of one benchmark that both models were asked."""

    benchmark: str
    num_shared: int
    num_only_new: int
    num_only_old: int


class Decision(Settings):
    """The decision on one model, with its evidence."""

    is_passed: bool
    is_inconclusive: bool = False
    """Whether all parts that are not passed are inconclusive: more problems or samples could decide."""
    sentence: str
    candidate: Contender
    rival: Contender | None
    rival_is: RivalIs
    rule: PromoteConfig
    checks: tuple[Check, ...]
    comparisons: tuple[PairedComparison, ...]
    """Paired differences, the new model minus the other; empty if the two cannot be compared."""
    shared: tuple[SharedProblems, ...]


def read_decision(folder: Path) -> Decision:
    """Return the decision of an artifact folder; ArtifactError names the file."""
    path = folder / DECISION_FILE
    try:
        return Decision.model_validate_json(path.read_bytes())
    except OSError as e:
        raise ArtifactError(f"{path}: cannot be read ({e.strerror})") from e
    except ValidationError as e:
        raise ArtifactError(f"{path}: not a decision of this version of Klear: {e}") from e


def short_name(artifact: str) -> str:
    """Shorten `kind/fingerprint` for people: `rl 259c66eb`."""
    kind, _, fingerprint = artifact.partition("/")
    return f"{kind} {fingerprint[:8]}"


# ---- promotion ----


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


def decide(
    rule: PromoteConfig, candidate: Candidate, rival: Rival | None, *, best: Rival | None = None, workdir: Path
) -> StageSummary:
    """Write the decision with its evidence to `workdir`.

    `best` is the best champion before the rival, so that losses within the margin do not add up; None if there is none.
    """
    new = read_evaluation(candidate.evaluation)
    old = read_evaluation(rival.evaluation) if rival and rival.evaluation else None
    withdrawn = candidate.withdrawn
    reason = withdrawn or "this model was never rolled back"
    checks = [Check(rule="not rolled back", is_passed=not withdrawn, text=reason)]
    for report in new.reports.values():
        checks += _own_checks(rule, report, candidate.contaminated.get(report.benchmark))
    comparisons: tuple[PairedComparison, ...] = ()
    if rival is None:
        checks.append(_without_rival(rule))
    else:
        reasons = comparable(new, old, is_=rival.is_) if old else [_gone(rival)]
        checks += reasons
        is_comparable = all(check.is_passed for check in reasons)
        if old is not None and is_comparable:
            comparisons = compare_sampled(old, new)
            checks += [non_inferior(c, margin=rule.margin_of(c.benchmark)) for c in comparisons]
            counted = [c.benchmark for c in comparisons if c.benchmark not in candidate.chosen_on]
            checks.append(better(comparisons, compare_together(old, new, counted), candidate.chosen_on))
    if best is not None:
        checks.append(_anchored(rule, new, best))
    failed = [check for check in checks if not check.is_passed]
    rival_contender = rival.contender if rival else None
    rival_is: RivalIs = rival.is_ if rival else "nobody"
    decision = Decision(
        is_passed=not failed,
        is_inconclusive=bool(failed) and all(check.is_inconclusive for check in failed),
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
    counts = {
        "promoted": int(decision.is_passed),
        "inconclusive": int(decision.is_inconclusive),
        "checks": len(checks),
        "failed_checks": len(failed),
    }
    return StageSummary(counts=counts)


def are_comparable(new: Path, old: Path) -> bool:
    """Return whether two evaluations have the same benchmarks, problems, decoding and judge."""
    checks = comparable(read_evaluation(new), read_evaluation(old), is_="champion")
    return all(check.is_passed for check in checks)


def _write(decision: Decision, new: Evaluation, old: Evaluation | None, workdir: Path) -> None:
    ids: dict[str, list[str]] = {}
    for shared in decision.shared:
        assert old is not None, "problems are shared with another evaluation"
        # A set of texts has another order in every process, and the same decision must write the same file.
        ids[shared.benchmark] = sorted(new.problem_ids(shared.benchmark) & old.problem_ids(shared.benchmark))
    (workdir / PROBLEMS_FILE).write_text(json.dumps(ids, indent=1) + "\n")
    if decision.comparisons and old is not None:
        write_shard(workdir / FLIPPED_FILE, flipped_answers(old.folder, new.folder))
    (workdir / DECISION_FILE).write_text(decision.model_dump_json(indent=2) + "\n")


# ---- the parts of the rule ----


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


def comparable(new: Evaluation, old: Evaluation, *, is_: RivalIs) -> list[Check]:
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
        is_scored = new.scored_ids(benchmark) & old.scored_ids(benchmark)
        return "" if is_scored else "no problem has a judged answer of both models"
    return (
        f"other problems: {len(ours & theirs):,} are shared, {len(ours - theirs):,} are new, "
        f"{len(theirs - ours):,} are gone"
    )


def _other_references(new: Evaluation, old: Evaluation, benchmark: str) -> str:
    """Return how many references differ, or that this is not known; empty if none does."""
    num = num_other_references(new.folder, old.folder, benchmark)
    if num is None:
        return "the references of one of the two are gone, so that they may differ; score the champion again"
    return f"{num:,} of the problems have another reference now" if num else ""


def _other_settings(new: EvalReport, old: EvalReport) -> list[str]:
    """Return how prompt, decoding and judge differ; empty if they are the same."""
    reasons = []
    decodings = [report.decoding.compared() for report in (old, new)]
    judges = [result_settings(report.judge.settings) for report in (old, new) if report.judge]
    decoding = _differences(decodings)
    if old.prompt != new.prompt:
        reasons.append(f"asked otherwise: prompt {old.prompt} -> {new.prompt}")
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


def non_inferior(c: PairedComparison, *, margin: float, setting: str = "promote.margins") -> Check:
    """Return whether the interval over other problems excludes a loss of `margin` points.

    It is inconclusive if the interval holds the margin, so that neither is shown. `setting` is where margins are set.
    """
    is_passed = 100 * c.new_problems.low > -margin + _ROUNDING
    text = f"{points(c.difference)} points ({range_text(c.new_problems)}); must stay above {points(-margin / 100)}"
    least = 100 * least_half_width(c.num_problems, confidence=c.confidence)
    if not is_passed and least + _ROUNDING >= margin:
        text += (
            f". {c.num_problems} problems never show less than a loss of {least:.1f} points, so that an equal model "
            f"cannot pass: more problems or a larger {setting}.{c.benchmark} could"
        )
    is_open = not is_passed and 100 * c.new_problems.high > -margin
    return Check(rule="non-inferior", benchmark=c.benchmark, is_passed=is_passed, is_inconclusive=is_open, text=text)


def better(
    comparisons: Sequence[PairedComparison], together: PairedComparison | None, chosen_on: Mapping[str, str]
) -> Check:
    """Return whether a gain is shown where the model was not chosen, by test and interval, each corrected.

    `together` is the comparison over the problems of all benchmarks that count: many problems exclude rare losses,
    which few do not. The test alone would call a model better that loses a few problems entirely and gains little on
    the others, if none of the few was drawn. Inconclusive if the interval of a counting benchmark allows for a gain.
    """
    counted = [c for c in comparisons if c.benchmark not in chosen_on]
    asked = [*counted, together] if together else counted
    shown = [c for c in asked if is_gain(c)]
    listed = [
        f"{c.benchmark} {points(c.difference)} points, {p_value(c.p_corrected)}, other problems {_corrected_text(c)}"
        for c in shown or [*comparisons, *([together] if together else [])]
    ]
    corrected = f", corrected for {len(comparisons)} benchmarks" if len(comparisons) > 1 else ""
    what = "a gain is shown on" if shown else "no gain is shown:"
    text = f"{what} {'; '.join(listed) or 'no benchmark counts'}{corrected}"
    for benchmark, reason in chosen_on.items():
        text += f". A gain on {benchmark} does not count: {reason}"
    is_open = not shown and any(c.new_problems.high > 0 for c in counted)
    return Check(rule="better", is_passed=bool(shown), is_inconclusive=is_open, text=text)


def is_gain(c: PairedComparison) -> bool:
    """Return whether a comparison of sampled answers shows a gain, on these problems and on others of their kind."""
    assert c.corrected is not None, "compare_sampled fills it in"
    return c.is_better and c.corrected.low > 0


def _corrected_text(c: PairedComparison) -> str:
    assert c.corrected is not None, "compare_sampled fills it in"
    return range_text(c.corrected)


def _anchored(rule: PromoteConfig, new: Evaluation, best: Rival) -> Check:
    """Return whether the model is non-inferior to the best champion so far, where the two can be compared."""
    old = read_evaluation(best.evaluation) if best.evaluation else None
    reasons = comparable(new, old, is_=best.is_) if old else [_gone(best)]
    which = f"{short_name(best.contender.model)}, version {best.contender.version}"
    failed = [check for check in reasons if not check.is_passed]
    if old is None or failed:
        text = f"{which} is left out, for it cannot be compared: {'; '.join(check.text for check in failed)}"
        return Check(rule="no worse than the best champion", is_passed=True, text=text)
    checks = [non_inferior(c, margin=rule.margin_of(c.benchmark)) for c in compare_sampled(old, new)]
    failed = [check for check in checks if not check.is_passed]
    found = "; ".join(f"{check.benchmark} {check.text}" for check in failed or checks)
    return Check(
        rule="no worse than the best champion",
        is_passed=not failed,
        is_inconclusive=bool(failed) and all(check.is_inconclusive for check in failed),
        text=f"{which}: {found}",
    )


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
    names = ", ".join(dict.fromkeys(check.name for check in failed))
    if all(check.is_inconclusive for check in failed):
        return (
            f"{who} does not become champion: inconclusive, {len(failed)} of {len(checks)} checks {against} can "
            f"neither be passed nor failed by so few problems: {names}"
        )
    return f"{who} does not become champion: it fails {len(failed)} of {len(checks)} checks {against}: {names}"


# ---- asked problems ----
# Tell whether two evaluations judged the answers to a benchmark by the same references.


def num_other_references(new: Path, old: Path, benchmark: str) -> int | None:
    """Return how many problems of a benchmark have different references in two evaluations' artifact folders.

    A problem's id tells its question alone. With a shared store, problems are fetched to this node. None if the
    problems of an evaluation are gone, so that it is not known.
    """
    records = [_benchmarks_of(folder) for folder in (new, old)]
    if records[0] is None or records[1] is None:
        return None
    # The same artifact has the same references, so neither is read.
    if records[0].fingerprint == records[1].fingerprint:
        return 0
    ours, theirs = _references(new, records[0], benchmark), _references(old, records[1], benchmark)
    if not ours or not theirs:
        return None
    # Problems of only one of the two are no matter here: `promotion` reports them as other problems.
    return sum(ours[problem_id] != theirs[problem_id] for problem_id in ours.keys() & theirs.keys())


def _benchmarks_of(evaluation: Path) -> InputRecord | None:
    if not (evaluation / MANIFEST).is_file():
        return None
    inputs = read_manifest(evaluation).inputs
    return next((record for record in inputs if record.role == BenchmarksJob.kind), None)


def _references(evaluation: Path, benchmarks: InputRecord, name: str) -> dict[str, bytes]:
    """Return a digest of each problem's reference; empty if the problems are gone."""
    found = store_of(evaluation).find(benchmarks.kind, benchmarks.fingerprint)
    if found is None or not (found.path / name).is_dir():
        return {}
    folder = found.path / name
    return {problem.problem_id: _digest(problem.reference) for problem in read_shards(folder, Problem)}


def _digest(reference: Reference) -> bytes:
    if isinstance(reference, CodeReference) and isinstance(reference.tests, StoredTests):
        # where the tests are stored is no part of what they are; their own digest is
        tests = replace(reference.tests, path="", offset=0)
        reference = replace(reference, tests=tests)
    return hashlib.sha256(repr(reference).encode("utf-8", "surrogatepass")).digest()
