"""Define the interface between the RL loop and its learner and engines, and implement it within this process."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar, TypeVarTuple

from klear_core.config.evaluate import VllmEngineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import EngineMismatchError, TrainingError
from klear_core.generate.engine import SamplingParams, SleepingEngine, TrainableEngine, WeightSource
from klear_core.prompts import load_tokenizer, render_prompt
from klear_core.seeding import seed_for
from klear_core.train.base_model import engine_window, model_folder, wanted_window
from klear_core.types import Completion, TrainSample
from klear_core.verify import JudgePool

if TYPE_CHECKING:
    from klear_core.artifacts.remote_paths import RemotePaths
    from klear_core.rl.learner import Learner
    from klear_core.train.checkpoint import Counters

log = logging.getLogger(__name__)

T = TypeVar("T")
Args = TypeVarTuple("Args")


class LearnerLost(TrainingError):  # noqa: N818  # it is an event to recover from before it is an error
    """The learner died and was restarted with the initial model: call `restore` and go on from its checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RlSetup:
    """Inputs from which learner and engines are built."""

    cfg: RlConfig
    model: Path
    """The initial model: its artifact folder, or a Hugging Face folder."""
    workdir: Path
    seed: int = 0
    remote: RemotePaths | None = None
    """Place from which nodes with other disks fetch the model, and to which they send the result; None without a shared
    store."""

    def on_this_node(self) -> RlSetup:
        """Return the setup with this node's own paths."""
        if self.remote is None:
            return self
        return replace(self, model=self.remote.local_path(self.model), workdir=self.remote.local_path(self.workdir))


STEP = "do the updates of an RL step"


