"""The driver of a test on several machines: SFT and RL on two of them, first undisturbed, then with power cuts.

Run as a program on the head's machine: `machine_driver.py ROOT STORE UP`. Prints `TRAINING step N` for the test to act
on. The file UP says that Ray's head is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS), str(TESTS / "sft"), str(TESTS / "rl")]

from manifests import manifest  # noqa: E402
from ray_builders import PROBLEMS  # noqa: E402
from ray_builders import config as rl_config  # noqa: E402
from rl_builders import low_byte_judge, tiny_base  # noqa: E402
from sft_traces import config as sft_config  # noqa: E402
from sft_traces import inputs  # noqa: E402

from klear_core.artifacts.object_store import ObjectStore  # noqa: E402
from klear_core.artifacts.remote_paths import remote_paths_of  # noqa: E402
from klear_core.artifacts.store import LocalSlot  # noqa: E402
from klear_core.cluster.gang import run_on_ray  # noqa: E402
from klear_core.cluster.rl_workers import RayWorkers  # noqa: E402
from klear_core.config.rl import RlCheckpointConfig  # noqa: E402
from klear_core.metrics import NullTelemetry  # noqa: E402
from klear_core.rl.interfaces import RlSetup  # noqa: E402
from klear_core.rl.loop import run_rl  # noqa: E402
from klear_core.sft.loop import train_sft  # noqa: E402
from tasks.resources import Needs, ray_session  # noqa: E402

NEVER = 1000
"""Steps between two checkpoints of a training that nothing happens to."""
NEEDS = Needs(num_cpus=1, object_store_bytes=80 << 20)


class Announcer(NullTelemetry):
    """Prints each step as soon as it is logged."""

    def __init__(self, training: str) -> None:
        self.training = training

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        print(f"{self.training} step {step}", flush=True)


def digest(artifact: Path) -> str:
    return hashlib.sha256((artifact / "model" / "model.safetensors").read_bytes()).hexdigest()


def main(root: Path, url: str, up: Path) -> None:
    store = ObjectStore(root, url)
    model, traces = inputs(root.parent / "in")
    tiny = root.parent / "tiny"
    tiny.mkdir()
    tiny_base(tiny)

    def make(kind: str, fingerprint: str, write: Callable[[LocalSlot], object]) -> Path:
        with store.create(kind, fingerprint) as slot:
            write(slot)
            return slot.publish(manifest(kind=kind)).path

    def copied(folder: Path) -> Callable[[LocalSlot], object]:
        return lambda slot: shutil.copytree(folder, slot.workdir, dirs_exist_ok=True)

    base, rows, tiny = (
        make("base", "f1", copied(model)),
        make("traces", "f1", copied(traces)),
        make("tiny", "f1", copied(tiny)),
    )

    def sft(slot: LocalSlot, name: str) -> None:
        cfg = sft_config(every_steps=1 if name == "sft-cut" else NEVER, num_workers=2, num_epochs=1)
        train_sft(
            cfg, model=base, traces=rows, seed=5, workdir=slot.workdir, telemetry=Announcer(name), run_ranks=run_on_ray
        )

    def rl(slot: LocalSlot, name: str) -> None:
        checkpoint = RlCheckpointConfig(every_steps=2 if name == "rl-cut" else NEVER)
        # A node is one loss, whatever ran on it.
        cfg = rl_config(num_workers=2, num_rollout_actors=2, max_restarts=1, checkpoint=checkpoint)
        setup = RlSetup(cfg=cfg, model=tiny, seed=0, workdir=slot.workdir, remote=remote_paths_of(slot.workdir))
        asyncio.run(run_rl(setup, PROBLEMS, low_byte_judge, Announcer(name), RayWorkers()))

    while not up.exists():
        time.sleep(0.1)
    with ray_session(NEEDS):
        for kind, train in (("sft", sft), ("rl", rl)):
            for name in ("calm", "cut"):
                made = make(kind, name, lambda slot, kind=kind, train=train, name=name: train(slot, f"{kind}-{name}"))
                print(f"{kind} {name} weights {digest(made)}", flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    os.chdir(sys.argv[1])
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
