"""SFT against TRL's SFTTrainer with packing: tokens a CPU-second on the laptop model, and the loss of the same rows.

TRL is no dependency of ours: `pip install trl` into an environment that has Klear, then `klear bench sft`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from pathlib import Path

import torch

from klear_core.config.train import OptimConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.prompts import build_byte_tokenizer, encode_response, render_prompt, render_response
from klear_core.sft.loop import sft_heads
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.distributed import World
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.train.step import Updater
from klear_core.types import SftExample

NUM_ROWS, ROWS_PER_STEP, LR, ROUNDS = 1024, 32, 1e-3, 3
TOKENIZER = build_byte_tokenizer()


def measure() -> list[dict[str, object]]:
    """All sides see every row once, on one thread, in steps of about as many tokens, by turns; what counts are medians of the rounds."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        import transformers
        import trl
    except ImportError as e:
        raise ConfigError(f"this benchmark needs TRL ({e}); pip install trl") from e
    torch.set_num_threads(1)
    rows = [_row(i) for i in range(NUM_ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        workdir = Path(folder)
        prepare_base(TinyModelConfig(), seed=0, workdir=workdir, telemetry=NullTelemetry())
        rounds = []
        for _ in range(ROUNDS):
            our_loss, ours = _klear(rows, model_folder(workdir))
            their_loss, packed = _trl(rows, model_folder(workdir), workdir, is_packed=True)
            _, padded = _trl(rows, model_folder(workdir), workdir, is_packed=False)
            rounds.append((ours, packed, padded, ours / packed, ours / padded))
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    our_rate, packed_rate, padded_rate, ratio, padded_ratio = (
        statistics.median(values) for values in zip(*rounds, strict=True)
    )
    difference = abs(our_loss - their_loss)
    entries = [
        ("sft/tokens_per_cpu_s/klear", our_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/trl_packed", packed_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/trl_padded", padded_rate, "tokens/s", "-", True),
        ("sft/tokens_per_cpu_s/ratio", ratio, "of TRL packed", ">= 1.5", ratio >= 1.5),
        ("sft/tokens_per_cpu_s/padded_ratio", padded_ratio, "of TRL padded", "-", True),
        ("sft/loss/difference", difference, "nats", "<= 1e-4", difference <= 1e-4),
    ]
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _row(i: int) -> SftExample:
    """A chain of 2 to 8 steps, as long as those of the laptop profile."""
    steps = [f"{(i + k) % 10}+{(i // 10 + k) % 10}={(i + i // 10 + 2 * k) % 10}" for k in range(2 + 2 * (i % 4))]
    prompt = render_prompt(TOKENIZER, "".join(s[:2] for s in steps) + f"{i % 10} mod 10 = ?")
    response = encode_response(TOKENIZER, render_response("\n".join(steps), f"\\boxed{{{i % 10}}}"))
    return SftExample(
        problem_id=str(i), token_ids=prompt + response, loss_mask=(False,) * len(prompt) + (True,) * len(response)
    )


def _klear(rows: list[SftExample], folder: Path) -> tuple[float, float]:
    policy = load_model(folder, device="cpu")
    world = World(rank=0, size=1, device=torch.device("cpu"))
    updater = Updater(policy, OptimConfig(lr=LR), world, num_steps=NUM_ROWS // ROWS_PER_STEP)
    first_loss = 0.0
    started = time.process_time()
    for step in range(NUM_ROWS // ROWS_PER_STEP):
        chosen = rows[step * ROWS_PER_STEP : (step + 1) * ROWS_PER_STEP]
        batch = pack(chosen, tokens_per_microbatch=16_384)
        loss = updater.step(batch, sft_heads(batch.micro_batches, chosen, "token"), step=step).loss
        first_loss = first_loss or loss
    return first_loss, sum(len(r.token_ids) for r in rows) / (time.process_time() - started)


def _trl(rows: list[SftExample], folder: Path, workdir: Path, *, is_packed: bool) -> tuple[float, float]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    table = [{"input_ids": list(r.token_ids), "completion_mask": [int(m) for m in r.loss_mask]} for r in rows]
    args = SFTConfig(
        output_dir=str(workdir / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=LR,
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
