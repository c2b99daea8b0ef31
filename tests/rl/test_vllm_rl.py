"""RL with vLLM as the sampler: what it samples comes from the weights that the learner has just given it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rl_builders import Recorder, constant_rate, low_byte_judge, problem, rl_config
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "generate"))
from vllm_marks import needs_vllm

from klear_core.config.evaluate import VllmEngineConfig, VllmRuntime
from klear_core.config.rl import RlConfig, RolloutConfig
from klear_core.config.train import TinyModelConfig
from klear_core.generate.engine import SamplingParams, TrainableEngine, WeightSource
from klear_core.generate.factory import build_trainable_engine
from klear_core.metrics import NullTelemetry
from klear_core.rl.interfaces import LocalWorkers, RlSetup, Workers
from klear_core.rl.loop import run_rl
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.types import Completion

PROBLEMS = [problem(f"q{i}") for i in range(6)]
PROBE = tuple(65 + (i * i) % 97 for i in range(300))
"""Longer than two blocks of vLLM's CPU prefix cache (128 tokens each), and the same each time: stale cache would show."""
TOLERANCE = 5e-5
"""Nats, float32, as in tests/generate/test_vllm_engine.py."""
MODEL = TinyModelConfig(
    hidden_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=512,
)
"""vLLM's CPU attention needs a head_dim of 32 or more."""
ENGINE = VllmEngineConfig(dtype="float32", runtime=VllmRuntime(enforce_eager=True, kv_cache_mb=64, max_num_seqs=32))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = tmp_path_factory.mktemp("base")
    prepare_base(MODEL, seed=0, workdir=workdir, telemetry=NullTelemetry())
    return workdir


def config(**runtime: object) -> RlConfig:
    rollout = RolloutConfig.model_validate(
        {
            "groups_per_step": 4,
            "samples_per_group": 8,
            "sampling": {"max_new_tokens": 24},
            "engine": ENGINE.model_dump(),
        }
    )
    settings = {"device": "cpu", "num_rollout_actors": 1, "stall_timeout_s": 900} | runtime
    return rl_config(num_steps=2, optim=constant_rate(1e-2), rollout=rollout, runtime=settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One hand-over of weights, and what the engine then answered to PROBE: greedily, and at temperature 1."""

    weights: dict[str, torch.Tensor]
    greedy: Completion
    sampled: Completion


class Probed:
    """An engine that is asked PROBE after each update; all versions of what else it sampled are kept."""

    def __init__(self, engine: TrainableEngine) -> None:
        self.updates: dict[int, Update] = {}
        self.versions_seen: list[set[int]] = []
        self.version = engine.version
        self._engine = engine

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        current = self.version
        completions = await self._engine.generate(prompt_ids, params)
        assert self.version == current, "synchronous RL samples between updates"
        assert all(len(c.policy_versions) == len(c.token_ids) for c in completions)
        self.versions_seen += [{v - current for v in c.policy_versions} for c in completions]
        return completions

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        assert not isinstance(weights, Path)
        await self._engine.load_weights(weights, version=version)
        self.version = version
        greedy, sampled = [await self._engine.generate(PROBE, probe_params(t)) for t in (0.0, 1.0)]
        copies = {name: w.clone() for name, w in weights.items()}
        self.updates[version] = Update(weights=copies, greedy=greedy[0], sampled=sampled[0])

    async def close(self) -> None:
        await self._engine.close()


def probe_params(temperature: float) -> SamplingParams:
    return SamplingParams(
        num_samples=1, temperature=temperature, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=40, seed=3
    )


def assert_answers_come_from(model: Qwen3ForCausalLM, update: Update) -> None:
    keys = model.load_state_dict(update.weights, strict=False)
    assert (keys.missing_keys, keys.unexpected_keys) == (["lm_head.weight"], [])  # tied: it is the embedding
    for completion in (update.greedy, update.sampled):
        with torch.no_grad():
            logits_TV = model(torch.tensor([PROBE + completion.token_ids])).logits[0, len(PROBE) - 1 : -1]
        logp_TV = torch.log_softmax(logits_TV.float(), -1)
        logp_T = logp_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert (logp_T - torch.tensor(completion.logps)).abs().max() < TOLERANCE
        if completion is update.greedy:
            assert (logp_TV.amax(-1) - logp_T).max() < TOLERANCE


@needs_vllm
def test_after_every_step_the_engine_answers_with_the_learners_new_weights(base: Path, tmp_path: Path) -> None:
    recorder = Recorder()

    async def main() -> Probed:
        engine = Probed(await build_trainable_engine(ENGINE, model_folder(base), num_threads=1, seed=0))
        job = RlSetup(cfg=config(), model=base, seed=0, workdir=tmp_path)
        await run_rl(job, PROBLEMS, low_byte_judge, recorder, LocalWorkers(engine))
        return engine

    engine = asyncio.run(main())
    assert sorted(engine.updates) == [0, 1, 2]
    model = Qwen3ForCausalLM.from_pretrained(model_folder(base)).float().eval()
    for update in engine.updates.values():
        assert_answers_come_from(model, update)
    first, *others = (u.weights["model.embed_tokens.weight"] for u in engine.updates.values())
    assert all(not torch.equal(first, other) for other in others)
    assert engine.versions_seen
    assert all(lags == {0} for lags in engine.versions_seen)
    assert_sampler_and_learner_agree(recorder)


@needs_vllm
def test_a_vllm_engine_in_a_ray_actor_gets_its_weights_straight_from_the_learner(
    session: None, base: Path, tmp_path: Path
) -> None:
    from klear_core.cluster.rl_workers import RayWorkers

    recorder = Recorder()
    workers: Workers = RayWorkers()
    job = RlSetup(cfg=config(weight_sync="direct"), model=base, seed=0, workdir=tmp_path)
    state = asyncio.run(run_rl(job, PROBLEMS, low_byte_judge, recorder, workers))
    assert state.notes == ()  # the checks at the start of the direct way and of the log-probs
    assert_sampler_and_learner_agree(recorder)
    before, after = (load_file(artifact / "model" / "model.safetensors") for artifact in (base, tmp_path))
    assert not torch.equal(before["model.embed_tokens.weight"], after["model.embed_tokens.weight"])


def assert_sampler_and_learner_agree(recorder: Recorder) -> None:
    """The first mini-batch of each step is scored by the learner with the very weights that its answers came from."""
    assert len(recorder.rows) == 2
    for row in recorder.rows:
        assert row["rl/optim/updates"] > 0
        assert row["rl/staleness/max"] == 0
        assert 0 < row["rl/mismatch/max"] < 1e-3
        assert row["rl/mismatch/k3"] < 1e-6
