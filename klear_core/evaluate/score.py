"""Count judged answers by problem, and compute a benchmark's scores, report and ledger from the counts."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from klear_core.artifacts.manifest import LedgerStep
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import DataError
from klear_core.evaluate.stats.intervals import (
    Estimates,
    estimates_of,
    estimates_without_noise,
    g_pass_at_k,
    maj_at_n,
    new_problems_interval,
    rerun_interval,
)
from klear_core.prompts import NoAnswer, find_answer_text
from klear_core.scores import DecodingProfile, DifficultyScore, EvalReport, JudgeRecord, PassAtK, Score, StablePass
from klear_core.types import Difficulty, EvalSample, MathReference, Outcome, Problem
from klear_core.verify.judge_pool import code_workers, math_workers
from klear_core.verify.math.answer_text import find_answer, normalise

_MAX_STABLE_K = 16
_STABLE_THRESHOLDS = (0.5, 0.75, 1.0)
"""Least shares of right samples in G-Pass@k, those that its authors print (Liu et al. 2024)."""
SEED_POLICY = "one seed a sample, from (run seed, benchmark, problem id, sample index)"


def make_report(
    tallies: Tallies,
    cfg: EvaluateConfig,
    *,
    benchmark: str,
    num_samples: int,
    seed: int,
    judge: JudgeRecord | None = None,
) -> EvalReport:
    """Return one benchmark's report. Raise DataError if no sample could be judged."""
    sampled, greedy = tallies["sampled"], tallies["greedy"]
    avg = sampled.score(confidence=cfg.confidence)
    if avg is None:
        raise DataError(
            f"benchmark {benchmark!r}: none of {sampled.num_samples} answers could be judged: {dict(sampled.unscored)}"
        )
    pass_at: list[PassAtK] = []
    for k in powers_of_two(num_samples):
        score = sampled.pass_at(k, confidence=cfg.confidence)
        if score is not None:
            pass_at.append(score)
    unscored_problems = sorted(i for i, problem in sampled.problems.items() if not problem.num_scored)
    return EvalReport(
        benchmark=benchmark,
        decoding=DecodingProfile(sampling=cfg.sampling, engine=cfg.engine, seed_policy=SEED_POLICY),
        seed=seed,
        confidence=cfg.confidence,
        num_problems=len(sampled.problems),
        num_samples=num_samples,
        avg=avg,
        pass_at=tuple(pass_at),
        stable_pass=_stable_pass(sampled, num_samples, confidence=cfg.confidence),
        majority=sampled.majority(confidence=cfg.confidence),
        greedy=greedy.score(confidence=cfg.confidence, has_rerun=False),
        truncated_frac=sampled.truncated_frac,
        no_answer_frac=sampled.num_no_answer / sampled.num_samples,
        greedy_truncated_frac=greedy.truncated_frac if greedy.num_samples else None,
        mean_tokens=sampled.num_tokens / sampled.num_samples,
        unscored=dict(sampled.unscored),
        greedy_unscored=dict(greedy.unscored),
        unscored_problems=tuple(unscored_problems),
        by_difficulty=_by_difficulty(tallies, confidence=cfg.confidence),
        judge=judge,
    )


def _stable_pass(sampled: Tally, num_samples: int, *, confidence: float) -> tuple[StablePass, ...]:
    """Return G-Pass@k for k = min(16, n), the largest k of its authors; empty for a single sample."""
    k = min(_MAX_STABLE_K, num_samples)
    if k == 1:
        return ()
    found = [sampled.stable_pass(k, threshold=threshold, confidence=confidence) for threshold in _STABLE_THRESHOLDS]
    return tuple(score for score in found if score is not None)


