"""The desk profile trains on all three families and scores harder problems apart; no right solution is cut off.

`desk_ci` is a small version of it: one family of math and one of code.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from klear_core.config.data import ProceduralSource, PuzzleSource
from klear_core.config.distill import PuzzleTeacherConfig
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import TinyModelConfig
from klear_core.data.candidates import Candidate, problem_from
from klear_core.data.generated.puzzles import generate
from klear_core.distill.teachers.procedural import PuzzleTeacher
from klear_core.pipeline.graph import stages_of
from klear_core.prompts import build_byte_tokenizer, encode_response, render_prompt, render_response
from klear_core.types import TeacherReply

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.fixture(scope="module", params=["desk", "desk_ci"])
def desk(request: pytest.FixtureRequest) -> PipelineConfig:
    return load_profile(CONFIGS / request.param, [])


def puzzles(*sources: object) -> list[PuzzleSource]:
    return [source for source in sources if isinstance(source, PuzzleSource)]


def drawn(desk: PipelineConfig, *sources: object) -> list[Candidate]:
    generated = [source for source in sources if isinstance(source, PuzzleSource | ProceduralSource)]
    return [c for source in generated for c in generate(source, seed=desk.seed)]


def num_tokens(desk: PipelineConfig, candidate: Candidate) -> tuple[int, int]:
    """Tokens of the prompt and of its faultless solution."""
    tokenizer = build_byte_tokenizer()
    teacher = PuzzleTeacher(PuzzleTeacherConfig(slip_rate=0, blind_spot_rate=0))
    problem = problem_from(candidate, desk.curate.difficulty)
    reply = asyncio.run(teacher.sample(problem, sample_idx=0, seed=0)).result
    assert isinstance(reply, TeacherReply)
    response = encode_response(tokenizer, render_response(reply.reasoning, reply.answer))
    return len(render_prompt(tokenizer, candidate.question)), len(response)


def test_each_family_is_trained_and_has_a_harder_benchmark_of_untrained_levels() -> None:
    desk = load_profile(CONFIGS / "desk", [])
    trained = {source.family: set(source.levels) for source in puzzles(*desk.curate.sources)}
    benchmarks = {b.name: b.source for b in desk.benchmarks if isinstance(b.source, PuzzleSource)}
    assert set(trained) == {"brackets", "residues", "programs"}
    for family, levels in trained.items():
        assert set(benchmarks[family].levels) == levels
        assert min(benchmarks[f"{family}_hard"].levels) > max(levels)
    assert all(source.split == "heldout" for source in benchmarks.values())


def test_the_small_version_trains_and_scores_chains_and_programs_of_the_same_levels() -> None:
    small = load_profile(CONFIGS / "desk_ci", [])
    levels = {}
    for source in (*small.curate.sources, *(b.source for b in small.benchmarks)):
        assert isinstance(source, PuzzleSource | ProceduralSource)
        levels[source.name, source.split] = source.levels if isinstance(source, PuzzleSource) else source.num_operations
    assert levels == {
        ("chains", "train"): (2, 3),
        ("chain", "heldout"): (2, 3),
        ("programs", "train"): (2,),
        ("programs", "heldout"): (2,),
    }


def test_math_is_scored_again_after_code_rl(desk: PipelineConfig) -> None:
    stages = stages_of(desk)
    scored = [stage.scored_model_stage for stage in stages if stage.scored_model_stage]
    assert scored == ["base", "sft", "rl", "rl_code"]
    assert desk.rl_code is not None
    assert (desk.rl.domain, desk.rl_code.domain, desk.rl_code.reward.soft) == ("math", "code", True)


def test_no_problem_is_both_trained_and_scored(desk: PipelineConfig) -> None:
    trained = {c.question for c in drawn(desk, *desk.curate.sources)}
    assert not trained & {c.question for c in drawn(desk, *(b.source for b in desk.benchmarks))}


def test_no_right_solution_is_cut_off_and_all_fit_into_the_window(desk: PipelineConfig) -> None:
    longest: dict[str, Candidate] = {}
    for benchmark in desk.benchmarks:  # of the largest level, the longest question has about the longest solution
        rows = drawn(desk, benchmark.source)
        longest[benchmark.name] = max(rows, key=lambda c: (c.rating or 0.0, len(c.question)))
    budget = desk.evaluate.sampling.max_new_tokens
    assert isinstance(desk.model, TinyModelConfig)
    for candidate in longest.values():
        prompt, solution = num_tokens(desk, candidate)
        assert solution <= budget
        assert prompt + budget <= desk.model.max_position_embeddings
