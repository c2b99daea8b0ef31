"""What is left of a training run that was cut and started again: ours and TRL's SFT and GRPO, each case by this script.

Every run is a process of its own (forked, so that imports are paid for once), with the same tiny model, data and number
of steps. A run that is cut and started again is compared with one that nobody cut: its last weights, and the moments of
its optimizer in its last checkpoint.
TRL is resumed by `train(resume_from_checkpoint=...)` with the checkpoint that `get_last_checkpoint` of transformers
finds, or from the start if there is none.

TRL is no dependency of ours: `pip install trl` into an environment that has Klear, then `klear bench resume`, which
writes docs/data/resume.jsonl. tests/train/test_resume_table.py holds the table of docs/benchmarks.md against it.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2] / "rl"))
sys.path.insert(0, str(Path(__file__).parents[2] / "sft"))

from rl_builders import constant_rate, problem, rl_config, tiny_base
from sft_traces import config, inputs

from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.prompts import encode_response, load_tokenizer, render_prompt, render_response
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import run_rl
from klear_core.sft.loop import train_sft
from klear_core.train.base_model import model_folder
from klear_core.types import Outcome, Problem, Verdict

ROWS = Path(__file__).parents[3] / "docs/data/resume.jsonl"
NUM_STEPS, SAVE_EVERY = {"sft": 15, "grpo": 9, "grpo_two_updates": 5}, {"sft": 2, "grpo": 2, "grpo_two_updates": 1}
"""SFT has five steps an epoch and GRPO three; `grpo_two_updates` learns twice from one batch of answers."""
NUM_PROMPTS, GROUP, NEW_TOKENS = 4, 4, 8
QUESTIONS = [f"{i}?" for i in range(3 * NUM_PROMPTS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """How a run is cut."""

    name: str
    die_in: Mapping[str, int]
    """By kind of training, the step at whose log or begin the process ends itself; empty: it ends by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case of one side."""

    side: str
    """`klear` or `trl`."""
    training: str
    case: str
    first_step: int | None
    """First step of the process that was started again; None if it took none or failed."""
    num_steps: int
    weights_gap: float | None
    """Largest difference of a weight from those of the run that nobody cut; None if it failed."""
    moments_gap: float | None
    """The same of the optimizer's moments in the last checkpoint."""
    error: str = ""
    """Last line of the error of the process that was started again."""
    versions: Mapping[str, str]


CASES = (
    Case(name="before a checkpoint", die_in={"sft": 2, "grpo": 2}),
    Case(name="mid-epoch", die_in={"sft": 9, "grpo": 5}),
    Case(name="at an epoch's edge", die_in={"sft": 11, "grpo": 7}),
    Case(name="between updates of a batch", die_in={"grpo_two_updates": 4}),
    Case(name="killed from outside", die_in={"sft": 6, "grpo": 4}),
    Case(name="newest checkpoint damaged", die_in={"sft": 9, "grpo": 5}),
    Case(name="past the end", die_in={"sft": 0, "grpo": 0}),
)
"""`killed from outside`: another process sends SIGKILL once that step is logged. `newest checkpoint damaged`: the newest
checkpoint's largest file is cut to half. `past the end`: a run that has ended is started again."""


