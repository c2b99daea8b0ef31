"""The shares that stand beside each score: no answer found, and problems in the training data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from report_runs import laptop_run

from klear_core.data.decontaminate import Leak
from klear_core.data.leak_table import write_leaks
from klear_core.report.contamination import kept_leaks, num_contaminated
from klear_core.report.inputs import ScoreWarning
from klear_core.report.read import read_facts


def leak(question: str, *, is_dropped: bool) -> Leak:
    fields = {"problem_id": "p", "source": "s", "rules": "near", "shared": "x", "prompt": "x", "question": "x"}
    return Leak(benchmark="heldout", question_id=question, is_dropped=is_dropped, num_shared=1, **fields)


def test_questions_with_a_kept_match_are_counted_once_for_models_trained_after_it(tmp_path: Path) -> None:
    facts = read_facts(laptop_run(tmp_path))
    curated = next(stage for stage in facts.stages if stage.name == "curate")
    leaks = [leak("a", is_dropped=True), *[leak("b", is_dropped=False)] * 2, leak("c", is_dropped=False)]
    write_leaks(curated.folder, leaks, rows_per_shard=2)
    kept_leaks.cache_clear()
    found = [num_contaminated(facts, model, "heldout") for model in facts.models]
    assert found == [0, 2, 2]  # base, SFT, RL
    assert num_contaminated(facts, facts.model("rl"), "other") == 0


def test_data_that_was_not_compared_is_not_known_rather_than_zero(tmp_path: Path) -> None:
    facts = read_facts(laptop_run(tmp_path))
    warning = ScoreWarning(where="x", text="x", scored_by=("evaluate_sft",), benchmarks=("heldout",))
    warned = replace(facts, score_warnings=(warning,))
    assert [num_contaminated(warned, model, "heldout") for model in warned.models] == [0, None, 0]
