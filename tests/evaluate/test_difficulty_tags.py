"""A tag is the pass rate of a model in words; it drops nothing, and a judge's failure is no wrong answer."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import TagConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.evaluate.run import write_tags
from klear_core.pipeline.graph import fingerprints_of, stages_of
from klear_core.scores import RATES_FOLDER
from klear_core.types import Difficulty, Domain, EvalSample, MathReference, Outcome, PassRate, Problem, Verdict

RIGHT, WRONG = Verdict(outcome=Outcome.SCORED, score=1.0), Verdict(outcome=Outcome.SCORED, score=0.0)
FAILED = Verdict(outcome=Outcome.TIMED_OUT, score=0.0)


def problem(name: str) -> Problem:
    return Problem(
        problem_id=name,
        source="s",
        domain=Domain.MATH,
        question=f"{name}?",
        reference=MathReference(answers=("1",)),
        difficulty=Difficulty.MEDIUM,
    )


def answers(**verdicts: list[Verdict]) -> Iterator[EvalSample]:
    for name, given in verdicts.items():
        for i, verdict in enumerate(given):
            yield EvalSample(
                benchmark="tagging",
                problem_id=name,
                question=f"{name}?",
                difficulty=Difficulty.MEDIUM,
                decoding="sampled",
                sample_idx=i,
                response="",
                num_tokens=1,
                finish_reason="stop",
                verdict=verdict,
            )


def test_thirds_of_the_pass_rate_are_hard_medium_and_easy():
    cfg = TagConfig()
    tags = [cfg.difficulty_at(rate) for rate in (0.0, 0.33, 0.34, 0.66, 0.67, 1.0)]
    assert tags == ["hard", "hard", "medium", "medium", "easy", "easy"]


def test_bounds_out_of_order_are_refused():
    with pytest.raises(ValidationError, match=r"hard_below = 0.9 is above easy_from = 0.5"):
        TagConfig(hard_below=0.9, easy_from=0.5)


def test_every_problem_stays_with_the_tag_of_its_judged_answers(tmp_path: Path):
    problems = [problem(name) for name in ("solved", "half", "failed", "unjudged")]
    given = answers(
        solved=[RIGHT, RIGHT], half=[RIGHT, WRONG], failed=[WRONG, FAILED, FAILED], unjudged=[FAILED, FAILED]
    )
    summary = write_tags(TagConfig(), problems, given, workdir=tmp_path)
    tags = ("easy", "medium", "hard", "medium")  # without a judged answer a problem keeps the tag that it has
    expected = [replace(p, difficulty=Difficulty(tag)) for p, tag in zip(problems, tags, strict=True)]
    assert list(read_shards(tmp_path / "problems", Problem)) == expected
    (step,) = summary.ledger
    assert (step.num_in, step.num_out) == (4, 4)
    assert step.noted == {"easy": 1, "hard": 1, "medium": 2, "not_judged": 1, "tag_changed": 2}
    assert summary.counts == {"problems": 4, "answers": 5, "pass_rate": 0.6}


def test_pass_rates_count_judged_answers_alone(tmp_path: Path):
    given = answers(a=[RIGHT, FAILED, WRONG], b=[FAILED])
    write_tags(TagConfig(), [problem("a"), problem("b")], given, workdir=tmp_path)
    (rate,) = read_shards(tmp_path / RATES_FOLDER, PassRate)
    assert rate == PassRate(problem_id="a", num_correct=1, num_scored=2)
    assert rate.value == 0.5


def test_tagged_problems_are_what_is_distilled_and_trained_on():
    def inputs(config: PipelineConfig) -> dict[str, dict[str, str]]:
        return {stage.name: dict(stage.inputs) for stage in stages_of(config)}

    plain, tagged = inputs(PipelineConfig()), inputs(PipelineConfig(tag=TagConfig()))
    assert "tag" not in plain
    assert tagged["tag"] == {"problems": "curate", "model": "base"}
    assert tagged["distill"] == {"problems": "tag"}
    assert tagged["rl"]["problems"] == "tag"
    by_another = PipelineConfig(tag=TagConfig.model_validate({"model": "Qwen3-8B"}))
    assert inputs(by_another)["tag"] == {"problems": "curate", "model": "tagger"}
    assert [name for name in inputs(by_another) if name.startswith("evaluate")] == [
        "evaluate_base",
        "evaluate_sft",
        "evaluate_rl",
    ]


def test_a_tagger_of_its_own_is_part_of_the_fingerprint(tmp_path: Path):
    def fingerprint(weights: bytes) -> str:
        (tmp_path / "model.safetensors").write_bytes(weights)
        config = PipelineConfig(tag=TagConfig.model_validate({"model": str(tmp_path)}))
        return fingerprints_of(stages_of(config), config.workspace)["tag"].fingerprint

    assert fingerprint(b"a") != fingerprint(b"bb")
