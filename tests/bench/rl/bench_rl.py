"""RL against TRL's GRPOTrainer: tokens a CPU-second of whole steps on the laptop model, and every loss on the same rows.

TRL is no dependency of ours: `pip install trl` into an environment that has Klear, then `klear bench rl`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from klear_core.config.evaluate import SamplingConfig
from klear_core.config.losses import CispoConfig, ClipConfig, GspoConfig, LossConfig
from klear_core.config.rl import RewardConfig, RlConfig, RlOptimConfig, RolloutConfig
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import LocalWorkers, RlSetup
from klear_core.rl.loop import run_rl
from klear_core.rl.objective import Denominators, loss_head, make_batch
from klear_core.rl.step_metrics import TokenStats
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.train.model import load_model
from klear_core.train.packing import pack
from klear_core.train.step import grad_norm
from klear_core.types import Difficulty, Domain, MathReference, Outcome, Problem, TrainSample, Verdict

TARGET_PROMPTS, MORE_PROMPTS, GROUP, NEW_TOKENS, STEPS, LR = 8, 32, 8, 64, 6, 3e-4
"""The target holds for 64 rows a step; 256 are measured beside it, for TRL gains more from larger batches than Klear does."""
TARGET_RATIO = 3.0
ROUNDS = 5
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


def measure() -> list[dict[str, object]]:
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
    with tempfile.TemporaryDirectory() as folder:
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
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _rates(base: Path, workdir: Path, num_prompts: int) -> list[tuple[str, float, str, str, bool]]:
    rounds = []
    for i in range(ROUNDS):
        place = workdir / f"{num_prompts}-{i}"
        rounds.append((_klear_rate(base, place / "klear", num_prompts), _trl_rate(base, place / "trl", num_prompts)))
    ours, theirs = (statistics.median(rates) for rates in zip(*rounds, strict=True))
    ratio = statistics.median(our_rate / their_rate for our_rate, their_rate in rounds)
    is_target = num_prompts == TARGET_PROMPTS
    name, target = f"rl/tokens_per_cpu_s/{num_prompts * GROUP}_rows", f">= {TARGET_RATIO:g}" if is_target else "-"
    return [
        (f"{name}/klear", ours, "sampled tokens/s", "-", True),
        (f"{name}/trl", theirs, "sampled tokens/s", "-", True),
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
                old_logps=(0.0,) * PROMPT_LEN + tuple(old),
                advantage=(-1.0) ** i * (0.5 + i % 3),
                is_positive=False,
                oldest_version=0,
            )
        )
    return rows


def _config(case: Case | None = None, *, num_prompts: int = TARGET_PROMPTS) -> RlConfig:
    rollout = RolloutConfig(
        groups_per_step=num_prompts, samples_per_group=GROUP, sampling=SamplingConfig(max_new_tokens=NEW_TOKENS)
    )
    settings: dict[str, object] = {
        "num_steps": STEPS,
        "minibatches_per_step": 1,
        "optim": RlOptimConfig(lr=LR, warmup_steps=0, weight_decay=0),
        "lm_coef": 0.0,
        "old_logps": "sampler",
        "reward": RewardConfig(missing_close=None, missing_open=None),
        "rollout": rollout,
        "dtype": "float32",
        "runtime": {"device": "cpu"},
    }
    if case is not None:
        settings |= {"loss": case.loss, "normalise": case.normalise}
    return RlConfig.model_validate(settings)


def _klear_loss(rows: list[TrainSample], base: Path, case: Case) -> tuple[float, float]:
    policy, cfg = load_model(model_folder(base), device="cpu"), _config(case)
    (micro,) = pack(rows, tokens_per_microbatch=1 << 20).micro_batches
    batch = make_batch(micro, rows, None, None, Denominators.of(rows), cfg)
    out = policy(micro, loss_head(batch, cfg, TokenStats(torch.device("cpu"))))
    out.loss.backward()  # type: ignore[no-untyped-call]
    return out.loss.item(), grad_norm(policy).item()


def _trl_loss(rows: list[TrainSample], base: Path, workdir: Path, case: Case) -> tuple[float, float]:
    trainer = _trainer(base, workdir, case.trl)
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
        "old_per_token_logps": right_padded([list(r.old_logps[PROMPT_LEN:]) for r in rows]),
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

    def __init__(self, num_prompts: int) -> None:
        self._num_rows = num_prompts * GROUP
        self.marks: list[tuple[float, float]] = []

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        tokens = metrics["rl/response/mean_tokens"] * self._num_rows
        self.marks.append((time.process_time(), tokens))

    def rate(self) -> float:
        """Without the first step, which warms up."""
        return sum(tokens for _, tokens in self.marks[1:]) / (self.marks[-1][0] - self.marks[0][0])


def _klear_rate(base: Path, workdir: Path, num_prompts: int) -> float:
    reference = MathReference(answers=("0",))
    problems = [
        Problem(
            problem_id=q, source="s", domain=Domain.MATH, question=q, reference=reference, difficulty=Difficulty.EASY
        )
        for q in QUESTIONS
    ]

    async def judge(_problem: Problem, response: str) -> Verdict:
        return Verdict(outcome=Outcome.SCORED, score=_digit_share(response))

    clock = _Clock(num_prompts)
    job = RlSetup(cfg=_config(num_prompts=num_prompts), model=base, seed=0, workdir=workdir)
    asyncio.run(run_rl(job, problems, judge, clock, LocalWorkers()))
    return clock.rate()


def _trl_rate(base: Path, workdir: Path, num_prompts: int) -> float:
    from transformers import TrainerCallback

    clock = _Clock(num_prompts)

    class Log(TrainerCallback):  # type: ignore[misc]
        def on_log(
            self, _args: Any, _state: Any, _control: Any, logs: Mapping[str, float] | None = None, **_others: Any
        ) -> None:
            if logs and "completions/mean_length" in logs:
                clock.log({"rl/response/mean_tokens": logs["completions/mean_length"]}, step=0)

    trainer = _trainer(base, workdir, EPS | {"loss_type": "dapo"}, num_prompts, callbacks=[Log()])
    trainer.train()
    return clock.rate()


def _trainer(
    base: Path, workdir: Path, settings: Mapping[str, Any], num_prompts: int = TARGET_PROMPTS, **others: Any
) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    args = GRPOConfig(
        output_dir=str(workdir / "trl"),
        use_cpu=True,
        bf16=False,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_steps=STEPS,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        per_device_train_batch_size=GROUP * num_prompts,
        num_generations=GROUP,
        max_completion_length=NEW_TOKENS,
        temperature=1.0,
        beta=0.0,
        gradient_checkpointing=False,
        disable_tqdm=True,
        disable_dropout=True,
        **settings,
    )
    return GRPOTrainer(
        model=str(model_folder(base)),
        reward_funcs=lambda completions, **_others: [_digit_share(c[0]["content"]) for c in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS]),
        **others,
    )
