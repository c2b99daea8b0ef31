"""Manifests of artifacts that nobody made."""

from datetime import UTC, datetime

from klear_core.artifacts.manifest import LedgerStep, Manifest


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
