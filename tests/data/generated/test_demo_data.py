"""The demo trains on chains of every length up to eight operations and is scored on as long and on longer ones."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from klear_core.config.data import ProceduralSource
from klear_core.config.distill import ProceduralTeacherConfig
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import TinyModelConfig
from klear_core.data.candidates import Candidate, problem_from
from klear_core.data.curation.decontaminate import Decontaminator, Protected
from klear_core.data.curation.normalise import tokens_of
from klear_core.data.generated.chains import generate_chains, parse_chain
from klear_core.distill.teachers.procedural import ProceduralTeacher
from klear_core.prompts import build_byte_tokenizer, encode_response, render_prompt, render_response
from klear_core.types import TeacherReply


@pytest.fixture(scope="module")
def demo() -> PipelineConfig:
    return load_profile(Path(__file__).parents[3] / "configs" / "laptop", [])


def chains(demo: PipelineConfig, *sources: object) -> list[Candidate]:
    return [
        c for source in sources if isinstance(source, ProceduralSource) for c in generate_chains(source, seed=demo.seed)
    ]


def num_by_length(problems: list[Candidate]) -> Counter[int]:
    return Counter(len(parse_chain(c.question).steps) for c in problems)


def test_every_trained_length_is_scored_and_the_second_benchmark_holds_longer_ones_alone(demo):
    trained = num_by_length(chains(demo, *demo.curate.sources))
    as_long, longer = (num_by_length(chains(demo, b.source)) for b in demo.benchmarks)
    assert [b.name for b in demo.benchmarks] == ["heldout", "longer_than_trained"]
    assert (set(trained), trained.total()) == (set(range(1, 9)), 8192)
    assert as_long == dict.fromkeys(range(1, 9), 32)
    assert longer == dict.fromkeys(range(9, 13), 32)


def test_no_problem_is_both_trained_and_scored_and_a_shared_gram_costs_next_to_none(demo):
    trained = chains(demo, *demo.curate.sources)
    scored = chains(demo, *(b.source for b in demo.benchmarks))
    assert not {c.question for c in trained} & {c.question for c in scored}
    protected = [Protected(benchmark="any", question_id=c.problem_id, question=c.question) for c in scored]
    decontaminator = Decontaminator(demo.curate.decontaminate, protected)
    leaks = decontaminator.leaks_in(trained, [tokens_of(c.question) for c in trained])
    assert sum(leak is not None and leak.is_dropped for leak in leaks) <= 2


def test_a_right_answer_to_the_longest_problem_is_not_cut_off(demo):
    longest = max(chains(demo, demo.benchmarks[-1].source), key=lambda c: len(c.question))
    faultless = ProceduralTeacher(ProceduralTeacherConfig(slip_rate=0, blind_spot_rate=0))
    problem = problem_from(longest, demo.curate.difficulty)
    reply = asyncio.run(faultless.sample(problem, sample_idx=0, seed=0)).result
    assert isinstance(reply, TeacherReply)
    tokenizer = build_byte_tokenizer()
    num_tokens = len(encode_response(tokenizer, render_response(reply.reasoning, reply.answer)))
    assert num_tokens == 87
    assert num_tokens <= demo.evaluate.sampling.max_new_tokens
    assert isinstance(demo.model, TinyModelConfig)
    window = demo.model.max_position_embeddings
    assert len(render_prompt(tokenizer, longest.question)) + demo.evaluate.sampling.max_new_tokens <= window
