"""The stages that score models, and that decide whether a run's last model becomes champion in MLflow's registry."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import MANIFEST, ArtifactRef, StageSummary, read_manifest
from klear_core.artifacts.model_files import is_same_model
from klear_core.config.evaluate import ServedModelConfig
from klear_core.config.pipeline import Champion
from klear_core.config.stage import EvaluateJob, PromoteJob
from klear_core.errors import ResourceError
from klear_core.metrics import Telemetry
from klear_core.pipeline.graph import open_store, stages_of
from klear_core.pipeline.preflight.exposure import given_contamination
from tasks.model_registry import Promotion, Registry, Version, artifact_name, folder_of, open_registry
from tasks.resources import open_engines_and_judges, open_judges, read_keys
from tasks.stage import Inputs, run_stage, stage, stage_task
from tasks.tracking import RunInfo

if TYPE_CHECKING:
    from klear_core.evaluate.compare.promotion import Rival, RivalIs
    from klear_core.evaluate.sample import Benchmark

log = logging.getLogger(__name__)


@stage
def evaluate(job: EvaluateJob, inputs: Inputs, *, workdir: Path, telemetry: Telemetry) -> StageSummary:
    """Make judged answers of `model` to `benchmarks`, and scores with confidence intervals."""
    from klear_core.evaluate.run import evaluate_model

    suite = _suite_of(job, inputs)
    if isinstance(job.evaluate.engine, ServedModelConfig):
        return _evaluate_served(job, suite, workdir=workdir, telemetry=telemetry)
    model = inputs["model"].path
    with open_engines_and_judges(job.evaluate.engine, job.evaluate.runtime, model, section="evaluate") as compute:
        return evaluate_model(
            job.evaluate,
            job.verify,
            suite,
            model=model,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            compute=compute,
        )


def _suite_of(job: EvaluateJob, inputs: Inputs) -> list[Benchmark]:
    """Return the benchmarks, with the answers of earlier evaluations of the model that would be sampled again."""
    from klear_core.evaluate.sample import earlier_answers, read_suite

    model = inputs["model"]
    artifacts = model.path.parents[1]  # an artifact is at `<kind>/<fingerprint>`
    earlier = earlier_answers(artifacts, job, model=model.fingerprint)
    return read_suite(inputs["benchmarks"].path, job.benchmarks, earlier)


def _evaluate_served(
    job: EvaluateJob, suite: Sequence[Benchmark], *, workdir: Path, telemetry: Telemetry
) -> StageSummary:
    """Score a model that is served elsewhere; only its judges run here."""
    from klear_core.distill.served import evaluate_served

    with open_judges() as build_judges:
        return evaluate_served(
            job.evaluate,
            job.verify,
            suite,
            seed=job.seed,
            workdir=workdir,
            telemetry=telemetry,
            keys=read_keys([job]),
            build_judges=build_judges,
        )


# ---- promotion ----


_MAX_DECISIONS = 5
"""Most decisions of one run, if other runs keep changing the champion meanwhile."""


@stage_task
def promote(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef:
    """Compare `evaluation`, of `model`, with the champion's, or with `first`; make `model` champion if it passes."""
    from klear_core.evaluate.compare.promotion import read_decision

    registry = open_registry(info.workspace, job.promote.registered_model)
    for _ in range(_MAX_DECISIONS):
        asked = _with_registry(job, registry, inputs)
        decision = _decide(info, asked, inputs)
        if not read_decision(decision.path).is_passed:
            return decision
        model, evaluation = inputs["model"], inputs["evaluation"]
        promotion = Promotion(
            model=artifact_name(model),
            model_uri=model.uri,
            evaluation=artifact_name(evaluation),
            evaluation_uri=evaluation.uri,
            decision=artifact_name(decision),
            decision_uri=decision.uri,
            run=info.run_id,
            over=asked.champion.version if asked.champion else None,
        )
        if registry.promote(promotion):
            return decision
        log.warning("%s: another model has become champion meanwhile: deciding again", info.stage)
    raise ResourceError(f"the champion changed {_MAX_DECISIONS} times while this run decided; run it again")


def _with_registry(job: PromoteJob, registry: Registry, inputs: Inputs) -> PromoteJob:
    """Return the job with its rival and the rollback of its model from the registry, and how the model was chosen."""
    from klear_core.report.run.warnings import chosen_on

    model = artifact_name(inputs["model"])
    rival = registry.rival_of(model)
    champion = rival.as_champion() if rival else None
    found = {
        "champion": champion,
        "withdrawn": registry.withdrawn(model) or withdrawn_elsewhere(inputs["model"].path, registry.versions()),
        "chosen_on": chosen_on(inputs["model"].path),
        "best": _best_before(rival, registry.versions(), inputs["evaluation"]),
    }
    return job.model_copy(update=found)


def _best_before(rival: Version | None, versions: Sequence[Version], evaluation: ArtifactRef) -> Champion | None:
    """Return the champion before the rival with the highest mean score on these benchmarks; None if the rival's is.

    Scores are read from the manifests; a champion that was scored on other benchmarks, or whose scores are gone, or
    that was rolled back, is none.
    """
    if rival is None:
        return None
    asked = {name for name in evaluation.counts if "_avg_at_" in name}
    means: dict[int, float] = {}
    champions = {v.number: v.as_champion() for v in versions if v.promoted_at and v.rollback is None}
    for number, champion in champions.items():
        folder = folder_of(champion.evaluation_uri)
        counts = read_manifest(folder).counts if (folder / MANIFEST).is_file() else {}
        scores = [value for name, value in counts.items() if "_avg_at_" in name]
        if number <= rival.number and asked and asked == {name for name in counts if "_avg_at_" in name}:
            means[number] = sum(scores) / len(scores)
    best = max(means, key=lambda number: (means[number], number), default=rival.number)
    return champions[best] if best != rival.number else None