class LearnerHandle(ABC):
    """The calls that the RL loop makes to the learner, wherever it runs. Each may raise LearnerLost.

    A subclass says in `call` where the learner is; the rest of this class is the same for all of them.
    """

    def __init__(self) -> None:
        self._notes: list[str] = []

    @abstractmethod
    async def call(self, what: str, method: Callable[[Learner, *Args], T], *args: *Args) -> T:
        """Call `method` with the learner of each rank and `args`; return rank 0's result. `what` is for messages."""

    async def restore(self) -> Counters | None:
        """Load the newest checkpoint and return its counters; without one keep the initial model and return None."""
        return await self.call("restore a checkpoint", lambda learner: learner.restore())

    async def notes(self) -> tuple[str, ...]:
        """Return notes for the stage's manifest, known once the learner has started."""
        return (*await self.call("send its notes", lambda learner: learner.notes), *self._notes)

    def add_note(self, note: str) -> None:
        """Add a note for the stage's manifest, unless it is empty."""
        self._notes += [note] if note else []

    async def step(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Do one RL step and return its metrics."""
        return await self.call(STEP, lambda learner, samples: learner.step(samples), samples)

    async def logp_error(self, samples: Sequence[TrainSample]) -> float:
        """Return the largest mean distance of a sample's log-probs from the sampler's, in nats."""
        return await self.call("compute log-probs", lambda learner, samples: learner.logp_error(samples), samples)

    async def weights(self) -> WeightSource:
        """Return the current weights, for the engine's `load_weights`."""
        return await self.call("gather the weights", lambda learner: learner.weights())

    async def save(self, counters: Counters) -> None:
        """Save a checkpoint with these counters."""
        await self.call("save a checkpoint", lambda learner: learner.save(counters))

    async def finish_save(self) -> None:
        """Wait until the last checkpoint is complete."""
        await self.call("finish a checkpoint", lambda learner: learner.finish_save())

    async def export(self, target: Path) -> None:
        """Write the model folder."""
        await self.call("export the model", lambda learner: learner.export(target))


class Workers(Protocol):
    """Start and stop the processes of one RL stage."""

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start the learner with the initial model, and the engine that samples from it as version 0."""
        ...

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build the judges; use the result as a context manager."""
        ...

    def status(self) -> str:
        """Describe what the sampling engines are doing, for messages."""
        ...

    async def close(self) -> None:
        """Stop every process and thread that was started."""
        ...


class LocalWorkers:
    """Run learner and engine in this process: for tests, debugging, and machines without Ray."""

    def __init__(self, engine: TrainableEngine | None = None) -> None:
        """Use `engine`, if given, instead of the configured one."""
        self._engine = engine
        self._learner: LocalLearner | None = None

    async def start(self, setup: RlSetup) -> tuple[LearnerHandle, TrainableEngine]:
        """Start one learner rank, whatever `runtime.num_workers` says."""
        # Imported here, because the driver of a cluster imports this module and needs no torch.
        from klear_core.generate.factory import build_trainable_engine
        from klear_core.rl.learner import Learner
        from klear_core.train.distributed import World
        from klear_core.train.model import pick_device

        runtime = setup.cfg.runtime
        world = World(rank=0, size=1, device=pick_device(runtime.device))
        learner = Learner(setup.cfg, setup.model, seed=setup.seed, workdir=setup.workdir, world=world)
        is_ours = self._engine is None
        if self._engine is None:
            folder = model_folder(setup.model)
            threads, window = runtime.rollout_threads, wanted_window(setup.model)
            self._engine = await build_trainable_engine(
                setup.cfg.rollout.engine, folder, num_threads=threads, seed=setup.seed, window=window
            )
        self._learner = LocalLearner(learner, num_threads=runtime.num_threads)
        # A caller's own engine may have a model of its own.
        if is_ours:
            self._learner.add_note(await check_engine(self._learner, self._engine, setup))
        return self._learner, self._engine

    def judges(self, cfg: VerifyConfig) -> JudgePool:
        """Build judges on this machine."""
        return JudgePool(cfg)

    def status(self) -> str:
        """Name the engine."""
        return "the engine in this process"

    async def close(self) -> None:
        """Stop the learner's thread and close the engine."""
        if self._learner is not None:
            self._learner.close()
        if self._engine is not None:
            await self._engine.close()


class LocalLearner(LearnerHandle):
    """Run the learner on a separate thread of this process, so that sampling and judging can go on."""

    def __init__(self, learner: Learner, *, num_threads: int) -> None:
        import torch

        super().__init__()
        self._learner = learner
        # One thread, so the learner's calls never overlap.
        self._thread = ThreadPoolExecutor(1, "learner", initializer=torch.set_num_threads, initargs=(num_threads,))

    async def call(self, _what: str, method: Callable[[Learner, *Args], T], *args: *Args) -> T:
        """Call `method` with the learner on its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, method, self._learner, *args)

    def close(self) -> None:
        """Shut the thread down without waiting for a running call."""
        self._thread.shutdown(wait=False)


# ---- the check at the start: engines and learner compute the same log-probs from the initial model ----
# Seeded answers to a fixed question are sampled at the stage's temperature, at least one by each engine. Of each
# answer, the mean distance of the engine's log-probs from the learner's must be within a tolerance. An engine with
# other weights, positions or temperature is off by tenths of a nat and more. One question fills the window but for its
# answer: positions that only long answers reach, and a cache of many blocks, are checked too.

_QUESTION = "What is 17 times 23?"
_NUM_TOKENS = 32  # most of one answer
_MIN_ANSWERS = 4
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""Mean distance of log-probs allowed over an answer, in nats, by dtype (bfloat16 if either computes in it).

In float32 engine and learner differ by 1e-5 to 1e-4, because they add in another order. Bfloat16 has 8 bits, so that
rounding a logit of 16 alone moves it by up to 0.06.
"""


async def check_engine(learner: LearnerHandle, engine: TrainableEngine, setup: RlSetup) -> str:
    """Return a note for the manifest if engine and learner disagree; empty if they agree, or if the check is off.

    Raise EngineMismatchError if they disagree and `runtime.engine_check` is `refuse` or the engine has settings that
    must be proved, TrainingError if the engines do not answer.
    """
    cfg = setup.cfg
    if cfg.runtime.engine_check == "off":
        return ""
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(setup.model))
    prompt_ids = render_prompt(tokenizer, _QUESTION)
    if cfg.rollout.drops_weights:
        await _sleep_once(learner, engine)
    try:
        async with asyncio.timeout(cfg.runtime.stall_timeout_s):
            completions = await _answers(engine, prompt_ids, setup)
    except TimeoutError:
        raise TrainingError(
            f"the engines gave no answer to a first question within {cfg.runtime.stall_timeout_s:g} s"
        ) from None
    # The learner may need the memory that an engine on its GPU holds; the first weights wake the engine again.
    if cfg.rollout.sleeps_between_rollouts:
        assert isinstance(engine, SleepingEngine), type(engine)
        await engine.sleep()
    error = await learner.logp_error([_sample(*answered) for answered in completions])
    dtypes = {cfg.dtype, cfg.rollout.engine.dtype}
    allowed = TOLERANCES["bfloat16" if "bfloat16" in dtypes else "float32"]
    if error <= allowed:  # false for NaN
        return ""
    engine_cfg = cfg.rollout.engine
    is_refused = cfg.runtime.engine_check == "refuse"
    if isinstance(engine_cfg, VllmEngineConfig) and engine_cfg.must_be_proved:
        is_refused = True
        allowed_note = "rollout.engine.kv_cache_dtype, engine_args or sleep_level may cause it: leave them out"
    else:
        allowed_note = "they may have other weights, positions or temperatures"
    note = (
        f"the engine's log-probs are {error:.3g} nats per token from the learner's on the initial model, and "
        f"{allowed:g} are allowed: {allowed_note}"
    )
    if is_refused:
        raise EngineMismatchError(f'{note} (runtime.engine_check = "{cfg.runtime.engine_check}")')
    log.warning("%s", note)
    return note


