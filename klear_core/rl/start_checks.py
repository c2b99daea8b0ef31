"""Check at the start of RL that engines and learner compute the same log-probs from the initial model.

Seeded answers to a fixed question are sampled at the stage's temperature, at least one by each engine. Of each answer,
the mean distance of the engine's log-probs from the learner's must be within a tolerance. An engine with other weights,
positions or temperature is off by tenths of a nat and more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from klear_core.errors import TrainingError
from klear_core.generate.engine import SamplingParams, SleepingEngine, TrainableEngine
from klear_core.prompts import load_tokenizer, render_prompt
from klear_core.rl.workers import LearnerHandle, RlSetup
from klear_core.seeding import seed_for
from klear_core.train.base import model_folder
from klear_core.types import Completion, TrainSample

log = logging.getLogger(__name__)

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

    Raise TrainingError if they disagree and `runtime.engine_check` is `refuse`, or if the engines do not answer.
    """
    cfg = setup.cfg
    if cfg.runtime.engine_check == "off":
        return ""
    tokenizer = await asyncio.to_thread(load_tokenizer, model_folder(setup.model))
    prompt_ids = render_prompt(tokenizer, _QUESTION)
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
    distance = await learner.distance([_sample(prompt_ids, completion) for completion in completions])
    dtypes = {cfg.dtype, cfg.rollout.engine.dtype}
    allowed = TOLERANCES["bfloat16" if "bfloat16" in dtypes else "float32"]
    if distance <= allowed:  # false for NaN
        return ""
    note = (
        f"the engine's log-probs are {distance:.3g} nats per token from the learner's on the initial model, and "
        f"{allowed:g} are allowed: they may have other weights, positions or temperatures"
    )
    if cfg.runtime.engine_check == "refuse":
        raise TrainingError(f'{note} (runtime.engine_check = "refuse")')
    log.warning("%s", note)
    return note


async def _answers(engine: TrainableEngine, prompt_ids: Sequence[int], setup: RlSetup) -> list[Completion]:
    """Return a sampled answer for each of several seeds; concurrent requests go to different engines."""
    cfg = setup.cfg
    requests = []
    # At least one for each engine: a pool sends each request to the least busy one.
    for i in range(max(_MIN_ANSWERS, cfg.runtime.num_rollout_actors)):
        params = SamplingParams(
            num_samples=1,
            temperature=cfg.rollout.sampling.temperature,
            # Without truncation the engine reports the log-probs that the learner computes.
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=min(_NUM_TOKENS, cfg.rollout.sampling.max_new_tokens),
            seed=seed_for(setup.seed, "rl/engine_check", i),
        )
        requests.append(engine.generate(prompt_ids, params))
    return [completion for completions in await asyncio.gather(*requests) for completion in completions]


def _sample(prompt_ids: Sequence[int], completion: Completion) -> TrainSample:
    # Only ids, mask and log-probs are read: nothing is trained on it.
    num_prompt, num_answer = len(prompt_ids), len(completion.token_ids)
    return TrainSample(
        problem_id="engine_check",
        token_ids=(*prompt_ids, *completion.token_ids),
        loss_mask=(False,) * num_prompt + (True,) * num_answer,
        old_logps=(0.0,) * num_prompt + completion.logps,
        advantage=0.0,
        is_positive=False,
        oldest_version=0,
    )
