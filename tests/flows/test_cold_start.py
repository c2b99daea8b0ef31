"""Commands that only look, and runs that make nothing, import nothing heavy and start no process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from evaluations import write_scores
from klear_command import ROOT
from manifests import manifest

from flows.ablate import plan_runs
from klear_core.config.grids import load_ablation
from klear_core.config.load import load_profile
from klear_core.evaluate.compare.ablation import TOKEN_SHARES
from klear_core.evaluate.compare.published import AblationTable
from klear_core.metrics import METRICS_FILE, MetricsFile
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of

HEAVY = {"torch", "transformers", "ray", "vllm", "mlflow", "prefect", "sqlalchemy", "fastapi", "math_verify"}
LOOK = """
import json, subprocess, sys
started = []
sys.addaudithook(lambda event, args: started.append(str(args[0])) if event == "subprocess.Popen" else None)
sys.argv = ["klear", *sys.argv[1:]]
from flows.cli import main
try:
    main()
    status = 0
except SystemExit as e:
    status = e.code or 0
loaded = sorted({m.partition(".")[0] for m in sys.modules})
print(json.dumps({"status": status, "loaded": loaded, "started": started}))
"""


def klear(*args: str | Path) -> tuple[dict, str]:
    """Run a command in a process of its own; returns what it did to that process, and what it printed."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW", "RAY"))}
    command = [sys.executable, "-c", LOOK, *map(str, args)]
    ended = subprocess.run(command, cwd=ROOT, env=kept, capture_output=True, text=True, check=True)
    shown, _, facts = ended.stdout.rstrip().rpartition("\n")
    return json.loads(facts), shown + ended.stderr


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A workspace in which all stages of the smoke profile up to `distill` are made."""
    config = load_profile(ROOT / "configs/smoke", [f"workspace.root={tmp_path}"])
    store = open_store(config.workspace)
    for name, own in fingerprints_of(stages_of(config), config.workspace).items():
        if name in ("benchmarks", "curate", "base", "distill"):
            with store.create(own.kind, own.fingerprint) as slot:
                (slot.workdir / "content").write_text(name)
                slot.publish(manifest(own.kind, own.fingerprint).model_copy(update={"stage": name}))
    return tmp_path


@pytest.mark.parametrize(
    "args",
    [
        ("--version",),
        ("--help",),
        ("run", "--help"),
        ("plan", "laptop", "--set", "workspace.root={}"),
        ("show", "distill", "--root", "{}"),
    ],
)
def test_commands_that_only_look_import_nothing_heavy(made: Path, args: tuple[str, ...]):
    did, shown = klear(*(arg.format(made) for arg in args))
    assert did["status"] == 0, shown
    assert not HEAVY & set(did["loaded"])


def test_a_run_that_makes_nothing_needs_neither_prefect_nor_anything_heavy(made: Path):
    did, shown = klear("run", "smoke", "--until", "distill", "--set", f"workspace.root={made}")
    assert did["status"] == 0, shown
    assert [line.split()[:2] for line in shown.splitlines() if line.startswith("  =")] == [
        ["=", stage] for stage in ("benchmarks", "curate", "base", "distill")
    ]
    assert "all stages reused" in shown
    assert not HEAVY & set(did["loaded"])
    assert [command for command in did["started"] if command != "git"] == []
    assert {f.name for f in made.iterdir()} == {"artifacts"}


GRID = """
profile = "smoke"
reference = "paper"
learning_rates = [1e-4]
seeds = [1, 2]
[variants]
paper = []
"""


def make_grid(file: Path, root: Path) -> None:
    """Write a grid of two runs, and all the artifacts that it compares."""
    file.write_text(GRID)
    cfg = load_ablation(file)
    for cell, run in plan_runs(cfg, [f"workspace.root={root}"]).items():
        store = open_store(run.config.workspace)
        for name, own in run.fingerprints().items():
            with store.create(own.kind, own.fingerprint) as slot:
                if slot.ref is not None:
                    continue  # shared by both runs, or by two evaluations
                if own.kind == "rl":
                    steps = MetricsFile(slot.workdir / METRICS_FILE)
                    steps.append(
                        dict.fromkeys((*TOKEN_SHARES.values(), "rl/ratio/max", "rl/entropy/mean"), 0.5), step=0
                    )
                if own.kind == "evaluate":
                    write_scores(slot.workdir, cell.seed / 10)
                slot.publish(manifest(own.kind, own.fingerprint).model_copy(update={"stage": name}))


def test_a_grid_that_is_made_is_compared_from_its_artifacts_alone(tmp_path: Path):
    root = tmp_path / "ws"
    make_grid(tmp_path / "small.toml", root)
    did, shown = klear("ablate", tmp_path / "small.toml", "--set", f"workspace.root={root}")
    assert did["status"] == 0, shown
    assert "2 runs; artifacts to make: none" in shown
    table = AblationTable.model_validate_json((root / "ablations" / "small.json").read_text())
    assert [(row.variant, row.score.mean) for row in table.rows] == [("paper", pytest.approx(0.15))]
    assert not HEAVY & set(did["loaded"])
    assert [command for command in did["started"] if command != "git"] == []
    assert {f.name for f in root.iterdir()} == {"artifacts", "ablations"}


def test_a_run_of_a_made_grid_that_trained_on_nothing_is_named_in_the_table(tmp_path: Path):
    root = tmp_path / "ws"
    make_grid(tmp_path / "small.toml", root)
    (metrics, _) = root.glob(f"artifacts/rl/*/{METRICS_FILE}")
    metrics.write_bytes(metrics.read_bytes().replace(b"entropy", b"ENTROPY"))  # as long as before
    did, shown = klear(
        "ablate", tmp_path / "small.toml", "--set", f"workspace.root={root}", "--set", "workspace.check_artifacts=size"
    )
    assert did["status"] == 1
    assert "trained on no token" in shown
    assert "1 of 2 runs failed" in shown
    assert not HEAVY & set(did["loaded"])


def test_a_damaged_artifact_is_not_reused_without_a_run(made: Path):
    (content,) = made.glob("artifacts/curate/*/content")
    content.write_text("CURATE")  # as long as before
    config = load_profile(ROOT / "configs/smoke", [f"workspace.root={made}"])
    from flows.run import reuse_all

    assert reuse_all(config, ("benchmarks",)) is not None
    assert reuse_all(config, ("benchmarks", "curate")) is None
    assert reuse_all(config, ("distill",)) is None  # it is made from what is damaged
    assert reuse_all(config, ("sft",)) is None


def test_a_server_that_the_user_named_lists_every_run(made: Path, monkeypatch: pytest.MonkeyPatch):
    from flows.run import reuse_all

    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    assert reuse_all(load_profile(ROOT / "configs/smoke", [f"workspace.root={made}"]), ("benchmarks",)) is None
