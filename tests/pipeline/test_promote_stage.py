"""The stage `promote` in the graph: there if it is set, and never reused by its settings alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from manifests import manifest

from flows.run import intact_artifacts
from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.pipeline import Champion, PipelineConfig, PromoteConfig, WorkspaceConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import PromoteJob
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of
from klear_core.pipeline.plan import plan_stages

BENCH = BenchmarkConfig(name="b", source=ProceduralSource(split="heldout"))
OFF = PipelineConfig(benchmarks=(BENCH,))
ON = OFF.model_copy(update={"promote": PromoteConfig()})
CHAMPION = Champion(
    version=3, model="rl/a", model_uri="file:///m", evaluation="evaluate/a", evaluation_uri="file:///a", run="r"
)


def test_promote_compares_the_last_model_and_comes_before_the_report() -> None:
    *_, promote, report = stages_of(ON)
    assert (promote.name, report.name) == ("promote", "report")
    assert promote.inputs == {
        "model": "rl",
        "evaluation": "evaluate_rl",
        "benchmarks": "benchmarks",
        "first": "evaluate_base",
    }
    assert report.inputs["promote"] == "promote"


def test_it_is_off_by_default_and_changes_no_other_fingerprint(tmp_path: Path) -> None:
    assert "promote" not in OFF.model_dump()
    workspace = WorkspaceConfig(root=str(tmp_path))
    without, with_it = (fingerprints_of(stages_of(config), workspace) for config in (OFF, ON))
    changed = {name for name in with_it if with_it[name] != without.get(name)}
    assert changed == {"promote", "report"}


def test_a_margin_for_no_benchmark_and_a_rule_without_benchmarks_are_refused() -> None:
    with pytest.raises(ValueError, match=r"promote.margins: 'aime' is none of the benchmarks, which are: b"):
        PipelineConfig(benchmarks=(BENCH,), promote=PromoteConfig(margins={"aime": 3}))
    for margin in (-3, 300):  # points, as of `margin`
        with pytest.raises(ValueError, match=r"margins\.b"):
            PromoteConfig(margins={"b": margin})
    with pytest.raises(ValueError, match="promote: there are no benchmarks"):
        PipelineConfig(promote=PromoteConfig())


def decision(config: PipelineConfig, job: PromoteJob, fingerprint: str, age_h: int) -> ArtifactRef:
    """Publish a decision that was made from what the config plans, so many hours ago."""
    ids = fingerprints_of(stages_of(config), config.workspace)
    promote = next(stage for stage in stages_of(config) if stage.name == "promote")
    inputs = [
        InputRecord(kind=ids[name].kind, fingerprint=ids[name].fingerprint, role=role)
        for role, name in promote.inputs.items()
    ]
    made = manifest(
        "promote",
        fingerprint,
        inputs=tuple(inputs),
        code_version=job.code_version,
        result_config=result_settings(job),
        created_at=datetime(2026, 1, 2, tzinfo=UTC) - timedelta(hours=age_h),
    )
    with open_store(config.workspace).create("promote", fingerprint) as slot:
        return slot.publish(made)


def test_a_plan_knows_the_last_decision_and_runs_the_stage_all_the_same(tmp_path: Path) -> None:
    config = ON.model_copy(update={"workspace": WorkspaceConfig(root=str(tmp_path))})
    planned = fingerprints_of(stages_of(config), config.workspace)["promote"].fingerprint
    job = PromoteJob.of(config)
    decision(config, job.model_copy(update={"champion": CHAMPION}), "d1", age_h=2)
    decision(config, job.model_copy(update={"withdrawn": "rude"}), "d2", age_h=1)
    decision(config, PromoteJob(promote=PromoteConfig(margin=1)), "d3", age_h=0)  # another rule
    newest = fingerprints_of(stages_of(config), config.workspace)["promote"].fingerprint
    assert (newest, planned == newest) == ("d2", False)
    (plan,) = [plan for plan in plan_stages(config) if plan.stage == "promote"]
    assert (plan.action, plan.why) == ("run", "asks each time which model is champion")
    assert intact_artifacts(config, ["promote"]) is None
