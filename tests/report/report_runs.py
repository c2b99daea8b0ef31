"""Runs for the report's tests: small real artifact folders, written by the same code that stages use."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from klear_core.artifacts.manifest import ArtifactRef, InputRecord, LedgerStep, Manifest, fingerprint
from klear_core.artifacts.records import write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.evaluate import EvaluateConfig, EvaluateSamplingConfig, TorchEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings
from klear_core.evaluate.compare.paired import PairedComparison
from klear_core.metrics import MetricsFile
from klear_core.pipeline.graph import stages_of
from klear_core.report.run.facts import ComparedModels, ReportInputs, RunInfo, StageFolder
from klear_core.scores import DecodingProfile, DifficultyScore, EvalReport, PassAtK, Range, Score, write_reports
from klear_core.types import Difficulty, EvalSample, Outcome, Verdict

WHEN = datetime(2026, 3, 14, 9, 26, 53, tzinfo=UTC)
NUM_PROBLEMS = 256
AVG = {"base": 0.0, "sft": 0.6709, "rl": 0.9775}
BROKEN_BY_RL = 3
GREEDY = {"base": 0.0, "sft": 0.703125, "rl": 0.99609375}
SAMPLING = EvaluateSamplingConfig(temperature=1.0, top_p=1.0, max_new_tokens=96)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What a stage of the fixture leaves."""

    kind: str
    settings: Settings
    inputs: Sequence[tuple[str, ArtifactRef]] = ()
    counts: Mapping[str, int | float] | None = None
    ledger: tuple[LedgerStep, ...] = ()
    notes: tuple[str, ...] = ()
    wall_s: float = 1.0


def config() -> PipelineConfig:
    bench = BenchmarkConfig(
        name="heldout", source=ProceduralSource(split="heldout", num_problems=NUM_PROBLEMS), num_samples=4
    )
    return PipelineConfig(name="laptop", seed=3, benchmarks=(bench,), evaluate=EvaluateConfig(sampling=SAMPLING))


def publish(store: LocalStore, stage: str, made: Made, write: object = None) -> ArtifactRef:
    inputs = tuple(InputRecord(kind=ref.kind, fingerprint=ref.fingerprint, role=role) for role, ref in made.inputs)
    digest = fingerprint(made.kind, 1, made.settings, inputs)
    with store.create(made.kind, digest) as slot:
        if callable(write):
            write(slot.workdir)
        return slot.publish(
            Manifest(
                kind=made.kind,
                fingerprint=digest,
                stage=stage,
                code_version=1,
                config=made.settings.model_dump(mode="json"),
                result_config=made.settings.model_dump(mode="json"),
                inputs=inputs,
                git_commit="4f2a9c1d7be0835566aa0192c3d4e5f60718293a",
                git_dirty=False,
                versions={"python": "3.11.9", "torch": "2.13.0", "transformers": "5.19.0", "ray": "2.60.0"},
                seeds={"run": 3},
                counts=dict(made.counts or {}),
                ledger=made.ledger,
                notes=made.notes,
                mlflow_run_id="9d3c0b7a51e24b6f8a1d2c3e4f506172",
                created_at=WHEN,
                attempts=1,
                wall_s=made.wall_s,
            )
        )


def score(value: float, *, half: float = 0.03, num_samples: int = 4 * NUM_PROBLEMS) -> Score:
    low, high = max(0.0, value - half), min(1.0, value + half)
    rerun = Range(low=max(0.0, value - half / 2), high=min(1.0, value + half / 2))
    return Score(
        value=value,
        new_problems=Range(low=low, high=high),
        rerun=rerun,
        num_problems=NUM_PROBLEMS,
        num_samples=num_samples,
    )


