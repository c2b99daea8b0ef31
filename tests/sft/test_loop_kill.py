"""A real SIGKILL in a real process, at moments nobody chose."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sft_traces import config, inputs

from klear_core.metrics import NullTelemetry
from klear_core.sft.loop import train_sft

SCRIPT = """
import sys
import time
from pathlib import Path
from klear_core.config.train import SftConfig
from klear_core.metrics import MetricsFile
from klear_core.sft.loop import train_sft

class Telemetry(MetricsFile):
    def log(self, metrics, *, step):
        self.append(metrics, step=step)
        time.sleep(0.05)  # long enough for a kill to find steps that are left
    def progress(self, done, total, note=""):
        pass

model, traces, workdir, cfg = sys.argv[1:]
train_sft(SftConfig.model_validate_json(cfg), model=Path(model), traces=Path(traces), seed=5, workdir=Path(workdir),
          telemetry=Telemetry(Path(workdir) / "metrics.jsonl"))
"""


def start(model: Path, traces: Path, workdir: Path, cfg) -> subprocess.Popen:
    args = [sys.executable, "-c", SCRIPT, str(model), str(traces), str(workdir), cfg.model_dump_json()]
    return subprocess.Popen(args, cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"})


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_a_process_killed_twice_ends_with_the_same_bits(tmp_path):
    """The first process waits for its checkpoints, and the second saves them beside its work."""
    model, traces = inputs(tmp_path / "in")
    cfg = config(num_epochs=12, every_steps=4)
    runtime = cfg.runtime
    waits, beside = (
        cfg.model_copy(update={"runtime": runtime.model_copy(update={"checkpoint": checkpoint})})
        for checkpoint in (runtime.checkpoint.model_copy(update={"asynchronous": flag}) for flag in (False, True))
    )
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    train_sft(cfg, model=model, traces=traces, seed=5, workdir=tmp_path / "whole", telemetry=NullTelemetry())

    log = tmp_path / "cut" / "metrics.jsonl"
    for saves, at_least in ((waits, 10), (beside, 30)):  # log lines seen when the kill comes
        process = start(model, traces, tmp_path / "cut", saves)
        while lines(log) < at_least and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert start(model, traces, tmp_path / "cut", waits).wait() == 0

    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()]
    assert steps[-1] == max(steps)
    assert steps.count(1) == 1  # it went on, it did not start over
    whole, cut = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "cut"))
    assert all(torch.equal(whole[k], cut[k]) for k in whole)