def withdrawn_elsewhere(model: Path, versions: Sequence[Version]) -> str:
    """Return why the same model was rolled back as another artifact, such as the one of its training; empty if it was
    not."""
    own = read_manifest(model)
    # From the newest version: the latest rollback counts.
    for version in reversed(versions):
        folder = folder_of(version.promotion.model_uri)
        is_here = (folder / MANIFEST).is_file()
        if version.rollback is not None and is_here and is_same_model(own, read_manifest(folder)):
            return version.rollback.sentence
    return ""


def _decide(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef:
    """Return the artifact of the decision: the same job and inputs give the same one."""
    champion = _champion_scores(info, job, inputs)
    best_scores = _stored(info, job.best.evaluation, job.best.evaluation_uri) if job.best else None

    def body(*, workdir: Path, telemetry: Telemetry) -> StageSummary:  # noqa: ARG001  there is nothing to measure
        from klear_core.evaluate.compare.promotion import Candidate, Contender, decide

        contender = Contender(
            model=artifact_name(inputs["model"]), evaluation=artifact_name(inputs["evaluation"]), run=info.run_id
        )
        candidate = Candidate(
            contender=contender,
            evaluation=inputs["evaluation"].path,
            contaminated=contaminated(job, inputs["model"]),
            withdrawn=job.withdrawn,
            chosen_on=job.chosen_on,
        )
        rival = _rival(info, job, inputs, champion)
        best = _champion(job.best, best_scores, is_="best champion") if job.best else None
        return decide(job.promote, candidate, rival, best=best, workdir=workdir)

    scored = {"champion": champion, "best": best_scores}
    return run_stage(info, job, {**inputs, **{role: ref for role, ref in scored.items() if ref}}, body)


def _champion_scores(info: RunInfo, job: PromoteJob, inputs: Inputs) -> ArtifactRef | None:
    """Return the champion's scores: those that made it champion, or new ones if the rule asks for it; None if gone."""
    from klear_core.evaluate.compare.promotion import are_comparable

    champion = job.champion
    if champion is None:
        return None
    found = _stored(info, champion.evaluation, champion.evaluation_uri)
    if not job.promote.score_champion or (found and are_comparable(inputs["evaluation"].path, found.path)):
        return found
    model = _stored(info, champion.model, champion.model_uri)
    if model is None:
        log.warning("the champion cannot be scored again: its model (%s) is gone", champion.model_uri)
        return found
    # At position 0, so that MLflow's list of runs still shows the score of the run's own last model.
    own = info.model_copy(update={"stage": "evaluate_champion", "position": 0})
    scores = {"model": model, "benchmarks": inputs["benchmarks"]}
    # `fn`: as a part of this task, and not as one more task of the flow run.
    return evaluate.fn(own, EvaluateJob.of(job.runtime.config), scores)


def _stored(info: RunInfo, name: str, uri: str) -> ArtifactRef | None:
    """Return the artifact `kind/fingerprint`, from this workspace or from where it was made; None if it is gone."""
    kind, _, fingerprint = name.partition("/")
    found = open_store(info.workspace).find(kind, fingerprint)
    folder = folder_of(uri)
    if found is not None or not (folder / MANIFEST).is_file():
        return found
    manifest = read_manifest(folder)
    return ArtifactRef(
        kind=manifest.kind,
        fingerprint=manifest.fingerprint,
        uri=uri,
        created_at=manifest.created_at,
        counts=manifest.counts,
    )


def _rival(info: RunInfo, job: PromoteJob, inputs: Inputs, scores: ArtifactRef | None) -> Rival | None:
    """Return the model to compare with: the champion, or without one the first model of the run if the rule asks."""
    from klear_core.evaluate.compare.promotion import Contender, Rival

    if job.champion is not None:
        return _champion(job.champion, scores, is_="champion")
    first = inputs.get("first")
    if first is None or job.promote.first == "any":
        return None
    model = next(i for i in read_manifest(first.path).inputs if i.role == "model")
    contender = Contender(model=f"{model.kind}/{model.fingerprint}", evaluation=artifact_name(first), run=info.run_id)
    return Rival(contender=contender, is_="first model of the run", evaluation=first.path)


def _champion(champion: Champion, scores: ArtifactRef | None, *, is_: RivalIs) -> Rival:
    """Return a champion as the model to compare with; `scores` is None if they are gone."""
    from klear_core.evaluate.compare.promotion import Contender, Rival

    contender = Contender(
        model=champion.model,
        evaluation=artifact_name(scores) if scores else champion.evaluation,
        run=champion.run,
        version=champion.version,
    )
    return Rival(contender=contender, is_=is_, evaluation=scores.path if scores else None)


def contaminated(job: PromoteJob, model: ArtifactRef) -> dict[str, int | None]:
    """Return the number of each benchmark's problems that overlap with the model's training data; None if unknown."""
    from klear_core.report.run.warnings import num_overlapping

    config = job.runtime.config
    found: dict[str, int | None] = dict(num_overlapping(model.path, [b.name for b in config.benchmarks]))
    own_scores = next(stage.inputs["evaluation"] for stage in stages_of(config) if stage.kind == job.kind)
    for exposure in given_contamination(config):
        # A run may score other given models, too. What is not known of their data says nothing about this model.
        if own_scores in exposure.scored_by:
            found |= {**exposure.seen, **dict.fromkeys((*exposure.missed, *exposure.unknown))}
    return found
