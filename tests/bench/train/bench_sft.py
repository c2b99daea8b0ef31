"""SFT against TRL's SFTTrainer with packing: tokens a CPU-second on the laptop model, and the loss of the same rows.

With a given model: ours in bfloat16 with float32 masters, TRL with weights in either dtype, peak memory beside it.

TRL is no dependency of ours: `pip install trl` into an environment that has Klear, then `klear bench sft`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from klear_core.config.train import OptimConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.prompts import build_byte_tokenizer, encode_response, load_tokenizer, render_prompt, render_response
from klear_core.sft.loop import sft_heads
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.distributed import World, parallelise
from klear_core.train.model import Dtype, load_model
from klear_core.train.packing import pack
from klear_core.train.step import Updater
from klear_core.types import SftExample

NUM_ROWS, ROWS_PER_STEP, LR, ROUNDS = 1024, 32, 1e-3, 3
GIVEN_ROWS, GIVEN_LR = 160, 1e-5
TARGET_RATIO = 1.5


def measure(model: Path | None = None) -> list[dict[str, object]]:
    """All sides see every row once, on one thread, in steps of about as many tokens, by turns; what counts are medians of the rounds."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        import transformers
        import trl
    except ImportError as e:
        raise ConfigError(f"this benchmark needs TRL ({e}); pip install trl") from e
    torch.set_num_threads(1)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        if model is not None:
            return [_entry(*e, versions | {"model": model.name}) for e in _given_rates(model.resolve(), workdir)]
        rows = _rows(build_byte_tokenizer(), NUM_ROWS)
        prepare_base(TinyModelConfig(), seed=0, workdir=workdir, telemetry=NullTelemetry())
        rounds = []
        for _ in range(ROUNDS):
            our_loss, ours = _klear(rows, model_folder(workdir))
            their_loss, packed = _trl(rows, model_folder(workdir), workdir, is_packed=True)
            _, padded = _trl(rows, model_folder(workdir), workdir, is_packed=False)
            rounds.append((ours, packed, padded, ours / packed, ours / padded))
    our_rate, packed_rate, padded_rate, ratio, padded_ratio = (
        statistics.median(values) for values in zip(*rounds, strict=True)
    )
    difference = abs(our_loss - their_loss)
    entries = [
        ("sft/tokens_per_cpu_s/klear", our_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/trl_packed", packed_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/trl_padded", padded_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/ratio", ratio, "of TRL packed", f">= {TARGET_RATIO:g}", ratio >= TARGET_RATIO),
        ("sft/tokens_per_cpu_s/padded_ratio", padded_ratio, "of TRL padded", "-", True),
        ("sft/loss/difference", difference, "nats", "<= 1e-4", difference <= 1e-4),
    ]
    return [_entry(*e, versions) for e in entries]


def _entry(name: str, value: float, unit: str, target: str, ok: bool, versions: dict[str, str]) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "versions": versions}


