"""RL against TRL's GRPOTrainer: tokens a CPU-second of whole steps on the laptop model, and every loss on the same rows.

With a given model: whole steps alone, ours in bfloat16 against TRL's default and TRL in bfloat16.

TRL is no dependency of ours: `pip install trl` into an environment that has Klear, then `klear bench rl`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klear_core.config.evaluate import SamplingConfig, TorchEngineConfig
from klear_core.config.losses import CispoConfig, ClipConfig, GspoConfig, LossConfig
from klear_core.config.rewards import RewardConfig
from klear_core.config.rl import RlConfig, RlOptimConfig, RolloutConfig
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import run_rl
from klear_core.rl.objective import Denominators, loss_head, make_loss_inputs
from klear_core.rl.step_metrics import TokenStats
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.model import Dtype, load_model
from klear_core.train.packing import pack
from klear_core.train.step import grad_norm
from klear_core.types import Difficulty, Domain, MathReference, Outcome, Problem, TrainSample, Verdict

TARGET_PROMPTS, MORE_PROMPTS, GROUP, NEW_TOKENS, STEPS, LR = 8, 32, 8, 64, 6, 3e-4
"""The target holds for 64 rows a step; 256 are measured beside it, for TRL gains more from larger batches than Klear does."""
TARGET_RATIO = 3.0
ROUNDS, GIVEN_ROUNDS = 5, 1
"""Both sides by turns, for a machine's speed changes by the minute; what counts is the median of the rounds' ratios."""
NUM_ROWS, PROMPT_LEN = 12, 5
QUESTIONS = [f"What is {i} + {i * 3}?" for i in range(64)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The same loss in both libraries' words."""

    name: str
    loss: LossConfig
    normalise: str
    trl: Mapping[str, Any]


