"""Make a benchmark's report, ledger step and metrics from the counts of its judged answers."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from klear_core.artifacts.manifest import LedgerStep
from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.verify import VerifyConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import DataError
from klear_core.evaluate.counts import AnswerCounts, Tallies
from klear_core.prompts import NoAnswer, find_answer_text
from klear_core.scores import (
    DecodingProfile,
    DifficultyScore,
    EvalReport,
    JudgeRecord,
    PassAtK,
    Score,
    StablePass,
    TemplateScore,
    percent,
)
from klear_core.types import Difficulty
from klear_core.verify.client import code_workers, math_workers
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
    prompt: str = "plain",
    judge: JudgeRecord | None = None,
) -> EvalReport:
    """Return one benchmark's report. Raise DataError if no sample could be judged."""
    sampled, greedy = tallies["sampled"], tallies["greedy"]
    avg = _avg(sampled, cfg, f"benchmark {benchmark!r}")
    pass_at: list[PassAtK] = []
    for k in powers_of_two(num_samples):
        score = sampled.pass_at(k, confidence=cfg.confidence)
        if score is not None:
            pass_at.append(score)
    unscored_problems = sorted(i for i, problem in sampled.problems.items() if not problem.num_scored)
    return EvalReport(
        benchmark=benchmark,
        decoding=DecodingProfile(sampling=cfg.sampling, engine=cfg.engine, seed_policy=SEED_POLICY),
        prompt=prompt,
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
        no_answer_frac=sampled.num_no_answer / sampled.num_answers,
        greedy_truncated_frac=greedy.truncated_frac if greedy.num_answers else None,
        mean_tokens=sampled.num_tokens / sampled.num_answers,
        unscored=dict(sampled.unscored),
        greedy_unscored=dict(greedy.unscored),
        unscored_problems=tuple(unscored_problems),
        by_difficulty=_by_difficulty(tallies, confidence=cfg.confidence),
        judge=judge,
    )


def template_score(tallies: Tallies, cfg: EvaluateConfig, *, template: str, benchmark: str) -> TemplateScore:
    """Return avg@n of a benchmark's questions in one prompt template. Raise DataError if no sample could be judged."""
    sampled = tallies["sampled"]
    return TemplateScore(
        name=template,
        text=cfg.templates[template],
        avg=_avg(sampled, cfg, f"benchmark {benchmark!r}, template {template!r}"),
        truncated_frac=sampled.truncated_frac,
        no_answer_frac=sampled.num_no_answer / sampled.num_answers,
        unscored=dict(sampled.unscored),
    )


def _avg(sampled: AnswerCounts, cfg: EvaluateConfig, what: str) -> Score:
    avg = sampled.score(confidence=cfg.confidence)
    if avg is None:
        raise DataError(f"{what}: none of {sampled.num_answers} answers could be judged: {dict(sampled.unscored)}")
    return avg


def _stable_pass(sampled: AnswerCounts, num_samples: int, *, confidence: float) -> tuple[StablePass, ...]:
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
        num_answers += counts.num_answers
        noted["truncated"] += counts.num_truncated
        noted["no_answer"] += counts.num_no_answer
        for outcome, n in counts.unscored.items():
            unscored[str(outcome)] += n
    dropped = dict(sorted(unscored.items()))
    # `+` leaves out counts of zero
    return LedgerStep.of(f"judge_{benchmark}", "answer", num_in=num_answers, dropped=dropped, noted=+noted)


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


def fence_note(benchmark: str, tallies: Tallies, prompt: str) -> str:
    """Return how many complete answers hold no fenced program, if the prompt does not ask for one; empty if none."""
    sampled = tallies["sampled"]
    if prompt != "plain" or not sampled.num_unfenced:
        return ""
    return (
        f"{benchmark}: {percent(sampled.num_unfenced / sampled.num_answers)} of the answers are complete and hold no "
        'fenced program, and the plain prompt does not ask for one; prompt = "livecodebench" does'
    )


def think_tag_note(benchmark: str, tallies: Tallies) -> str:
    """Return how many complete answers lack `</think>`, if it is most of them; else nothing."""
    sampled = tallies["sampled"]
    if 2 * sampled.num_untagged <= sampled.num_answers:
        return ""
    return (
        f"{benchmark}: {percent(sampled.num_untagged / sampled.num_answers)} of the answers are complete and lack "
        "</think>, so that they count as no answer; for a model that writes no think tags set verify.tags=none"
    )


def read_math_vote(verify: VerifyConfig, response: str) -> str | None:
    """Return the answer that the math judge reads in a response, in one spelling; None if there is none."""
    text = find_answer_text(response, verify)
    if isinstance(text, NoAnswer):
        return None
    answer = find_answer(text, verify.math)
    if isinstance(answer, NoAnswer):
        return None
    return f"wrong: {normalise(answer.texts[-1])}"


# ---- the judge ----


def judge_record(verify: VerifyConfig) -> JudgeRecord:
    """Return the judge's settings with this machine's processor and the numbers of workers.

    Time limits depend on the processor and on the concurrency.
    """
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