def eval_report(label: str) -> EvalReport:
    avg = AVG[label]
    levels = (Difficulty.EASY, Difficulty.MEDIUM, Difficulty.HARD)
    return EvalReport(
        benchmark="heldout",
        decoding=DecodingProfile(
            sampling=SAMPLING, engine=TorchEngineConfig(), seed_policy="one seed per problem and sample"
        ),
        seed=3,
        confidence=0.95,
        num_problems=NUM_PROBLEMS,
        num_samples=4,
        avg=score(avg, half=0.026 if avg < 0.9 else 0.011),
        pass_at=tuple(PassAtK(k=k, score=score(1 - (1 - avg) ** k)) for k in (1, 2, 4)),
        greedy=score(GREEDY[label], half=0.055 if 0 < avg < 0.9 else 0.01, num_samples=NUM_PROBLEMS),
        truncated_frac=0.998 if label == "base" else 0.0012,
        greedy_truncated_frac=1.0 if label == "base" else 0.0,
        mean_tokens=95.7 if label == "base" else 38.4,
        unscored={Outcome.TIMED_OUT: 2} if label == "sft" else {},
        greedy_unscored={},
        unscored_problems=(),
        by_difficulty=tuple(
            DifficultyScore(
                difficulty=level,
                num_problems=n,
                avg=score(max(0.0, min(1.0, avg + (0.18 - 0.19 * i) * (avg > 0) * (1 - avg) * 3)), half=0.04),
                greedy=None,
            )
            for i, (level, n) in enumerate(zip(levels, (64, 64, 128), strict=True))
        ),
    )


def samples(label: str, seed: int = 0) -> list[EvalSample]:
    """Greedy and first sampled answers to 40 chain problems, right as often as the model is good."""
    rows = []
    for i in range(40):
        draw = random.Random(f"{seed}-{i}")
        numbers = [draw.randrange(10) for _ in range(5)]
        question = f"{numbers[0]}+{numbers[1]}*{numbers[2]}-{numbers[3]}*{numbers[4]} mod 10 = ?"
        truth = ((numbers[0] + numbers[1]) * numbers[2] - numbers[3]) * numbers[4] % 10
        is_right = draw.random() < AVG[label] and not (label == "rl" and i == BROKEN_BY_RL)
        said = truth if is_right else (truth + 3) % 10
        steps = "\n".join(
            [f"{numbers[0]}+{numbers[1]}={(numbers[0] + numbers[1]) % 10}"] * (80 if i == BROKEN_BY_RL else 4)
        )
        text = "\x00\u202e9~~q" * 16 if label == "base" else f"<think>\n{steps}\n</think>\n\n\\boxed{{{said}}}"
        sample = EvalSample(
            benchmark="heldout",
            problem_id=f"{i:016x}",
            question=question,
            difficulty=Difficulty.HARD if i % 2 else Difficulty.EASY,
            decoding="greedy",
            sample_idx=0,
            response=text,
            num_tokens=len(text),
            finish_reason="length" if label == "base" else "stop",
            verdict=Verdict(outcome=Outcome.NO_ANSWER if label == "base" else Outcome.SCORED, score=float(is_right)),
        )
        rows += [sample, replace(sample, decoding="sampled")]
    return rows


def write_evaluation(label: str, folder: Path, rows: list[EvalSample] | None = None) -> None:
    write_shard(folder / "samples" / "00000-of-00001.parquet", samples(label) if rows is None else rows)
    write_reports(folder, (eval_report(label),))


def write_sft_metrics(folder: Path, steps: int = 1000) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    draw = random.Random(1)
    for t in range(1, steps + 1):
        loss = 0.28 + 4.5 * math.exp(-t / 60) + draw.gauss(0, 0.02)
        row = {
            "sft/loss/train": loss,
            "sft/grad/norm": 0.3 + 3 * math.exp(-t / 80) + abs(draw.gauss(0, 0.1)),
            "sft/batch/fill": 0.97,
        }
        row["sft/optim/lr"] = 4e-3 * min(1, t / 50) * (0.05 + 0.95 * (1 + math.cos(math.pi * t / steps)) / 2)
        row["sft/time/tokens_per_s"] = 24000 + draw.gauss(0, 600)
        if t % 100 == 0:
            row["sft/loss/validation"] = loss + 0.01
        file.append(row, step=t)


