"""A store with benchmarks, a model and judged answers to them, as a run leaves it; nobody sampled them."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from klear_core.artifacts.manifest import ArtifactRef, GivenRecord, InputRecord, Manifest, read_manifest
from klear_core.artifacts.records import write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig
from klear_core.config.stage import EvaluateJob
from klear_core.config.train import HfModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.evaluate.counts import tally
from klear_core.evaluate.score import make_report
from klear_core.metrics import NullTelemetry
from klear_core.scores import JudgeRecord, TemplateScore, write_reports
from klear_core.train.base_model import take_model
from klear_core.types import Difficulty, Domain, EvalSample, MathReference, Outcome, Problem, Verdict

RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0, detail="answer matches the reference")
WRONG = Verdict(outcome=Outcome.SCORED, score=0.0, detail="answer does not match the reference")
SILENT = Verdict(outcome=Outcome.NO_ANSWER, score=0.0, detail="no </think>")
JUDGE = JudgeRecord(settings=VerifyConfig(), cpu="", num_cores=2, math_workers=2, code_workers=2)
PAPERS_SAMPLING = EvaluateSamplingConfig()
UNJUDGED = Verdict(outcome=Outcome.JUDGE_FAILED, score=0.0, detail="worker died")


def problem(number: int, answer: str = "") -> Problem:
    """The problem whose answer is its number, unless another is given."""
    return Problem(
        problem_id=f"{number:016x}",
        source="toy",
        domain=Domain.MATH,
        question=f"What is {number}?",
        reference=MathReference(answers=(answer or str(number),)),
        difficulty=Difficulty.EASY,
    )


def sample(number: int, idx: int, response: str, verdict: Verdict, *, finish: str = "stop") -> EvalSample:
    return EvalSample(
        benchmark="toy",
        problem_id=f"{number:016x}",
        question=f"What is {number}?",
        difficulty=Difficulty.EASY,
        decoding="sampled",
        sample_idx=idx,
        response=response,
        num_tokens=len(response),
        finish_reason=finish,  # type: ignore[arg-type]
        verdict=verdict,
    )


def said(number: int | str) -> str:
    return f"<think>\nsteps\n</think>\n\\boxed{{{number}}}"


def evaluation(
    root: Path,
    samples: Sequence[EvalSample],
    *,
    stage: str = "evaluate_rl",
    model: str = "rl",
    made: ArtifactRef | None = None,
    seed: int = 0,
    files: Path | None = None,
    judged: bool = False,
    templates: Sequence[TemplateScore] = (),
    worded: Mapping[str, Sequence[EvalSample]] = MappingProxyType({}),
    corrected: Mapping[int, str] = MappingProxyType({}),
    benchmark: str = "toy",
    sampling: EvaluateSamplingConfig = PAPERS_SAMPLING,
) -> ArtifactRef:
    """Publish benchmarks, a model of these files, and the evaluation with these samples; return the evaluation.

    `made` is the model if it is published already.
    `judged` says that the report has a record of the judge. `worded` has the answers to prompt templates by name,
    `corrected` the references of problems by number that are not as usual.
    """
    store = LocalStore(root / "artifacts")
    numbers = sorted({int(s.problem_id, 16) for s in samples})
    problems = [problem(number, corrected.get(number, "")) for number in numbers]
    num_samples = max(s.sample_idx for s in samples) + 1
    source = ProceduralSource(split="heldout", num_problems=len(problems))
    bench = BenchmarkConfig(name=benchmark, source=source, num_samples=num_samples)
    asked = EvaluateConfig(templates={name: f"{name}: {{question}}" for name in worded}, sampling=sampling)
    job = EvaluateJob(seed=seed, evaluate=asked, verify=VerifyConfig(), benchmarks=(bench,))
    benchmarks = _publish(store, "benchmarks", "benchmarks", ("c" if corrected else "b") * 20, (), problems=problems)
    made = made or made_model(root, model=model, seed=seed, files=files)
    inputs = [("model", made), ("benchmarks", benchmarks)]
    fingerprint = f"e{model}{seed}".ljust(20, "0")
    with store.create("evaluate", fingerprint) as slot:
        if slot.ref is not None:
            return slot.ref
        write_shard(slot.workdir / "samples" / f"{benchmark}-00000-of-00001.parquet", samples)
        for name, answers in worded.items():
            write_shard(slot.workdir / "templates" / name / "toy-00000-of-00001.parquet", answers)
        report = make_report(
            tally(samples, problems),
            EvaluateConfig(sampling=sampling),
            benchmark=benchmark,
            num_samples=num_samples,
            seed=seed,
            judge=JUDGE if judged else None,
        )
        write_reports(slot.workdir, (report.model_copy(update={"templates": tuple(templates)}),))
        return slot.publish(_manifest(stage, "evaluate", fingerprint, inputs, config=job.model_dump(mode="json")))


def made_model(root: Path, *, model: str = "rl", seed: int = 0, files: Path | None = None) -> ArtifactRef:
    """Publish the model of a stage, in the folder `model` of these files."""
    store = LocalStore(root / "artifacts")
    return _publish(store, model, "rl", f"{model}{seed}".ljust(20, "0"), (), files=files)


def given_model(root: Path, folder: Path, *, work: Path) -> ArtifactRef:
    """Publish the pointer to a Hugging Face folder, as the stage of a given model does."""
    work.mkdir()
    take = take_model(HfModelConfig(path=str(folder)), licence="", workdir=work, telemetry=NullTelemetry())
    store = LocalStore(root / "artifacts")
    return _publish(store, "model", "given_model", "a" * 20, (), files=work, given=take.given)


def published_report(root: Path, stages: Mapping[str, ArtifactRef], config: Mapping[str, object]) -> Path:
    """Publish the report of a run with these stages and their models, and return its folder."""
    store = LocalStore(root / "artifacts")
    refs = dict(stages)
    for name, ref in stages.items():
        for record in read_manifest(ref.path).inputs:
            if record.role == "model":
                found = store.find(record.kind, record.fingerprint)
                assert found is not None
                refs[name.removeprefix("evaluate_")] = found
    fingerprint = f"f{config.get('seed', 0)}".ljust(20, "0")
    with store.create("report", fingerprint) as slot:
        return slot.publish(
            _manifest("report", "report", fingerprint, list(refs.items()), {"config": dict(config)})
        ).path


def _publish(
    store: LocalStore,
    stage: str,
    kind: str,
    fingerprint: str,
    inputs: Sequence[tuple[str, ArtifactRef]],
    *,
    problems: Sequence[Problem] = (),
    files: Path | None = None,
    given: GivenRecord | None = None,
) -> ArtifactRef:
    with store.create(kind, fingerprint) as slot:
        if slot.ref is not None:
            return slot.ref
        if problems:
            write_shard(slot.workdir / "toy" / "00000-of-00001.parquet", problems)
        if files is not None:
            shutil.copytree(files, slot.workdir, dirs_exist_ok=True)
        return slot.publish(_manifest(stage, kind, fingerprint, inputs).model_copy(update={"given": given}))


def _manifest(
    stage: str, kind: str, fingerprint: str, inputs: Sequence[tuple[str, ArtifactRef]], config: dict | None = None
) -> Manifest:
    return Manifest(
        kind=kind,
        fingerprint=fingerprint,
        stage=stage,
        code_version=1,
        config=config or {},
        result_config={},
        inputs=tuple(InputRecord(kind=ref.kind, fingerprint=ref.fingerprint, role=role) for role, ref in inputs),
        git_commit=None,
        git_dirty=False,
        versions={},
        seeds={},
        counts={},
        ledger=(),
        notes=(),
        mlflow_run_id=None,
        created_at=datetime(2026, 3, 14, tzinfo=UTC),
        attempts=1,
        wall_s=1.0,
    )
