"""The licence of a published model is that of the given model which training started from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from klear_core.artifacts.manifest import GivenRecord, InputRecord, Manifest
from klear_core.report.run.lineage import NOT_STATED, Ancestor, own_licence


def artifact(stage: str, kind: str, licence: str = "", **inputs: Ancestor) -> Ancestor:
    records = [InputRecord(kind=a.manifest.kind, fingerprint=a.manifest.fingerprint, role=r) for r, a in inputs.items()]
    manifest = Manifest(
        kind=kind,
        fingerprint=stage.ljust(20, "0"),
        stage=stage,
        code_version=1,
        config={},
        result_config={},
        inputs=tuple(records),
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
        given=GivenRecord(origin=stage, licence=licence, files=()) if licence else None,
    )
    return Ancestor(folder=Path(stage), manifest=manifest)


def test_the_licence_of_a_given_base_comes_through_sft_and_rl() -> None:
    base = artifact("base", "base", "apache-2.0")
    sft = artifact("sft", "sft", model=base)
    rl = artifact("rl", "rl", model=sft)
    assert own_licence([base, sft, rl]) == "apache-2.0"


def test_the_licence_of_a_given_sft_model_counts_and_not_that_of_the_model_which_tagged_problems() -> None:
    tagger = artifact("base", "base", "llama3.1")
    problems = artifact("tag", "tag", model=tagger)
    sft = artifact("sft", "given_model", "mit")
    rl = artifact("rl", "rl", model=sft, problems=problems)
    assert own_licence([tagger, problems, sft, rl]) == "mit"
    assert own_licence([sft]) == "mit"


def test_nothing_is_said_where_nothing_is_known() -> None:
    made = artifact("base", "base")
    unknown = artifact("sft", "given_model", NOT_STATED)
    rl = artifact("rl", "rl", model=unknown)
    assert own_licence([made]) == ""
    assert own_licence([unknown, rl]) == ""
    assert own_licence([rl]) == ""  # its ancestor was deleted
