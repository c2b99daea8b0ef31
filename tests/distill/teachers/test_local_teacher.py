"""A teacher whose weights are here: what it asks the engine, how it reads replies, and where it stands in the pipeline."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
from distill_fakes import make_problem

sys.path.append(str(Path(__file__).parents[2] / "generate"))
from completions_endpoint import MODEL, serve
from fake_engine import FakeAnswer, FakeEngine

from klear_core.artifacts.records import read_shards, write_shard
from klear_core.config.distill import DistillConfig, DistillRuntime, LocalTeacherConfig, SelectConfig
from klear_core.config.evaluate import HttpEngineConfig, PoolRuntime, SamplingConfig, TorchEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import RareYieldLimits, YieldLimits
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.distill.collect import TeacherAccess, distill
from klear_core.distill.teachers.teacher import LocalTeacher, TeacherFailure, TeacherResult
from klear_core.errors import DataError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.generate.engine import SamplingParams
from klear_core.generate.factory import EngineSpec, Sampler, start_with_endpoints
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import stages_of
from klear_core.prompts import build_byte_tokenizer
from klear_core.train.base_model import prepare_base
from klear_core.types import Dropped, TeacherReply, TeacherTrace

TINY = TinyModelConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
    max_position_embeddings=64,
)
PROBLEMS = [make_problem(i, question=f"mod 10: {i},+1,-1=?") for i in range(4)]
ANYTHING = DistillRuntime(
    complete=YieldLimits(stop_below=0), selected=RareYieldLimits(stop_below=0), traces_per_shard=8
)


def ask(
    text: str, *, max_new_tokens: int = 200, max_len: int = 10_000, **settings: object
) -> tuple[TeacherResult, FakeEngine]:
    """Return what the teacher makes of an engine's reply with this text, and the engine."""

    async def run() -> tuple[TeacherResult, FakeEngine]:
        engine = FakeEngine(lambda _prompt, _params, _index: FakeAnswer(text=text), max_len=max_len)
        cfg = LocalTeacherConfig.model_validate({"sampling": {"max_new_tokens": max_new_tokens}, **settings})
        teacher = LocalTeacher(cfg, Sampler(engine=engine, limit=2), build_byte_tokenizer(), name="r1")
        sample = await teacher.sample(PROBLEMS[1], sample_idx=0, seed=5)
        return sample.result, engine

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("text", "reasoning", "answer"),
    [
        ("<think>\n1+1=2\n</think>\n\n\\boxed{2}", "1+1=2", "\\boxed{2}"),
        ("1+1=2\n</think>\n\\boxed{2}", "1+1=2", "\\boxed{2}"),  # the template wrote the opening tag
        ("<think>\n1+1=", "1+1=", ""),
        ("it is 2", "", "it is 2"),
    ],
)
def test_tags_part_the_reply_as_those_of_a_server_do(text: str, reasoning: str, answer: str) -> None:
    result, _ = ask(text)
    assert isinstance(result, TeacherReply)
    assert (result.reasoning, result.answer, result.finish_reason) == (reasoning, answer, "stop")
    assert result.num_tokens == len(text.encode()) + 1


def test_a_reply_that_ran_out_of_tokens_says_so() -> None:
    result, _ = ask("<think>\n1+1=2\n</think>\n\n\\boxed{2}", max_new_tokens=12)
    assert isinstance(result, TeacherReply)
    assert (result.finish_reason, result.num_tokens) == ("length", 12)


def test_the_instruction_follows_the_question_and_samples_have_seeds_of_their_own() -> None:
    _, engine = ask("x", math_instruction="Think hard.")
    ((prompt, params),) = engine.requests
    text = build_byte_tokenizer().decode(prompt)
    assert f"{PROBLEMS[1].question}\n\nThink hard.<|im_end|>" in text
    assert (params.temperature, params.top_p) == (0.6, 0.95)
    assert ask("x")[1].requests[0][1].seed == params.seed
    assert ask("x", math_instruction="")[1].requests[0][0] != prompt


def test_a_question_without_room_for_a_reply_is_a_failure_by_that_name() -> None:
    result, _ = ask("x", max_len=20)
    assert isinstance(result, TeacherFailure)
    assert (result.reason, "leave room" in result.detail) == ("no_room", True)


def config(**teacher: object) -> DistillConfig:
    settings = {"kind": "local", "sampling": {"max_new_tokens": 12}, "math_instruction": "", **teacher}
    return DistillConfig.model_validate({"teacher": settings, "samples_per_problem": 2, "runtime": ANYTHING})


def run_stage(cfg: DistillConfig, tmp_path: Path, name: str, compute: EnginesAndJudges | None = None) -> Path:
    base, problems, workdir = tmp_path / "base", tmp_path / "in", tmp_path / name
    if not base.exists():
        prepare_base(TINY, seed=0, workdir=base, telemetry=NullTelemetry())
        write_shard(problems / "problems" / "a.parquet", PROBLEMS)
    access = TeacherAccess(
        model=base, model_name="tiny", compute=compute or EnginesAndJudges(section="distill.teacher")
    )
    distill(cfg, VerifyConfig(), problems=problems, seed=3, workdir=workdir, telemetry=NullTelemetry(), access=access)
    return workdir


