"""An inline evaluation on ten problems of a file, which a model that knows nothing gets wrong."""

from __future__ import annotations

import json
from pathlib import Path

from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.evaluate import EvaluateSamplingConfig, InlineEvalConfig
from klear_core.config.pipeline import InlineEvalJob, ScorerConfig
from klear_core.config.verify import VerifyConfig


def toy_inline_eval(folder: Path, *, num_problems: int = 4, scorer: ScorerConfig | None = None) -> InlineEvalJob:
    """Scores at each step: two answers of up to six tokens to each problem."""
    rows = [{"problem": f"What is {i}?", "answer": "1"} for i in range(10)]
    (folder / "toy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return InlineEvalJob(
        curve=InlineEvalConfig(benchmark="toy", num_problems=num_problems, num_samples=2, every_steps=1),
        source=BenchmarkConfig(name="toy", source=FileSource(path=str(folder / "toy.jsonl"))),
        sampling=EvaluateSamplingConfig(temperature=1.0, max_new_tokens=6),
        verify=VerifyConfig(),
        confidence=0.95,
        scorer=scorer,
    )
