"""CPU seconds of the commands that look, in a workspace of 10,000 artifacts of 1,000 runs, by the index.

Each command is a process of its own: imports count. The index is made by the first command, which is measured, too.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

from klear_core.artifacts.manifest import FileRecord, InputRecord, Manifest, write_manifest
from klear_core.artifacts.run_history import RunHistory, RunRecord, RunStage
from klear_core.config.load import load_profile
from klear_core.config.stage import ReportJob
from klear_core.pipeline.graph import stages_of
from tasks.tracking import versions

ROOT = Path(__file__).parents[3]
NUM_RUNS, TARGET_S = 1_000, 2.0


def measure() -> list[Mapping[str, object]]:
    """Return a measurement for each command."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        num = make_workspace(root)
        where = ("--root", str(root))
        commands = {
            "first look, without an index": ("runs", *where),
            "klear runs": ("runs", *where),
            "klear show rl": ("show", "rl", *where),
            "klear plan smoke": ("plan", "smoke", "--set", f"workspace.root={root}"),
            "klear disk": ("disk", *where),
            "klear gc": ("gc", *where),
        }
        rows = []
        for name, command in commands.items():
            seconds = cpu_seconds(command)
            is_first = name.startswith("first")
            rows.append(
                {
                    "name": f"{name}, {num:,} artifacts",
                    "value": seconds,
                    "unit": "CPU s",
                    "target": "none" if is_first else f"< {TARGET_S:g}",
                    "ok": is_first or seconds < TARGET_S,
                    "versions": versions(),
                }
            )
        return rows


def make_workspace(root: Path) -> int:
    """Write manifests and records as runs of the laptop profile leave them, without content; return the artifacts."""
    config = load_profile(ROOT / "configs" / "laptop", [])
    stages = stages_of(config)
    settings = {stage.name: stage.job.model_dump(mode="json") for stage in stages}
    history, num = RunHistory.of(root), 0
    for run in range(NUM_RUNS):
        at = datetime.now(UTC) - timedelta(days=100) + timedelta(minutes=run)
        ids = {stage.name: f"{run:06d}{i:014d}" for i, stage in enumerate(stages)}
        for stage in stages:
            inputs = [
                InputRecord(kind=next(s.kind for s in stages if s.name == name), fingerprint=ids[name], role=role)
                for role, name in stage.inputs.items()
            ]
            folder = root / "artifacts" / stage.kind / ids[stage.name]
            folder.mkdir(parents=True)
            files = tuple(FileRecord(path=f"file{i}", size=1000, sha256="0" * 64) for i in range(8))
            facts = {
                "kind": stage.kind, "fingerprint": ids[stage.name], "stage": stage.name, "code_version": 1,
                "config": settings[stage.name], "result_config": settings[stage.name], "inputs": tuple(inputs),
                "git_commit": None, "git_dirty": False, "versions": {}, "seeds": {}, "counts": {"rows": 2},
                "ledger": (), "notes": (), "mlflow_run_id": None, "created_at": at, "attempts": 1, "wall_s": 1.0,
                "files": files,
            }  # fmt: skip
            write_manifest(folder, Manifest.model_validate(facts))
            num += 1
        planned = tuple(RunStage(name=s.name, kind=s.kind, fingerprint=ids[s.name], state="made") for s in stages)
        record = RunRecord(
            run_id=f"{run:08x}", name=f"laptop-seed{run}", profile="laptop", state="done", started_at=at,
            updated_at=at, host="", pid=0, settings={"seed": str(run)}, stages=planned,
        )  # fmt: skip
        history.folder(record.run_id).mkdir(parents=True)
        history.write(record)
    assert any(stage.kind == ReportJob.kind for stage in stages)
    return num


def cpu_seconds(command: tuple[str, ...]) -> float:
    """Return the CPU seconds of `klear COMMAND`, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT", "MLFLOW"))}
    run = [sys.executable, "-c", "from flows.cli import main; main()", *command]
    subprocess.run(run, cwd=ROOT, env=kept, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    for row in measure():
        print(json.dumps(row))