def measure() -> list[dict[str, object]]:
    """Run all cases, write the rows, and return how many runs end as if nobody had cut them."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    torch.set_num_threads(1)  # before the forks: a pool of threads would not be in the children
    try:
        import transformers
        import trl
        from trl import GRPOTrainer, SFTTrainer  # noqa: F401  # loaded once here
    except ImportError as e:
        raise ConfigError(f"this benchmark needs TRL ({e}); pip install trl") from e
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for side in ("klear", "trl"):
            for training in NUM_STEPS:
                rows += _rows_of(side, training, Path(folder) / side / training, versions)
    ROWS.write_text("".join(f"{json.dumps(asdict(row))}\n" for row in rows))
    measures: list[dict[str, object]] = []
    for side in ("klear", "trl"):
        own = [row for row in rows if row.side == side]
        same = sum(row.weights_gap == 0 for row in own)
        is_ok = side == "trl" or same == len(own)
        target = "all" if side == "klear" else "-"
        name = f"resume/same_weights/{side}"
        measures.append(
            {"name": name, "value": same, "unit": f"of {len(own)}", "target": target, "ok": is_ok, "versions": versions}
        )
    return measures


def _rows_of(side: str, training: str, workdir: Path, versions: Mapping[str, str]) -> list[Row]:
    whole = workdir / "whole"
    _finish(_start(side, training, whole), whole)
    rows = []
    for i, case in enumerate(CASES):
        if training not in case.die_in:
            continue
        place = workdir / str(i)
        die_in = case.die_in[training]
        if case.name == "past the end":
            _finish(_start(side, training, place), place)
        elif case.name == "killed from outside":
            _kill_after(_start(side, training, place), place / "log.jsonl", die_in)
        else:
            status = _wait(_start(side, training, place, die_in=die_in))
            assert status == -signal.SIGKILL, (place / "errors.txt").read_text()[-3000:]
        if case.name == "newest checkpoint damaged":
            _halve(side, place)
        (place / "log.jsonl").rename(place / "log_before.jsonl")
        row = _resumed(side, training, place, whole)
        rows.append(Row(side=side, training=training, case=case.name, versions=versions, **row))
        print(rows[-1], file=sys.stderr, flush=True)
        shutil.rmtree(place)
    return rows


def _resumed(side: str, training: str, place: Path, whole: Path) -> dict[str, Any]:
    """Start the run again and compare what it leaves with the run that nobody cut."""
    status = _wait(_start(side, training, place))
    if status:
        lines = [line for line in (place / "errors.txt").read_text().splitlines() if line.strip()]
        error = lines[-1].replace(str(place), "FOLDER")[:200] if lines else str(status)
        return {"first_step": None, "num_steps": 0, "weights_gap": None, "moments_gap": None, "error": error}
    log = place / "log.jsonl"
    steps = [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []
    return {
        "first_step": min(steps, default=None),
        "num_steps": len(steps),
        "weights_gap": _gap(_weights(side, place), _weights(side, whole)),
        "moments_gap": _gap(_moments(side, place), _moments(side, whole)),
    }


def _start(side: str, training: str, place: Path, *, die_in: int = 0) -> int:
    """Return the id of a process that trains; its output goes to `errors.txt`."""
    place.mkdir(parents=True, exist_ok=True)
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        errors = os.open(place / "errors.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        _train(side, training, place, die_in)
        status = 0
    except BaseException:  # noqa: BLE001  # of a child, which must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _wait(process: int) -> int:
    """Return the exit status, negative for a signal."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def _finish(process: int, place: Path) -> None:
    status = _wait(process)
    assert status == 0, (place / "errors.txt").read_text()[-3000:]


def _kill_after(process: int, log: Path, step: int) -> None:
    while not (log.exists() and f'"step": {step}' in log.read_text()):
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before"
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    _wait(process)


def _halve(side: str, place: Path) -> None:
    files = [path for path in _newest_checkpoint(side, place).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.truncate(largest.stat().st_size // 2)


def _newest_checkpoint(side: str, place: Path) -> Path:
    folder, pattern = (place / "scratch/checkpoints", "step-*") if side == "klear" else (place / "trl", "checkpoint-*")
    return max(folder.glob(pattern), key=lambda path: int(path.name.rpartition("-")[2]))


def _weights(side: str, place: Path) -> dict[str, torch.Tensor]:
    folder = place / "model" if side == "klear" else place / "last"
    return load_file(folder / "model.safetensors")


def _moments(side: str, place: Path) -> dict[str, torch.Tensor]:
    """Return the moments of the newest checkpoint, of any parameter by a name."""
    folder = _newest_checkpoint(side, place)
    if side == "trl":
        state = torch.load(folder / "optimizer.pt", weights_only=True)["state"]
        return {f"{i}.{k}": v for i, values in state.items() for k, v in values.items() if torch.is_tensor(v)}
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    file = place / "moments.pt"
    dcp_to_torch_save(folder, file)
    state = torch.load(file, weights_only=False)["optimizer"]["state"]
    return {f"{i}.{k}": v for i, values in state.items() for k, v in values.items() if torch.is_tensor(v)}


def _gap(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    assert a
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


# ---- one run, in a process of its own ----


def _train(side: str, training: str, place: Path, die_in: int) -> None:
    log = _Log(place, die_in)
    if side == "trl":
        _trl(place, log, training)
    elif training == "sft":
        _klear_sft(place, log)
    else:
        _klear_grpo(place, log, training)


class _Log(NullTelemetry):
    """Writes down each step, and ends the process at one of them as a kill does."""

    def __init__(self, place: Path, die_in: int) -> None:
        self._file = place / "log.jsonl"
        self._die_in = die_in

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        del metrics
        if step == self._die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step}) + "\n")
        time.sleep(0.05)  # long enough for a kill from outside to find steps that are left