def write_rl_metrics(folder: Path, steps: int = 80) -> None:
    file = MetricsFile(folder / "metrics.jsonl")
    draw = random.Random(2)
    for t in range(1, steps + 1):
        rate = 0.98 - 0.31 * math.exp(-t / 22) + draw.gauss(0, 0.012)
        row = {
            "rl/reward/mean": 2 * rate - 1,
            "rl/pass/rate": min(1.0, rate),
            "rl/entropy/mean": 0.05 + 0.2 * math.exp(-t / 30) + abs(draw.gauss(0, 0.005)),
            "rl/clip/low_frac": abs(draw.gauss(0.0002, 0.0002)),
            "rl/clip/high_frac": abs(draw.gauss(0.0004, 0.0002)),
            "rl/clip/dual_frac": 0.0,
            "rl/clip/pull_frac": abs(draw.gauss(0.002, 0.001)),
            "rl/response/mean_tokens": 38 + draw.gauss(0, 0.6),
            "rl/response/max_tokens": 60.0 + draw.randrange(6),
            "rl/response/truncated_frac": abs(draw.gauss(0, 0.001)),
            "rl/grad/norm": math.nan if t == 40 else abs(draw.gauss(0.45, 0.1)),
            "rl/grad/max": abs(draw.gauss(0.8, 0.2)),
            "rl/groups/asked": 32.0,
            "rl/groups/kept": float(round(6 + 18 * math.exp(-t / 30) + draw.gauss(0, 1.2))),
            "rl/judge/failed_frac": 0.0,
            "rl/mismatch/k3": abs(draw.gauss(0, 2e-7)),
            "rl/staleness/mean": 0.0,
            "rl/staleness/max": 0.0,
            "rl/time/rollout_s": 0.42 + abs(draw.gauss(0, 0.03)),
            "rl/time/wait_s": 0.46,
            "rl/time/train_s": 0.38,
            "rl/time/sync_s": 0.02,
            "rl/ratio/max": 1.2 + abs(draw.gauss(0, 0.3)),
        }
        file.append(row, step=t)


def ledger(step: str, unit: str, num_in: int, dropped: Mapping[str, int], **noted: int) -> LedgerStep:
    return LedgerStep(
        step=step, unit=unit, num_in=num_in, num_out=num_in - sum(dropped.values()), dropped=dict(dropped), noted=noted
    )


def differences() -> tuple[ComparedModels, ...]:
    def one(
        before: str,
        after: str,
        value: float,
        low: float,
        high: float,
        decoding: Literal["sampled", "greedy"] = "sampled",
    ) -> ComparedModels:
        scores = PairedComparison(
            benchmark="heldout",
            decoding=decoding,
            num_problems=NUM_PROBLEMS,
            num_unpaired=0,
            before=0,
            after=0,
            difference=value,
            rerun=Range(low=(value + low) / 2, high=(value + high) / 2) if decoding == "sampled" else None,
            new_problems=Range(low=low, high=high),
            floor_binds=False,
            p=1e-9,
            p_corrected=1e-9,
            num_changed=200,
            confidence=0.95,
            is_same_decoding=True,
        )
        return ComparedModels(before=before, after=after, scores=scores)

    return (
        one("base", "sft", 0.6709, 0.643, 0.697),
        one("base", "sft", 0.703125, 0.645, 0.758, "greedy"),
        one("sft", "rl", 0.3066, 0.279, 0.336),
        one("sft", "rl", 0.29296875, 0.238, 0.351, "greedy"),
        one("base", "rl", 0.9775, 0.965, 0.987),
    )