EPS = {"epsilon": 0.2, "epsilon_high": 0.28}
CASES = (
    Case(name="clip_higher_token_mean", loss=ClipConfig(), normalise="token", trl=EPS | {"loss_type": "dapo"}),
    Case(name="clip_higher_sample_mean", loss=ClipConfig(), normalise="sample", trl=EPS | {"loss_type": "grpo"}),
    Case(name="clip_higher_budget", loss=ClipConfig(), normalise="budget", trl=EPS | {"loss_type": "dr_grpo"}),
    Case(name="cispo", loss=CispoConfig(), normalise="token", trl={"epsilon_high": 1.28, "loss_type": "cispo"}),
    Case(
        name="gspo",
        loss=GspoConfig(eps_low=0.2, eps_high=0.28),
        normalise="sample",
        trl=EPS | {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What a round of whole steps trains."""

    num_prompts: int = TARGET_PROMPTS
    steps: int = STEPS
    lr: float = LR
    dtype: Dtype = "float32"

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.num_prompts * GROUP


DEMO = Size()


def measure(model: Path | None = None) -> list[dict[str, object]]:
    """Losses and gradients case by case, then whole steps of both sides on one thread."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        import transformers
        import trl
    except ImportError as e:
        raise ConfigError(f"this benchmark needs TRL ({e}); pip install trl") from e
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    entries = []
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    with tempfile.TemporaryDirectory() as folder:
        if model is not None:
            return [_entry(*e, versions | {"model": model.name}) for e in _given_rates(model, Path(folder))]
        base = Path(folder) / "base"
        base.mkdir()
        prepare_base(TinyModelConfig(), seed=0, workdir=base, telemetry=NullTelemetry())
        rows = _rows()
        for case in CASES:
            ours, theirs = _klear_loss(rows, base, case), _trl_loss(rows, base, Path(folder), case)
            for what, a, b in zip(("loss", "grad_norm"), ours, theirs, strict=True):
                gap = abs(a - b) / max(abs(b), 1e-6)
                entries.append((f"rl/{what}_gap/{case.name}", gap, "relative", "<= 1e-4", gap <= 1e-4))
        for num_prompts in (TARGET_PROMPTS, MORE_PROMPTS):
            entries += _rates(base, Path(folder), num_prompts)
    return [_entry(*e, versions) for e in entries]


def _entry(name: str, value: float, unit: str, target: str, ok: bool, versions: dict[str, str]) -> dict[str, object]:
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "versions": versions}


def _given_rates(model: Path, workdir: Path) -> list[tuple[str, float, str, str, bool]]:
    """One prompt a step and three steps, of which the first warms up; each side in a process of its own, for its memory."""
    rates: dict[str, list[float]] = {}
    peaks: dict[str, float] = {}
    for i in range(GIVEN_ROUNDS):
        for side, dtype in (("klear", "bfloat16"), ("klear", "float32"), ("trl", "float32"), ("trl", "bfloat16")):
            name = f"{side}_{dtype}"
            command = [sys.executable, __file__, side, dtype, str(model), str(workdir / f"{name}-{i}")]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rate, peak = json.loads(output.splitlines()[-1])
            print(
                f"{name}: {rate:.3g} tokens/s, {peak:.2f} GB", flush=True
            )  # as it comes, because a side takes minutes
            rates.setdefault(name, []).append(rate)
            peaks[name] = max(peak, peaks.get(name, 0))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    entries = []
    for name, rate in medians.items():
        entries.append((f"rl/tokens_per_cpu_s/{name}", rate, "sampled tokens/s", "-", True))
        entries.append((f"rl/peak_memory/{name}", peaks[name], "GB", "-", True))
    for theirs, target in (("trl_float32", TARGET_RATIO), ("trl_bfloat16", 2.0)):
        ratio = medians["klear_bfloat16"] / medians[theirs]
        entries.append((f"rl/tokens_per_cpu_s/ratio_of_{theirs}", ratio, "x", f">= {target:g}", ratio >= target))
    return entries


def _given_round(side: str, dtype: Dtype, model: Path, workdir: Path) -> tuple[float, float]:
    """Return sampled tokens per CPU second, and the process's peak memory in GB."""
    torch.set_num_threads(1)
    size = Size(num_prompts=1, steps=3, lr=1e-6, dtype=dtype)
    if side == "klear":
        artifact = workdir / "base"
        artifact.mkdir(parents=True)
        (artifact / "model").symlink_to(model.resolve())
        rate = _klear_rate(artifact, workdir, size)
    else:
        rate = _trl_rate(model.resolve(), workdir, size)
    return rate, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def _rates(base: Path, workdir: Path, num_prompts: int) -> list[tuple[str, float, str, str, bool]]:
    rounds = []
    for i in range(ROUNDS):
        place = workdir / f"{num_prompts}-{i}"
        size = Size(num_prompts=num_prompts)
        ours, theirs = _klear_rate(base, place / "klear", size), _trl_rate(model_folder(base), place / "trl", size)
        rounds.append((ours, theirs))
    our_rate, their_rate = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    is_target = num_prompts == TARGET_PROMPTS
    name, target = f"rl/tokens_per_cpu_s/{num_prompts * GROUP}_rows", f">= {TARGET_RATIO:g}" if is_target else "-"
    return [
        (f"{name}/klear", our_rate, "sampled tokens/s", "-", True),
        (f"{name}/trl", their_rate, "sampled tokens/s", "-", True),
        (f"{name}/ratio", ratio, "of TRL", target, not is_target or ratio >= TARGET_RATIO),
    ]


def _rows() -> list[TrainSample]:
    """Answers of different lengths whose old log-probs put ratios inside and outside every range, with both signs of advantage."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(NUM_ROWS):
        length = 4 + 5 * (i % 4)
        ids = torch.randint(0, 256, (PROMPT_LEN + length,), generator=generator).tolist()
        old = (-5.6 + 0.5 * torch.randn(length, generator=generator)).tolist()
        rows.append(
            TrainSample(
                problem_id=str(i),
                token_ids=tuple(ids),
                loss_mask=(False,) * PROMPT_LEN + (True,) * length,
                sampler_logps=(0.0,) * PROMPT_LEN + tuple(old),
                advantage=(-1.0) ** i * (0.5 + i % 3),
                is_positive=False,
                oldest_version=0,
            )
        )
    return rows


def _config(case: Case | None = None, *, size: Size = DEMO) -> RlConfig:
    rollout = RolloutConfig(
        engine=TorchEngineConfig(dtype=size.dtype),
        groups_per_step=size.num_prompts,
        samples_per_group=GROUP,
        sampling=SamplingConfig(max_new_tokens=NEW_TOKENS),
    )
    settings: dict[str, object] = {
        "num_steps": size.steps,
        "minibatches_per_step": 1,
        "optim": RlOptimConfig(lr=size.lr, warmup_steps=0, weight_decay=0),
        "lm_coef": 0.0,
        "old_logps": "sampler",
        "reward": RewardConfig(missing_close=None, missing_open=None),
        "rollout": rollout,
        "dtype": size.dtype,
        "runtime": {"device": "cpu"},
    }
    if case is not None:
        settings |= {"loss": case.loss, "normalise": case.normalise}
    return RlConfig.model_validate(settings)


def _klear_loss(rows: list[TrainSample], base: Path, case: Case) -> tuple[float, float]:
    policy, cfg = load_model(model_folder(base), device="cpu"), _config(case)
    (micro,) = pack(rows, tokens_per_microbatch=1 << 20).micro_batches
    batch = make_loss_inputs(micro, rows, None, None, Denominators.of(rows), cfg)
    out = policy(micro, loss_head(batch, cfg, TokenStats(torch.device("cpu"))))
    out.loss.backward()  # type: ignore[no-untyped-call]
    return out.loss.item(), grad_norm(policy).item()


def _trl_loss(rows: list[TrainSample], base: Path, workdir: Path, case: Case) -> tuple[float, float]:
    trainer = _trainer(model_folder(base), workdir, case.trl)
    lengths = [len(r.token_ids) - PROMPT_LEN for r in rows]

    def right_padded(values: list[list[float]]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(v) for v in values], batch_first=True)

    prompt_ids = torch.tensor([r.token_ids[:PROMPT_LEN] for r in rows])
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": right_padded([list(r.token_ids[PROMPT_LEN:]) for r in rows]),
        "completion_mask": right_padded([[1] * n for n in lengths]),
        "advantages": torch.tensor([r.advantage for r in rows]),
        "old_per_token_logps": right_padded([list(r.sampler_logps[PROMPT_LEN:]) for r in rows]),
        "num_items_in_batch": torch.tensor(sum(lengths)),
    }
    trainer.model.eval()
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    return loss.item(), torch.nn.utils.get_total_norm(
        [p.grad for p in trainer.model.parameters() if p.grad is not None]
    ).item()


def _digit_share(text: str) -> float:
    return sum(c.isdigit() for c in text) / max(1, len(text))


class _Clock(NullTelemetry):
    """CPU time and sampled tokens at the end of each step."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self.marks: list[tuple[float, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        tokens = metrics["rl/response/mean_tokens"] * self._num_rows
        self.marks.append((time.process_time(), tokens))

    def rate(self) -> float:
        """Without the first step, which warms up."""
        return sum(tokens for _, tokens in self.marks[1:]) / (self.marks[-1][0] - self.marks[0][0])


def _klear_rate(base: Path, workdir: Path, size: Size) -> float:
    reference = MathReference(answers=("0",))
    problems = [
        Problem(
            problem_id=q, source="s", domain=Domain.MATH, question=q, reference=reference, difficulty=Difficulty.EASY
        )
        for q in QUESTIONS
    ]

    async def judge(_problem: Problem, response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=_digit_share(response))

    clock = _Clock(size.num_rows)
    job = RlSetup(cfg=_config(size=size), model=base, seed=0, workdir=workdir)
    asyncio.run(run_rl(job, problems, judge, clock, LocalWorkers()))
    return clock.rate()


def _trl_rate(folder: Path, workdir: Path, size: Size) -> float:
    from transformers import TrainerCallback

    clock = _Clock(size.num_rows)

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Mapping[str, float] | None = None, **_others: Any
        ) -> None:
            if logs and "completions/mean_length" in logs:
                clock.log({"rl/response/mean_tokens": logs["completions/mean_length"]}, step=0)

    trainer = _trainer(folder, workdir, EPS | {"loss_type": "dapo"}, size, callbacks=[Log()])
    trainer.train()
    return clock.rate()


def _trainer(folder: Path, workdir: Path, settings: Mapping[str, Any], size: Size = DEMO, **others: Any) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(workdir / "trl"),
        use_cpu=True,
        bf16=size.dtype == "bfloat16",
        learning_rate=size.lr,
        lr_scheduler_type="constant",
        max_steps=size.steps,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        per_device_train_batch_size=size.num_rows,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        disable_dropout=True,
        model_init_kwargs={"dtype": size.dtype},
        **settings,
    )
    return GRPOTrainer(
        model=str(folder),
        reward_funcs=lambda completions, **_others: [_digit_share(c[0]["content"]) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS]),
        **others,
    )


if __name__ == "__main__":
    our_or_their, its_dtype, its_model, its_place = sys.argv[1:]
    print(json.dumps(_given_round(our_or_their, its_dtype, Path(its_model), Path(its_place))))  # type: ignore[arg-type]