def _given_rates(model: Path, workdir: Path) -> list[tuple[str, float, str, str, bool]]:
    """Five steps, each side in a process of its own, for its memory."""
    rates: dict[str, float] = {}
    entries: list[tuple[str, float, str, str, bool]] = []
    for side, dtype in (("klear", "bfloat16"), ("trl", "float32"), ("trl", "bfloat16")):
        name = f"{side}_{dtype}"
        command = [sys.executable, __file__, side, dtype, str(model), str(workdir / name)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        rates[name], peak = json.loads(output.splitlines()[-1])
        print(f"{name}: {rates[name]:.3g} tokens/s, {peak:.2f} GB", flush=True)  # as it comes: a side takes minutes
        entries.append((f"sft/tokens_per_cpu_s/{name}", rates[name], "tokens/s", "-", True))
        entries.append((f"sft/peak_memory/{name}", peak, "GB", "-", True))
    ratio = rates["klear_bfloat16"] / max(rates["trl_float32"], rates["trl_bfloat16"])
    target = f">= {TARGET_RATIO:g}"
    return [
        *entries,
        ("sft/tokens_per_cpu_s/ratio", ratio, "of TRL packed, its faster dtype", target, ratio >= TARGET_RATIO),
    ]


def _given_round(side: str, dtype: Dtype, model: Path, workdir: Path) -> tuple[float, float]:
    """Return trained tokens per CPU second, and the process's peak memory in GB."""
    torch.set_num_threads(1)
    rows = _rows(load_tokenizer(model), GIVEN_ROWS)
    if side == "klear":
        _, rate = _klear(rows, model, dtype=dtype, lr=GIVEN_LR)
    else:
        _, rate = _trl(rows, model, workdir, is_packed=True, dtype=dtype, lr=GIVEN_LR)
    return rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _rows(tokenizer: Any, num_rows: int) -> list[SftExample]:
    return [_row(tokenizer, i) for i in range(num_rows)]


def _row(tokenizer: Any, i: int) -> SftExample:
    """A chain of 2 to 8 steps, as long as those of the laptop profile."""
    steps = [f"{(i + k) % 10}+{(i // 10 + k) % 10}={(i + i // 10 + 2 * k) % 10}" for k in range(2 + 2 * (i % 4))]
    prompt = render_prompt(tokenizer, "".join(s[:2] for s in steps) + f"{i % 10} mod 10 = ?")
    response = encode_response(tokenizer, render_response("\n".join(steps), f"\\boxed{{{i % 10}}}"))
    return SftExample(
        problem_id=str(i), token_ids=prompt + response, loss_mask=(False,) * len(prompt) + (True,) * len(response)
    )


def _klear(rows: list[SftExample], folder: Path, *, dtype: Dtype = "float32", lr: float = LR) -> tuple[float, float]:
    world = World(rank=0, size=1, device=torch.device("cpu"))
    policy = parallelise(load_model(folder, device="cpu"), world, dtype=dtype, activation_checkpointing=False)
    num_steps = len(rows) // ROWS_PER_STEP
    updater = Updater(policy, OptimConfig(lr=lr), world, num_steps=num_steps)
    first_loss = 0.0
    started = time.process_time()
    for step in range(num_steps):
        chosen = rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        batch = pack(chosen, tokens_per_microbatch=16_384)
        loss = updater.update(batch, sft_heads(batch.micro_batches, chosen, "token"), step=step).loss
        first_loss = first_loss or loss
    return first_loss, sum(len(r.token_ids) for r in rows) / (time.process_time() - started)


def _trl(
    rows: list[SftExample], folder: Path, workdir: Path, *, is_packed: bool, dtype: Dtype = "float32", lr: float = LR
) -> tuple[float, float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    table = [{"input_ids": list(r.token_ids), "completion_mask": [int(m) for m in r.loss_mask]} for r in rows]
    args = SFTConfig(
        output_dir=str(workdir / "trl"),
        use_cpu=True,
        bf16=dtype == "bfloat16",
        model_init_kwargs={"dtype": dtype},
        learning_rate=lr,
        lr_scheduler_type="constant",
        num_train_epochs=1,
        packing=is_packed,
        eval_packing=False,
        max_length=512,
        per_device_train_batch_size=6 if is_packed else ROWS_PER_STEP,  # 6 * 512 tokens is about what 32 rows are
        per_device_eval_batch_size=ROWS_PER_STEP,
        gradient_checkpointing=False,
        completion_only_loss=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1000,
    )
    trainer = SFTTrainer(
        model=str(folder),
        args=args,
        train_dataset=Dataset.from_list(table),
        eval_dataset=Dataset.from_list(table[:ROWS_PER_STEP]),
    )
    loss = float(trainer.evaluate()["eval_loss"])
    started = time.process_time()
    trainer.train()
    return loss, sum(len(r.token_ids) for r in rows) / (time.process_time() - started)


if __name__ == "__main__":
    our_or_their, its_dtype, its_model, its_place = sys.argv[1:]
    print(json.dumps(_given_round(our_or_their, its_dtype, Path(its_model), Path(its_place))))  # type: ignore[arg-type]