def laptop_run(root: Path) -> ReportInputs:
    """A finished run as the laptop profile leaves it."""
    store, cfg = LocalStore(root), config()
    benchmarks = publish(
        store, "benchmarks", Made(kind="benchmarks", settings=cfg.benchmarks[0], counts={"problems": 256}, wall_s=0.3)
    )
    curated = (
        ledger("dedup", "problem", 8192, {"exact_duplicate": 41}),
        ledger("decontaminate", "problem", 8151, {"shares_ngram": 7, "too_long": 3}),
    )
    curate = publish(
        store,
        "curate",
        Made(
            kind="curate",
            settings=cfg.curate,
            inputs=[("benchmarks", benchmarks)],
            counts={"problems": 8141},
            ledger=curated,
            wall_s=1.4,
        ),
    )
    base = publish(store, "base", Made(kind="base", settings=cfg.model, counts={"parameters": 169_664}, wall_s=0.9))
    traced = (ledger("select", "trace", 16_282, {"no_answer": 12, "judge_failed": 4}, wrong_but_kept=5_113),)
    distill = publish(
        store,
        "distill",
        Made(
            kind="distill",
            settings=cfg.distill,
            inputs=[("problems", curate)],
            counts={"traces": 16_266},
            ledger=traced,
            wall_s=11.2,
        ),
    )
    trained = (ledger("length", "trace", 16_266, {"over_long": 2}),)
    sft = publish(
        store,
        "sft",
        Made(
            kind="sft",
            settings=cfg.sft,
            inputs=[("model", base), ("traces", distill)],
            counts={"steps": 1000, "tokens": 1_853_440},
            ledger=trained,
            wall_s=74.8,
        ),
        write_sft_metrics,
    )
    rolled = (
        ledger("judge", "rollout", 20_480, {"timed_out": 3}),
        ledger("group_filter", "group", 2_560, {"all_right": 1_311, "all_wrong": 23}),
    )
    rl = publish(
        store,
        "rl",
        Made(
            kind="rl",
            settings=cfg.rl,
            inputs=[("model", sft), ("problems", curate)],
            counts={"steps": 80, "rollouts": 20_480},
            ledger=rolled,
            notes=("Judged with less isolation than the default: verify.sandbox is rlimits-only.",),
            wall_s=48.1,
        ),
        write_rl_metrics,
    )
    evaluations = []
    for label, model in (("base", base), ("sft", sft), ("rl", rl)):
        made = Made(
            kind="evaluate",
            settings=cfg.evaluate,
            inputs=[("model", model), ("benchmarks", benchmarks)],
            counts={"answers": 1280},
            ledger=(ledger("judge", "answer", 1280, {"timed_out": 2} if label == "sft" else {}, truncated=3),),
            wall_s=4.0,
        )
        ref = publish(store, f"evaluate_{label}", made, lambda folder, label=label: write_evaluation(label, folder))
        evaluations.append(stage_folder(f"evaluate_{label}", ref.path))
    built = {"benchmarks": benchmarks, "curate": curate, "base": base, "distill": distill, "sft": sft, "rl": rl}
    return ReportInputs(
        run=RunInfo(
            name="laptop-seed3-brisk-otter",
            profile="laptop",
            started_at=WHEN.isoformat(),
            git_commit="4f2a9c1d7be0835566aa0192c3d4e5f60718293a",
            links={
                "Prefect flow run": "0f5d8f7e-7c1b-4d0e-9a55-2f6f0c1d9b3a",
                "MLflow run": "9d3c0b7a51e24b6f8a1d2c3e4f506172",
            },
        ),
        config=cfg,
        pipeline=stages_of(cfg),
        stages=(
            *(stage_folder(name, ref.path, was_reused=name in ("benchmarks", "curate")) for name, ref in built.items()),
            *evaluations,
        ),
        differences=differences(),
    )


def with_stage(run: ReportInputs, stage: StageFolder) -> ReportInputs:
    """The run with the stage of the same name replaced."""
    return replace(run, stages=tuple(stage if s.stage.name == stage.stage.name else s for s in run.stages))


def stage_folder(name: str, folder: Path | None, **facts: object) -> StageFolder:
    """The folder of the run's stage of this name."""
    (stage,) = [stage for stage in stages_of(config()) if stage.name == name]
    return StageFolder(stage=stage, folder=folder, **facts)  # type: ignore[arg-type]