def _digit_share(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(1, len(text))


def _klear_sft(place: Path, log: _Log) -> None:
    model, traces = inputs(place / "in") if not (place / "in").exists() else (place / "in/base", place / "in/traces")
    cfg = config(num_epochs=3, every_steps=SAVE_EVERY["sft"], validation_frac=0.0)
    train_sft(cfg, model=model, traces=traces, seed=5, workdir=place, telemetry=log)


def _klear_grpo(place: Path, log: _Log, training: str) -> None:
    base = place / "in"
    if not base.exists():
        tiny_base(base)

    async def judge(_problem: Problem, response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=_digit_share(response))

    runtime = {"device": "cpu", "checkpoint": {"every_steps": SAVE_EVERY[training]}}
    num_updates = 2 if training == "grpo_two_updates" else 1
    cfg = rl_config(num_steps=NUM_STEPS[training], minibatches_per_step=num_updates, optim=constant_rate(1e-3))
    cfg = type(cfg).model_validate(cfg.model_dump() | {"runtime": runtime})
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=place)
    asyncio.run(run_rl(setup, [problem(q) for q in QUESTIONS], judge, log, LocalWorkers()))


def _trl(place: Path, log: _Log, training: str) -> None:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
            log.log({}, step=state.global_step + 1)

    out = place / "trl"
    out.mkdir(exist_ok=True)
    trainer = (_trl_sft if training == "sft" else _trl_grpo)(place, training)
    trainer.add_callback(Steps())
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out)))
    trainer.save_model(str(place / "last"))


def _shared_args(place: Path, training: str) -> dict[str, Any]:
    num_updates = 2 if training == "grpo_two_updates" else 1
    return {
        "output_dir": str(place / "trl"),
        "use_cpu": True,
        "bf16": False,
        "lr_scheduler_type": "constant",
        "max_steps": NUM_STEPS[training] * num_updates,
        "save_strategy": "steps",
        "save_steps": SAVE_EVERY[training],
        "report_to": [],
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "seed": 5,
    }


def _trl_sft(place: Path, training: str) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    if not (place / "in").exists():
        inputs(place / "in")
    folder = model_folder(place / "in/base")
    tokenizer = load_tokenizer(folder)
    table = []
    for i in range(40):
        prompt = render_prompt(tokenizer, f"{i % 40}+{7 * i // 40} = ?")
        response = encode_response(tokenizer, render_response(f"{i}+1", f"\\boxed{{{i}}}"))
        table.append({"input_ids": list(prompt + response), "completion_mask": [0] * len(prompt) + [1] * len(response)})
    args = SFTConfig(
        learning_rate=4e-3,
        per_device_train_batch_size=8,
        max_length=512,
        completion_only_loss=True,
        **_shared_args(place, training),
    )
    return SFTTrainer(model=str(folder), args=args, train_dataset=Dataset.from_list(table))


def _trl_grpo(place: Path, training: str) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    if not (place / "in").exists():
        tiny_base(place / "in")
    num_updates = 2 if training == "grpo_two_updates" else 1
    args = GRPOConfig(
        learning_rate=1e-3,
        per_device_train_batch_size=NUM_PROMPTS * GROUP // num_updates,
        steps_per_generation=num_updates,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        disable_dropout=True,
        **_shared_args(place, training),
    )
    return GRPOTrainer(
        model=str(model_folder(place / "in")),
        reward_funcs=lambda completions, **_others: [_digit_share(c[0]["content"]) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS]),
    )
