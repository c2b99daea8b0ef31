"""One command enters the graph with traces by Hub id and a model by folder, and with a model alone; a second one reuses all."""

import json
import shutil
from pathlib import Path

import pytest
from hub_server import REVISION, hub
from klear_command import FEW_PROBLEMS, start

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.store import LocalStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

SMALL = (*FEW_PROBLEMS, "sft.max_steps=2", "rl.num_steps=1", "rl.rollout.groups_per_step=2")


def run(workspace: Path, *overrides: str, log: Path, until: str = "report") -> str:
    settings = [part for o in (*SMALL, f"workspace.root={workspace}", *overrides) for part in ("--set", o)]
    command = start("run", "smoke", "--until", until, *settings, log=log)
    assert command.wait() == 0, command.output
    return command.output


def made(workspace: Path) -> dict[str, Manifest]:
    manifests = [read_manifest(folder) for folder in LocalStore(workspace / "artifacts").folders()]
    return {manifest.stage: manifest for manifest in manifests}


def traces() -> bytes:
    rows = []
    for a in range(48):
        question = {"role": "user", "content": f"mod 6: {a % 6},+{a // 6}=?"}
        answer = {"role": "assistant", "content": f"<think>\nhm\n</think>\n\n\\boxed{{{(a % 6 + a // 6) % 6}}}"}
        rows.append(json.dumps({"messages": [question, answer]}))
    return "\n".join(rows).encode()


def test_sft_on_given_traces_then_rl_from_its_model_in_another_workspace_then_an_evaluation_alone(
    fresh: Path, tmp_path: Path
):
    other, log = shutil.copytree(fresh, tmp_path / "other"), tmp_path / "log"
    with hub("some/traces", {"train.jsonl": traces(), "README.md": b"---\nlicense: mit\n---\n"}) as (endpoint, _):
        given = f"given.distill={{repo='some/traces', revision='{REVISION}'}}"
        at = (f"given.distill.runtime.endpoint={endpoint}", f"given.distill.runtime.cache_dir={tmp_path / 'cache'}")
        told = run(fresh, given, *at, log=log, until="sft")
    assert f"to download: some/traces at {REVISION[:12]}: " in told
    by_stage = made(fresh)
    assert by_stage["distill"].given is not None
    assert (by_stage["distill"].given.origin, by_stage["distill"].given.licence) == ("some/traces@0123456", "mit")
    assert by_stage["distill"].counts["traces"] == 48
    (sft,) = LocalStore(fresh / "artifacts").folders("sft")

    output = run(other, f"given.sft={sft / 'model'}", log=log)
    assert "warning evaluate" not in output  # its lineage shows that it was compared with this benchmark
    again = made(other)
    assert set(again) == {"sft", "benchmarks", "curate", "rl", "evaluate_sft", "evaluate_rl", "report"}
    weights = {file.path: file.sha256 for file in by_stage["sft"].files}["model/model.safetensors"]
    assert again["sft"].given is not None
    assert weights in {file.sha256 for file in again["sft"].given.files}
    assert "all stages reused" in run(other, f"given.sft={sft / 'model'}", log=log)

    alone = run(other, f"given.evaluate={sft / 'model'}", log=log)
    assert "Model, given" in alone
    assert set(made(other)) == {*again}  # the score is the one that is there; only the report is new
