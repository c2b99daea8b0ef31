"""`klear rl replay` on an RL artifact with one saved step, made without a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from manifests import manifest

from flows.compare import parse_loss
from klear_core.artifacts.store import LocalStore
from klear_core.config.losses import BetaSchedule, ClipConfig, DgpoConfig, GppoConfig
from klear_core.config.rl import RlConfig, RlRuntime
from klear_core.config.stage import RlJob
from klear_core.config.train import TinyModelConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.rl.learner import Learner
from klear_core.train.base_model import prepare_base
from klear_core.train.distributed import World
from klear_core.types import TrainSample

SCHEDULE = "schedule={start_step=1, end_step=2, beta_low=0.5, beta_high=1}"
ROW = re.compile(r"^ (\S.*?) {2,}(.*)$", re.MULTILINE)


def sample(i: int) -> TrainSample:
    return TrainSample(
        problem_id=f"p{i // 2}",
        token_ids=(1, 2, 3 + i, 4 + i),
        loss_mask=(False, False, True, True),
        sampler_logps=(0.0, 0.0, -5.0 - 0.2 * i, -5.0),
        advantage=1.0 if i % 2 else -1.0,
        is_positive=bool(i % 2),
        oldest_version=0,
    )


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of a tiny model, and of RL that saved its only step."""
    root = tmp_path_factory.mktemp("ws")
    store = LocalStore(root / "artifacts")
    tiny = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
    with store.create("base", "ba5e") as slot:
        prepare_base(tiny, seed=0, workdir=slot.workdir, telemetry=NullTelemetry())
        base = slot.publish(manifest("base", "ba5e")).path
    runtime = RlRuntime(device="cpu", save_steps=(1,))
    cfg = RlConfig(num_steps=1, minibatches_per_step=4, old_logps="sampler", dtype="float32", runtime=runtime)
    job = RlJob(seed=0, rl=cfg, verify=VerifyConfig())
    with store.create("rl", "a1b2") as slot:
        threads = torch.get_num_threads()
        torch.set_num_threads(runtime.num_threads)  # as in the replay: sums of more threads round differently
        world = World(rank=0, size=1, device=torch.device("cpu"))
        Learner(cfg, base, seed=0, workdir=slot.workdir, world=world).step([sample(i) for i in range(8)])
        torch.set_num_threads(threads)
        inputs = [{"kind": "base", "fingerprint": "ba5e", "role": "model"}]
        slot.publish(manifest("rl", "a1b2", config=job.model_dump(mode="json"), inputs=inputs))
    return root


def rows(out: str) -> dict[str, list[str]]:
    return {name: cells.split() for name, cells in ROW.findall(out)}


def test_every_loss_is_compared_with_the_runs(klear, workspace: Path) -> None:
    shown = klear("rl", "replay", 1, "--root", workspace)
    assert shown.status == 0, shown.err
    assert shown.out.startswith("RL step 1 of rl a1b2: 8 answers\n")
    table = rows(shown.out)
    assert list(table) == [
        "loss",
        "gppo (the run's)",
        "gppo,preset=ce_gppo",
        "gppo,preset=high_only",
        *("clip", "cispo", "gspo", "dgpo", "aspo", "sapo", "trm", "m2po", "dppo"),
    ]
    assert table["gppo (the run's)"][2] == "1.0000"
    assert float(table["clip"][2]) < 1
    assert shown.out.endswith("The run's loss gave every metric as it was logged, to the bit.\n")


def test_the_losses_that_are_asked_for_are_compared(klear, workspace: Path) -> None:
    shown = klear("rl", "replay", 1, "--loss", "dgpo,high_root=3", "--loss", "clip", "--root", workspace)
    assert list(rows(shown.out)) == ["loss", "gppo (the run's)", "dgpo,high_root=3", "clip"]


def test_no_number_is_cut_in_a_file_or_a_narrow_terminal(
    klear, workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = klear("rl", "replay", 1, "--loss", f"gppo,{SCHEDULE}", "--root", workspace)
    assert shown.status == 0, shown.err
    assert "…" not in shown.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["2"], r"RL step 2 is not saved; saved steps: 1\. Make .* with --set 'rl\.runtime\.save_steps=\[2\]'"),
        (["1", "--of", "base"], "an artifact of kind base; only rl stages have steps to replay"),
        (["1", "--of", "rl_code"], "no artifact 'rl_code'"),
        (["1", "--loss", "ppo"], r"--loss 'ppo': loss.*'gppo', 'clip'"),
        (["1", "--loss", "clip,eps_hihg=1"], r"loss\.eps_hihg: unknown key; did you mean eps_high\?"),
        (["1", "--loss", "clip,0.3"], r"expected kind,key=value, for example gppo,beta_low=0\.25"),
        (["1", "--workers", "3", "--loss", "gppo,preset=ce_gppo,eps_high=0.3"], "contradicts preset 'ce_gppo'"),
    ],
)
def test_what_cannot_be_replayed_is_told(klear, workspace: Path, arguments: list[str], told: str) -> None:
    shown = klear("rl", "replay", *arguments, "--root", workspace)
    assert shown.status != 0
    assert re.search(told, shown.err.replace("\n", " ")), shown.err


def test_a_loss_is_its_kind_and_settings() -> None:
    assert parse_loss("clip") == ClipConfig()
    assert parse_loss("dgpo, high_root = 3, low_power=2") == DgpoConfig(high_root=3, low_power=2)
    assert parse_loss("gppo,preset=ce_gppo") == GppoConfig(preset="ce_gppo")
    assert parse_loss(f"gppo,{SCHEDULE},eps_high=0.3").schedule == BetaSchedule(
        start_step=1, end_step=2, beta_low=0.5, beta_high=1
    )
    with pytest.raises(ConfigError, match=r"high_root = 0: .*greater than or equal to 1"):
        parse_loss("dgpo,high_root=0")