def _by_difficulty(tallies: Tallies, *, confidence: float) -> tuple[DifficultyScore, ...]:
    counts = Counter(p.difficulty for p in tallies["sampled"].problems.values())
    return tuple(
        DifficultyScore(
            difficulty=difficulty,
            num_problems=counts[difficulty],
            avg=tallies["sampled"].score(confidence=confidence, difficulty=difficulty),
            greedy=tallies["greedy"].score(confidence=confidence, difficulty=difficulty, has_rerun=False),
        )
        for difficulty in Difficulty
        if counts[difficulty]
    )


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, ... up to `limit`, and `limit` itself."""
    powers = [1 << i for i in range(limit.bit_length())]
    return powers if powers[-1] == limit else [*powers, limit]


def ledger_step(benchmark: str, tallies: Tallies) -> LedgerStep:
    """Return the ledger step of judging: answers sampled, and those that could not be judged, by reason."""
    unscored: Counter[str] = Counter()
    noted: Counter[str] = Counter()
    num_answers = 0
    for counts in tallies.values():
        num_answers += counts.num_samples
        noted["truncated"] += counts.num_truncated
        noted["no_answer"] += counts.num_no_answer
        for outcome, n in counts.unscored.items():
            unscored[str(outcome)] += n
    return LedgerStep(
        step=f"judge_{benchmark}",
        unit="answer",
        num_in=num_answers,
        num_out=num_answers - unscored.total(),
        dropped=dict(sorted(unscored.items())),
        noted=dict(+noted),  # without counts of zero
    )


def metrics_of(report: EvalReport) -> dict[str, float]:
    """Return a report's numbers by metric name."""
    prefix, n = f"eval/{report.benchmark}", report.num_samples
    metrics = {
        f"{prefix}/avg_at_{n}": report.avg.value,
        f"{prefix}/avg_at_{n}_low": report.avg.new_problems.low,
        f"{prefix}/avg_at_{n}_high": report.avg.new_problems.high,
        f"{prefix}/truncated_frac": report.truncated_frac,
        f"{prefix}/tokens_mean": report.mean_tokens,
        f"{prefix}/unscored_frac": sum(report.unscored.values()) / (report.num_problems * n),
    }
    if report.avg.rerun is not None:
        metrics[f"{prefix}/avg_at_{n}_rerun_low"] = report.avg.rerun.low
        metrics[f"{prefix}/avg_at_{n}_rerun_high"] = report.avg.rerun.high
    if report.majority is not None:
        metrics[f"{prefix}/maj_at_{n}"] = report.majority.value
    if report.greedy is not None:
        metrics[f"{prefix}/greedy"] = report.greedy.value
    for template in report.templates:
        metrics[f"{prefix}/template_{template.name}"] = template.avg.value
    if report.template_spread is not None:
        spread = report.template_spread
        metrics |= {f"{prefix}/template_std": spread.std, f"{prefix}/template_range": spread.most - spread.least}
    for pass_at in report.pass_at:
        metrics[f"{prefix}/pass_at_{pass_at.k}"] = pass_at.score.value
    return metrics


def warning_lines(reports: Iterable[EvalReport]) -> tuple[str, ...]:
    """Return a warning for each benchmark whose scores leave problems out."""
    lines: list[str] = []
    for report in reports:
        if report.unscored_problems:
            lines.append(
                f"{report.benchmark}: {len(report.unscored_problems)} of {report.num_problems} problems have no "
                "sampled answer that could be judged and are missing from its scores: "
                f"{', '.join(report.unscored_problems[:5])}"
            )
    return tuple(lines)


# ---- tally ----
# Count judged answers by problem, and compute scores from the counts.


@dataclass(slots=True)
class ProblemTally:
    """Counts of one problem's answers in one decoding (sampled or greedy)."""

    difficulty: Difficulty
    num_scored: int = 0
    num_correct: int = 0
    votes: list[tuple[str | None, bool]] = field(default_factory=list)
    """Answer (None: none was found) and verdict of each scored sample, for maj@n; empty if there is none to count."""

    @property
    def counts(self) -> tuple[int, int]:
        """Right and scored answers."""
        return self.num_correct, self.num_scored

    @property
    def mean(self) -> float:
        """Share of right answers among the scored ones."""
        return self.num_correct / self.num_scored


