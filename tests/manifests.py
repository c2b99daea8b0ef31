"""Manifests of artifacts that nobody made."""

from collections.abc import Collection
from datetime import UTC, datetime

from klear_core.artifacts.manifest import ArtifactId, LedgerStep, Manifest, fingerprint
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import result_settings
from klear_core.pipeline.graph import input_records, open_store, stages_of


def manifest(kind: str = "sft", fingerprint: str = "f1", **changes) -> Manifest:
    """Of three rows it read, two are there; what a test cares about it says in `changes`."""
    fields = {
        "kind": kind,
        "fingerprint": fingerprint,
        "stage": kind,
        "code_version": 1,
        "config": {"seed": 1},
        "result_config": {"seed": 1},
        "inputs": (),
        "git_commit": None,
        "git_dirty": False,
        "versions": {},
        "seeds": {"run": 1},
        "counts": {"rows": 2},
        "ledger": (LedgerStep(step="dedup", unit="problem", num_in=3, num_out=2, dropped={"same_text": 1}),),
        "notes": (),
        "mlflow_run_id": None,
        "created_at": datetime(2026, 1, 1, tzinfo=UTC),
        "attempts": 1,
        "wall_s": 0.5,
    }
    return Manifest.model_validate(fields | changes)


def publish(cfg: PipelineConfig, *names: str, older: Collection[str] = (), **measured: object) -> None:
    """Put empty artifacts where these stages' results would be; kinds in `older` as the code version before made them."""
    ids: dict[str, ArtifactId] = {}
    for stage in stages_of(cfg):
        inputs = input_records(stage.job, {role: ids[n] for role, n in stage.inputs.items()}, cfg.workspace)
        version = stage.job.code_version - (stage.kind in older)
        own = fingerprint(stage.kind, version, stage.job, inputs)
        ids[stage.name] = ArtifactId(kind=stage.kind, fingerprint=own)
        if stage.name in names:
            with open_store(cfg.workspace).create(stage.kind, own) as slot:
                settings = {"config": stage.job.model_dump(mode="json"), "result_config": result_settings(stage.job)}
                made_by = {"stage": stage.name, "code_version": version, "created_at": datetime.now(UTC)}
                (slot.workdir / "data").write_text("1234")
                slot.publish(manifest(stage.kind, own, inputs=inputs, **settings, **made_by, **measured))