def test_an_engine_here_samples_the_same_replies_again_and_each_is_kept(tmp_path: Path) -> None:
    cfg = config().model_copy(update={"select": SelectConfig(keep_truncated=True)})
    first, second = run_stage(cfg, tmp_path, "first"), run_stage(cfg, tmp_path, "second")
    traces = list(read_shards(first / "traces", TeacherTrace))
    assert len(traces) == 8
    # a random model does not end its reply within 12 tokens
    assert {(trace.teacher, trace.finish_reason, trace.num_tokens) for trace in traces} == {("tiny", "length", 12)}
    assert len({trace.answer for trace in traces}) == 8
    assert list(read_shards(second / "traces", TeacherTrace)) == traces


def test_replies_that_are_no_traces_are_kept_as_those_of_a_server_are(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"8 truncated.*sampling\.max_new_tokens of a local teacher"):
        run_stage(config(), tmp_path, "out")
    (journal,) = (tmp_path / "out").rglob("*.jsonl")
    assert len(journal.read_text().splitlines()) == 8


def test_endpoints_alone_can_be_the_teacher(tmp_path: Path) -> None:
    asked: list[SamplingParams] = []
    servers: list[AbstractAsyncContextManager[str]] = []  # the event loop closes it when the stage ends

    def right(prompt: tuple[int, ...], params: SamplingParams, _index: int) -> FakeAnswer:
        asked.append(params)
        number = build_byte_tokenizer().decode(prompt).partition("mod 10: ")[2].partition(",")[0]
        return FakeAnswer(text=f"<think>\nx\n</think>\n\n\\boxed{{{number}}}")

    async def start(spec: EngineSpec) -> Sampler:
        servers.append(serve(FakeEngine(right), max_model_len=1000))
        endpoint = HttpEngineConfig(base_url=await servers[0].__aenter__(), model=MODEL)
        runtime = PoolRuntime(num_engines=0, endpoints=(endpoint,))
        return await start_with_endpoints(spec, runtime=runtime, key="distill.teacher", num_here=0)

    compute = EnginesAndJudges(section="distill.teacher", start_sampler=start)
    cfg = config(sampling={"max_new_tokens": 64})
    workdir = run_stage(cfg, tmp_path, "out", compute)
    assert len(asked) == 8
    assert len({params.seed for params in asked}) == 8
    assert not list(read_shards(workdir / "dropped", Dropped))


def test_an_engine_here_and_an_endpoint_share_the_requests(tmp_path: Path) -> None:
    prepare_base(TINY, seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    spec = EngineSpec(cfg=TorchEngineConfig(), model_folder=tmp_path / "model", num_threads=1, seed=0)

    async def run() -> tuple[int, list[str], int]:
        far = FakeEngine(lambda _prompt, _params, _index: FakeAnswer(text="far"))
        async with serve(far, max_model_len=64) as base_url:
            endpoint = HttpEngineConfig(base_url=base_url, model=MODEL)
            runtime = PoolRuntime(endpoints=(endpoint,))
            sampler = await start_with_endpoints(spec, runtime=runtime, key="tag", num_here=1)
            sampling = SamplingConfig(max_new_tokens=4).model_dump()
            params = [SamplingParams(num_samples=1, seed=seed, **sampling) for seed in range(40)]
            try:
                answers = await asyncio.gather(*(sampler.engine.generate((1, 2, 3), one) for one in params))
            finally:
                await sampler.engine.close()
            return sampler.num_engines, [completion.text for (completion,) in answers], len(far.requests)

    num_engines, texts, num_far = asyncio.run(run())
    assert num_engines == 2
    assert texts.count("far") == num_far
    assert 0 < num_far < 40


def test_no_engine_and_no_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="num_engines = 0 needs endpoints"):
        PoolRuntime(num_engines=0)


def stages(**teacher: object) -> dict[str, dict[str, str]]:
    settings = {"distill": {"teacher": {"kind": "local", **teacher}}}
    return {stage.name: dict(stage.inputs) for stage in stages_of(PipelineConfig.model_validate(settings))}


def test_the_teacher_is_the_base_model_or_a_given_one_that_no_stage_scores() -> None:
    assert stages()["distill"] == {"problems": "curate", "teacher": "base"}
    given = stages(model="models/r1")
    assert given["distill"] == {"problems": "curate", "teacher": "teacher"}
    assert "evaluate_teacher" not in given
    assert list(given).index("teacher") < list(given).index("curate")  # it is downloaded before anything is spent


def test_the_place_of_the_teachers_model_changes_no_settings_of_the_result() -> None:
    jobs = []
    for place in ("here/r1", "there/r1"):
        settings = {"distill": {"teacher": {"kind": "local", "model": place}}}
        (stage,) = (s for s in stages_of(PipelineConfig.model_validate(settings)) if s.name == "distill")
        jobs.append(stage.job.model_copy(update={"runtime": None}))
    assert jobs[0] == jobs[1]