@dataclass(slots=True)
class Tally:
    """Counts of all answers in one decoding, in total and by problem."""

    problems: dict[str, ProblemTally]
    num_samples: int = 0
    num_tokens: int = 0
    num_truncated: int = 0
    num_no_answer: int = 0
    unscored: Counter[Outcome] = field(default_factory=Counter)

    def add(self, sample: EvalSample) -> None:
        """Count one answer; an answer that could not be judged counts as neither right nor wrong."""
        self.num_samples += 1
        self.num_tokens += sample.num_tokens
        self.num_truncated += sample.finish_reason == "length"
        self.num_no_answer += sample.verdict.outcome is Outcome.NO_ANSWER
        if not sample.verdict.outcome.counts_for_model:
            self.unscored[sample.verdict.outcome] += 1
            return
        problem = self.problems[sample.problem_id]
        problem.num_scored += 1
        problem.num_correct += sample.verdict.is_correct

    @property
    def scored(self) -> list[ProblemTally]:
        """Problems with at least one scored answer."""
        return [p for p in self.problems.values() if p.num_scored]

    @property
    def truncated_frac(self) -> float:
        """Share of all answers that ran out of tokens."""
        return self.num_truncated / self.num_samples

    def score(self, *, confidence: float, difficulty: Difficulty | None = None, has_rerun: bool = True) -> Score | None:
        """Return the mean over problems (of one difficulty, if given); None if no problem has a scored answer.

        Pass `has_rerun=False` for greedy answers, which another run would repeat.
        """
        problems = [p for p in self.scored if difficulty in (None, p.difficulty)]
        if not problems:
            return None
        estimates = estimates_of([p.counts for p in problems])
        return _score(estimates, problems, confidence=confidence, has_rerun=has_rerun)

    def pass_at(self, k: int, *, confidence: float) -> PassAtK | None:
        """Return pass@k over the problems with at least k scored samples; None if there is none."""
        problems = [p for p in self.scored if p.num_scored >= k]
        if not problems:
            return None
        estimates = estimates_of([p.counts for p in problems], k=k)
        return PassAtK(k=k, score=_score(estimates, problems, confidence=confidence))

    def stable_pass(self, k: int, *, threshold: float, confidence: float) -> StablePass | None:
        """Return G-Pass@k over the problems with at least k scored samples; None if there is none."""
        problems = [p for p in self.scored if p.num_scored >= k]
        if not problems:
            return None
        values = [g_pass_at_k(p.num_scored, p.num_correct, k, threshold=threshold) for p in problems]
        # The problem with the fewest answers has the largest step; a smaller one could make the interval too narrow.
        fewest = min(p.num_scored for p in problems)
        estimates = estimates_without_noise(values, step=k / fewest)
        score = _score(estimates, problems, confidence=confidence, has_rerun=False)
        return StablePass(k=k, threshold=threshold, score=score)

    def majority(self, *, confidence: float) -> Score | None:
        """Return maj@n over the problems whose answers can be counted as votes; None if there is none."""
        # With one vote the most common answer is the only one, and maj@1 would repeat avg@1.
        problems = [p for p in self.scored if len(p.votes) > 1]
        if not problems:
            return None
        values = []
        for problem in problems:
            answers, verdicts = zip(*problem.votes, strict=True)
            values.append(maj_at_n(answers, verdicts))
        estimates = estimates_without_noise(values, step=1.0)
        return _score(estimates, problems, confidence=confidence, has_rerun=False)


Tallies = Mapping[Literal["sampled", "greedy"], Tally]


def tally(
    samples: Iterable[EvalSample], problems: Iterable[Problem], *, read_vote: Callable[[str], str | None] | None = None
) -> Tallies:
    """Count a benchmark's answers by decoding. Problems without a scored answer are kept, with counts of zero.

    `read_vote` returns the answer that a response to a math problem gives, for maj@n.
    """
    difficulties: dict[str, Difficulty] = {}
    is_math: dict[str, bool] = {}
    for problem in problems:
        difficulties[problem.problem_id] = problem.difficulty
        is_math[problem.problem_id] = isinstance(problem.reference, MathReference)
    tallies: Tallies = {"sampled": _empty_tally(difficulties), "greedy": _empty_tally(difficulties)}
    for sample in samples:
        counts = tallies[sample.decoding]
        counts.add(sample)
        if read_vote is not None and is_math[sample.problem_id] and sample.verdict.outcome.counts_for_model:
            vote = _RIGHT if sample.verdict.is_correct else read_vote(sample.response)
            counts.problems[sample.problem_id].votes.append((vote, sample.verdict.is_correct))
    return tallies


_RIGHT = "right"
"""The vote of all right answers, because `0.5` and `1/2` are one answer."""


def read_math_vote(verify: VerifyConfig, response: str) -> str | None:
    """Return the answer that the math judge reads in a response, in one spelling; None if there is none."""
    text = find_answer_text(response, verify)
    if isinstance(text, NoAnswer):
        return None
    answer = find_answer(text, verify.math)
    if isinstance(answer, NoAnswer):
        return None
    return f"wrong: {normalise(answer.texts[-1])}"


def _empty_tally(difficulties: Mapping[str, Difficulty]) -> Tally:
    return Tally({problem_id: ProblemTally(difficulty) for problem_id, difficulty in difficulties.items()})


def _score(
    estimates: Estimates, problems: Sequence[ProblemTally], *, confidence: float, has_rerun: bool = True
) -> Score:
    """Return the mean of the estimates with its intervals."""
    rerun = rerun_interval(estimates, confidence=confidence) if has_rerun else None
    return Score(
        value=estimates.mean,
        new_problems=new_problems_interval(estimates, confidence=confidence),
        rerun=rerun,
        num_problems=len(problems),
        num_samples=sum(p.num_scored for p in problems),
    )


# ---- judge record ----
# Record the judge of a score with its machine, because time limits depend on the processor and on the concurrency.


def judge_record(verify: VerifyConfig) -> JudgeRecord:
    """Return the judge's settings with this machine's processor and the numbers of workers."""
    return JudgeRecord(
        settings=verify,
        cpu=_processor(),
        num_cores=usable_cpus(),
        math_workers=math_workers(verify.runtime),
        code_workers=code_workers(verify.runtime),
    )


def _processor() -> str:
    """Return the processor's name: on Linux as the kernel gives it, elsewhere as Python does."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
