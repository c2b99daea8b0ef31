"""Small models, problems, samples and judges for the tests of rl."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.config.evaluate import SamplingConfig
from klear_core.config.losses import GppoConfig
from klear_core.config.rewards import RewardConfig
from klear_core.config.rl import RlCheckpointConfig, RlConfig, RlOptimConfig, RlRuntime, RolloutConfig
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.rl.losses import LossInputs
from klear_core.train.base_model import prepare_base
from klear_core.train.distributed import World
from klear_core.types import Difficulty, Domain, MathReference, Outcome, Problem, TrainSample, Verdict

ONE = World(rank=0, size=1, device=torch.device("cpu"))
TINY = TinyModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    max_position_embeddings=64,
)
RAW_REWARD = RewardConfig(missing_close=None, missing_open=None)
"""For models that never learnt to think in tags."""


def tiny_base(workdir: Path) -> Path:
    workdir.mkdir(parents=True, exist_ok=True)
    prepare_base(TINY, seed=0, workdir=workdir, telemetry=NullTelemetry())
    return workdir


def problem(name: str, *, domain: Domain = Domain.MATH) -> Problem:
    reference = MathReference(answers=("1",))
    return Problem(
        problem_id=name, source="s", domain=domain, question=name, reference=reference, difficulty=Difficulty.EASY
    )


def problem_artifact(folder: Path, problems: Sequence[Problem]) -> Path:
    write_shard(folder / "problems" / shard_name(0, 1), problems)
    return folder


def sample(
    name: str,
    token_ids: Sequence[int],
    logps: Sequence[float],
    *,
    prompt: Sequence[int] = (1, 2),
    advantage: float = 1.0,
    is_positive: bool = False,
    version: int = 0,
    teacher: Sequence[float] = (),
) -> TrainSample:
    return TrainSample(
        problem_id=name,
        token_ids=(*prompt, *token_ids),
        loss_mask=(False,) * len(prompt) + (True,) * len(token_ids),
        sampler_logps=(0.0,) * len(prompt) + tuple(logps),
        advantage=advantage,
        is_positive=is_positive,
        oldest_version=version,
        teacher_logps=(0.0,) * len(prompt) + tuple(teacher) if teacher else (),
    )


def train_batch(old_logp_N: torch.Tensor, advantage_N: torch.Tensor, **changes: object) -> LossInputs:
    """Each token is a row of its own, unless `changes` say otherwise; nothing is corrected, and every scale is 1."""
    nan_N, one_N = torch.full_like(old_logp_N, torch.nan), torch.ones_like(old_logp_N)
    inputs: dict[str, object] = {
        "target_N": torch.zeros(len(old_logp_N), dtype=torch.int64),
        "row_N": torch.arange(len(old_logp_N)),
        "num_rows": len(old_logp_N),
        "sampler_logp_N": old_logp_N,
        "ref_logp_N": nan_N,
        "old_entropy_N": nan_N,
        "teacher_logp_N": torch.zeros_like(old_logp_N),
        "teacher_coef_N": torch.zeros_like(old_logp_N),
        "top_id_NK": torch.empty((len(old_logp_N), 0), dtype=torch.int64),
        "top_logp_NK": torch.empty((len(old_logp_N), 0)),
        "correction_N": one_N,
        "scale_N": one_N,
        "lm_scale_N": torch.zeros_like(old_logp_N),
    }
    return LossInputs(old_logp_N=old_logp_N, advantage_N=advantage_N, **inputs | changes)  # type: ignore[arg-type]


def random_samples(count: int, *, seed: int = 0, logp: float = -5.0) -> list[TrainSample]:
    """Rows of different lengths, half of them correct, advantages of both signs."""
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(count):
        length = int(torch.randint(2, 12, (), generator=generator))
        ids = torch.randint(0, 256, (length,), generator=generator).tolist()
        sign = 1 if i % 2 else -1
        samples.append(sample(f"p{i // 2}", ids, [logp] * length, advantage=sign * (1 + i % 3), is_positive=sign > 0))
    return samples


def scored_samples(count: int, *, logp: float = -5.0) -> list[TrainSample]:
    """`random_samples` of which a teacher scored every row but the third, each token differently."""
    generator = torch.Generator().manual_seed(1)
    scored = []
    for i, row in enumerate(random_samples(count, logp=logp)):
        logps = (-4 - 3 * torch.rand(row.num_tokens, generator=generator)).tolist()
        scored.append(replace(row, teacher_logps=() if i == 2 else tuple(logps)))
    return scored


def constant_rate(lr: float) -> RlOptimConfig:
    """Adam with neither warm-up nor decay."""
    return RlOptimConfig(lr=lr, warmup_steps=0, weight_decay=0)


def rl_config(**changes: object) -> RlConfig:
    """Four prompts of four answers of eight tokens, float32, ratios against the sampler."""
    rollout = RolloutConfig(groups_per_step=4, samples_per_group=4, sampling=SamplingConfig(max_new_tokens=8))
    settings: dict[str, object] = {
        "num_steps": 3,
        "minibatches_per_step": 2,
        "optim": constant_rate(1e-3),
        "loss": GppoConfig(),
        "lm_coef": 0.0,
        "old_logps": "sampler",
        "reward": RAW_REWARD,
        "rollout": rollout,
        "dtype": "float32",
        "runtime": RlRuntime(device="cpu", checkpoint=RlCheckpointConfig(every_steps=1), stall_timeout_s=60),
    }
    return RlConfig.model_validate(settings | changes)


async def low_byte_judge(asked: Problem, response: str) -> Verdict:
    """Right if the answer starts with a byte below `P`, as one in four does at first: a thing that any model can learn."""
    await asyncio.sleep(0)
    return Verdict(outcome=Outcome.SCORED, score=float(response[:1] < "P"))


class Recorder(NullTelemetry):
    """Keeps all rows in the order in which they come, and fails at a step if told to, as a kill would."""

    def __init__(self, fail_at: int = -1) -> None:
        self.steps: list[int] = []
        self.rows: list[dict[str, float]] = []
        self.fail_at = fail_at

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        if step == self.fail_at:
            raise KeyboardInterrupt
        self.steps.append(step)
        self.rows.append(dict(metrics))

    def column(self, name: str) -> list[float]:
        return [row[name] for row in self.rows]


def weights(workdir: Path) -> dict[str, torch.Tensor]:
    (file,) = (workdir / "model").glob("*.safetensors")
    return load_file(file)


def same_weights(a: Path, b: Path) -> bool:
    x, y = weights(a), weights(b)
    return x.keys() == y.keys() and all(torch.equal(x[k], y[k]) for k in x)
