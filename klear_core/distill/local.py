"""Sample from a teacher whose weights are on disk, with the engines that evaluation uses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.home import home_of
from klear_core.config.distill import LocalTeacherConfig
from klear_core.distill.teacher import (
    TeacherFailure,
    TeacherSample,
    Usage,
    prompt_version_of,
    question_of,
    split_tags,
)
from klear_core.errors import KlearError, ResourceError
from klear_core.evaluate.compute import Compute
from klear_core.generate.engine import one_sample
from klear_core.generate.factory import EngineSpec, Sampler
from klear_core.generate.pool import expect
from klear_core.prompts import completed, load_tokenizer, opening_of, render_prompt
from klear_core.seeding import seed_for
from klear_core.train.base import model_folder, wanted_window
from klear_core.types import Completion, Problem, TeacherReply

if TYPE_CHECKING:
    from klear_core.prompts import Tokenizer


class LocalTeacher:
    """Asks one engine, or a pool of them, for one reply per sample."""

    is_costly = True
    retries: Mapping[str, int] = {}
    """Empty, because the pool of engines retries by itself."""
    notes: tuple[str, ...] = ()

    def __init__(self, cfg: LocalTeacherConfig, sampler: Sampler, tokenizer: Tokenizer, *, name: str) -> None:
        """Create it in a running event loop."""
        self.cfg = cfg
        self.name = name
        self.prompt_version = prompt_version_of(cfg)
        self._sampler, self._tokenizer = sampler, tokenizer
        self._opening = opening_of(tokenizer)
        self._slots = asyncio.Semaphore(sampler.limit)

    def count_earlier(self, usage: Usage) -> None:
        """Do nothing: there is no budget."""

    def expect(self, num_samples: int) -> None:
        """Tell the pool of engines; see `EnginePool.expect`."""
        expect(self._sampler.engine, num_samples)

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample; a prompt that leaves no room for a reply is a failure of its own reason.

        Raise ResourceError if the engines cannot continue.
        """
        prompt_ids = render_prompt(self._tokenizer, question_of(problem, self.cfg))
        params = one_sample(self.cfg.sampling, seed=seed_for(seed, "distill/teacher", problem.problem_id, sample_idx))
        try:
            async with self._slots:
                (sampled,) = await self._sampler.engine.generate(prompt_ids, params)
        except KlearError:  # some are ValueErrors too
            raise
        except ValueError as e:
            return TeacherSample(result=TeacherFailure(reason="no_room", detail=str(e)), usage=Usage(attempts=1))
        if sampled.finish_reason == "abort":
            raise ResourceError(f"problem {problem.problem_id}: the engine aborted the request")
        reply = _reply(completed(sampled, self._opening))
        usage = Usage(attempts=1, replies=1, input_tokens=len(prompt_ids), output_tokens=reply.num_tokens)
        return TeacherSample(result=reply, usage=usage)

    async def close(self) -> None:
        """Stop the engines."""
        await self._sampler.engine.close()


def _reply(completion: Completion) -> TeacherReply:
    assert completion.finish_reason != "abort"
    reasoning, answer = split_tags(completion.text)
    return TeacherReply(
        reasoning=reasoning,
        answer=answer,
        finish_reason=completion.finish_reason,
        num_tokens=len(completion.token_ids),
    )


@asynccontextmanager
async def open_local_teacher(
    cfg: LocalTeacherConfig, model: Path, *, name: str, seed: int, workdir: Path, compute: Compute
) -> AsyncIterator[LocalTeacher]:
    """Start the engines of a teacher with the model of an artifact, and yield it; see `Compute.start_sampler`."""
    folder = model_folder(model)
    spec = EngineSpec(
        cfg=cfg.engine,
        model_folder=folder,
        num_threads=cfg.runtime.num_threads,
        seed=seed_for(seed, "distill/engine"),
        window=wanted_window(model),
        artifact=model,
        home=home_of(workdir),
    )
    tokenizer = load_tokenizer(folder)
    teacher = LocalTeacher(cfg, await compute.start_sampler(spec), tokenizer, name=name)
    try:
        yield teacher
    finally:
        await teacher.close()