async def _sleep_once(learner: LearnerHandle, engine: TrainableEngine) -> None:
    """Have the engines drop their weights and get the learner's, as in every step: what is lost by it shows now."""
    assert isinstance(engine, SleepingEngine), type(engine)
    await engine.sleep()
    weights = await learner.weights()
    await engine.wake()
    await engine.load_weights(weights, version=engine.version)


async def _answers(
    engine: TrainableEngine, prompt_ids: Sequence[int], setup: RlSetup
) -> list[tuple[Sequence[int], Completion]]:
    """Return prompts with a sampled answer for each of several seeds; concurrent requests go to different engines."""
    cfg = setup.cfg
    num_new = min(_NUM_TOKENS, cfg.rollout.sampling.max_new_tokens)
    # At least one for each engine: a pool sends each request to the least busy one.
    prompts = [prompt_ids] * max(_MIN_ANSWERS, cfg.runtime.num_rollout_actors)
    longest = _longest_prompt(setup, num_new)
    if longest > len(prompt_ids):
        prompts.append((list(prompt_ids) * (longest // len(prompt_ids) + 1))[:longest])
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            num_samples=1,
            temperature=cfg.rollout.sampling.temperature,
            # Without truncation the engine reports the log-probs that the learner computes.
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=num_new,
            seed=seed_for(setup.seed, "rl/engine_check", i),
        )
        requests.append(engine.generate(prompt, params))
    answers = await asyncio.gather(*requests)
    return [(prompt, completion) for prompt, found in zip(prompts, answers, strict=True) for completion in found]


def _longest_prompt(setup: RlSetup, num_new: int) -> int:
    """Return the tokens before the last ones of the longest row that the stage trains on."""
    rollout = setup.cfg.rollout
    row = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    return min(row, engine_window(setup.model, setup.cfg.rollout.engine)) - num_new


def _sample(prompt_ids: Sequence[int], completion: Completion) -> TrainSample:
    # Only ids, mask and log-probs are read: nothing is trained on it.
    num_prompt, num_answer = len(prompt_ids), len(completion.token_ids)
    return TrainSample(
        problem_id="engine_check",
        token_ids=(*prompt_ids, *completion.token_ids),
        loss_mask=(False,) * num_prompt + (True,) * num_answer,
        sampler_logps=(0.0,) * num_prompt + completion.logps,
        advantage=0.0,
        is_positive=False,
        oldest_version=0,
    )
