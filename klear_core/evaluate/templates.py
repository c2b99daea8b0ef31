"""Ask a benchmark's questions in other prompt templates, and score each: how much depends on the wording."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from klear_core.artifacts.ledger import LedgerStep
from klear_core.artifacts.records import read_shard
from klear_core.config.evaluate import QUESTION, EvaluateConfig
from klear_core.errors import DataError
from klear_core.evaluate.suite import Benchmark, plan_template
from klear_core.evaluate.summarise import ledger_step
from klear_core.evaluate.tally import Tallies, tally
from klear_core.scores import TemplateScore
from klear_core.types import EvalSample


def asked(question: str, cfg: EvaluateConfig, template: str) -> str:
    """Return the question in a template of this name; as it stands for the empty name."""
    # not str.format: templates have the braces of \boxed{}
    return cfg.templates[template].replace(QUESTION, question) if template else question


def template_scores(
    cfg: EvaluateConfig, benchmark: Benchmark, workdir: Path
) -> Iterator[tuple[TemplateScore, LedgerStep]]:
    """Yield each template's score from the stored answers, with its ledger step.

    Raise DataError if none of a template's answers could be judged.
    """
    for name in cfg.templates:
        samples: list[EvalSample] = []
        for shard in plan_template(cfg, benchmark, name, workdir):
            samples += read_shard(shard.path, EvalSample)
        tallies = tally(samples, benchmark.problems)
        score = _score(tallies, cfg, name=name, benchmark=benchmark.name)
        yield score, ledger_step(f"{benchmark.name}_{name}", tallies)


def _score(tallies: Tallies, cfg: EvaluateConfig, *, name: str, benchmark: str) -> TemplateScore:
    sampled = tallies["sampled"]
    avg = sampled.score(confidence=cfg.confidence)
    if avg is None:
        raise DataError(
            f"benchmark {benchmark!r}, template {name!r}: none of {sampled.num_samples} answers could be judged: "
            f"{dict(sampled.unscored)}"
        )
    return TemplateScore(
        name=name,
        text=cfg.templates[name],
        avg=avg,
        truncated_frac=sampled.truncated_frac,
        no_answer_frac=sampled.num_no_answer / sampled.num_samples,
        unscored=dict(sampled.unscored),
    )
