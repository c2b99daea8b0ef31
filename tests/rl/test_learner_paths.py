"""A learner leaves out fast paths that disagree with plain operations, and the stage's summary says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from rl_builders import Recorder, low_byte_judge, problem, rl_config

from klear_core.artifacts.manifest import LedgerStep
from klear_core.native import compile_c
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import run_rl
from klear_core.rl.state import RlState
from klear_core.train.kernels import attention, registry


@pytest.mark.skipif(
    compile_c(attention._SOURCE, {"HEAD_DIM": 16}) is None, reason="no C compiler on this machine: no compiled C"
)
def test_the_summary_of_rl_tells_of_a_broken_kernel(base: Path, tmp_path: Path) -> None:
    gate = registry.provided()["gate/cpu"]
    job = RlSetup(cfg=rl_config(num_steps=1), model=base, seed=0, workdir=tmp_path)
    with registry.replaced({"gate/cpu": lambda gate_up: 1.01 * gate(gate_up)}):
        state = asyncio.run(run_rl(job, [problem("q")], low_byte_judge, Recorder(), LocalWorkers()))
    choice = LedgerStep(step="choose", unit="problem", num_in=1, num_out=1, dropped={})
    notes = state.summary(choice, minibatches_per_step=1, seed=0).notes
    assert any(note.startswith("fast path gate/cpu was left out") for note in notes)
    # A checkpoint holds numbers alone.
    assert RlState.of(state.counters()).notes == ()
