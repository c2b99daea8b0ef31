"""Tag training problems with their difficulty: sample answers of a tagger, judge them, and keep the pass rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from klear_core.artifacts.ledger import LedgerStep, StageSummary
from klear_core.artifacts.records import read_shard, read_shards, write_shards
from klear_core.config.tag import TagConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import DataError
from klear_core.evaluate.compute import Compute
from klear_core.evaluate.run import answer_suite
from klear_core.evaluate.suite import Benchmark, plan_answers
from klear_core.evaluate.tally import ProblemTally, tally
from klear_core.metrics import Telemetry
from klear_core.scores import RATES_FOLDER
from klear_core.types import EvalSample, PassRate, Problem, UnverifiableReference

_NAME = "tagging"
"""Name of the problems among the samples and in messages, where an evaluation has a benchmark's."""
_ROWS_PER_SHARD = 4096
_TAGGING_HERE = Compute(section="tag")


def tag_problems(
    cfg: TagConfig,
    verify: VerifyConfig,
    *,
    model: Path,
    problems: Path,
    seed: int,
    workdir: Path,
    telemetry: Telemetry,
    compute: Compute = _TAGGING_HERE,
) -> StageSummary:
    """Write all problems of the artifact `problems` with new tags, their pass rates, and the judged answers.

    Unverifiable problems keep their tags; no answer to them is sampled.

    `model` is the tagger: a model artifact or a Hugging Face folder. Shards of answers are the unit of resume. Raise
    JudgeError if more than `cfg.max_unscored_rate` of the answers cannot be judged.
    """
    untagged = tuple(read_shards(problems / "problems", Problem))
    if not untagged:
        raise DataError(f"{problems}: there are no problems to tag")
    judged = tuple(p for p in untagged if not isinstance(p.reference, UnverifiableReference))
    if not judged:
        raise DataError(f"{problems}: none of its problems has a reference, so no answer can be judged")
    evaluation = cfg.as_evaluation()
    suite = (Benchmark(name=_NAME, problems=judged, num_samples=cfg.samples_per_problem),)
    notes = answer_suite(
        model, evaluation, suite, verify, compute=compute, seed=seed, workdir=workdir, telemetry=telemetry
    )

    shards = plan_answers(evaluation, suite[0], workdir)
    samples = (sample for shard in shards for sample in read_shard(shard.path, EvalSample))
    summary = write_tags(cfg, untagged, samples, workdir=workdir)
    return summary.model_copy(update={"seeds": {"tag": seed}, "notes": notes})


def write_tags(
    cfg: TagConfig, untagged: Sequence[Problem], samples: Iterable[EvalSample], *, workdir: Path
) -> StageSummary:
    """Write the problems with the tags that follow from the judged answers, and the pass rates."""
    tallies = tally(samples, untagged)["sampled"].problems
    tagged = [_tagged(problem, tallies[problem.problem_id], cfg) for problem in untagged]
    write_shards(workdir / "problems", tagged, rows_per_shard=_ROWS_PER_SHARD)
    write_shards(workdir / RATES_FOLDER, _pass_rates(tallies), rows_per_shard=_ROWS_PER_SHARD)
    return _summary(untagged, tagged, tallies)


def _pass_rates(tallies: Mapping[str, ProblemTally]) -> list[PassRate]:
    """Return the pass rate of every problem with a judged answer."""
    return [
        PassRate(problem_id=problem_id, num_correct=found.num_correct, num_scored=found.num_scored)
        for problem_id, found in tallies.items()
        if found.num_scored
    ]


def _tagged(problem: Problem, found: ProblemTally, cfg: TagConfig) -> Problem:
    """Return the problem with the tag of its pass rate; without a judged answer its tag stays."""
    return replace(problem, difficulty=cfg.difficulty_at(found.mean)) if found.num_scored else problem


def _summary(
    untagged: Sequence[Problem], tagged: Sequence[Problem], tallies: Mapping[str, ProblemTally]
) -> StageSummary:
    num_scored = sum(found.num_scored for found in tallies.values())
    num_correct = sum(found.num_correct for found in tallies.values())
    noted = Counter(str(problem.difficulty) for problem in tagged)
    noted["not_judged"] = sum(not found.num_scored for found in tallies.values())
    noted["tag_changed"] = sum(new.difficulty != old.difficulty for new, old in zip(tagged, untagged, strict=True))
    step = LedgerStep(
        step="tag", unit="problem", num_in=len(untagged), num_out=len(tagged), noted=dict(sorted(noted.items()))
    )
    counts = {"problems": len(tagged), "answers": num_scored, "pass_rate": round(num_correct / max(num_scored, 1), 4)}
    return StageSummary(counts=counts, ledger=(step,))
