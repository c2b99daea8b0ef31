"""Define the interface of teachers: they return one sample at a time, or the reason why it is missing."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from klear_core.config.distill import HttpTeacherConfig, LocalTeacherConfig
from klear_core.errors import KlearError, ResourceError, TeacherError
from klear_core.evaluate.run import EnginesAndJudges
from klear_core.generate.engine import one_sample
from klear_core.generate.factory import EngineSpec, Sampler, running
from klear_core.generate.pool import expect
from klear_core.prompts import (
    THINK_CLOSE,
    THINK_OPEN,
    completed,
    load_tokenizer,
    opening_of,
    render_prompt,
    split_response,
)
from klear_core.seeding import seed_for
from klear_core.types import Completion, Domain, Problem, TeacherReply

if TYPE_CHECKING:
    from klear_core.prompts import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherFailure:
    """One sample that could not be obtained. `reason` is the slug to count by, `detail` the text for people."""

    reason: str
    detail: str


TeacherResult = TeacherReply | TeacherFailure

OVER_BUDGET = "over_budget"
"""Reason of samples that were not requested because the budget was spent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens and money spent on samples, failed attempts included."""

    attempts: int = 0
    replies: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    estimated: int = 0
    """Replies whose endpoint sent no token counts."""
    unseeded: int = 0
    """Replies to seeded requests without a `system_fingerprint`, by which a server vouches for its seeds."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)})

    @property
    def tokens(self) -> int:
        """Return prompt and reply tokens."""
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSample:
    """The result of one sample and what all attempts at it used."""

    result: TeacherResult
    usage: Usage = field(default_factory=Usage)


def question_of(problem: Problem, cfg: HttpTeacherConfig | LocalTeacherConfig) -> str:
    """Return the question with the teacher's instruction for its domain."""
    instruction = cfg.math_instruction if problem.domain is Domain.MATH else cfg.code_instruction
    return f"{problem.question}\n\n{instruction}" if instruction else problem.question


def prompt_version_of(cfg: HttpTeacherConfig | LocalTeacherConfig) -> str:
    """Return a name for the instructions, which changes with their wording."""
    # A separator that no text has: words that move from one instruction to the other change the name.
    instructions = f"{cfg.math_instruction}\x1f{cfg.code_instruction}".encode()
    return "chat-" + hashlib.blake2b(instructions, digest_size=4).hexdigest()


_ANALYSIS = "<|channel|>analysis<|message|>"
_OTHER_TAGS = (
    *((f"<{name}>", f"</{name}>") for name in ("thinking", "thought", "reasoning", "seed:think")),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    (_ANALYSIS, "<|channel|>final<|message|>"),
)
"""Tags that servers leave around the reasoning of Claude, Gemini, Seed, Kimi, Magistral and gpt-oss."""
_THINK_TAG = re.compile(r"(</?think(?:ing)?)(?:\s[^<>]{0,80})?>", re.I)
_END_OF_MESSAGE = re.compile(r"<\|(?:end|return)\|>(?:<\|start\|>assistant)?")


def split_tags(content: str, reasoning: str = "") -> tuple[str, str]:
    """Return reasoning and answer of a reply whose text may have think tags; `reasoning` is what came apart from it.

    The tags of other models count at the start of the text alone.
    """
    content = _THINK_TAG.sub(lambda tag: f"{tag[1].lower()}>", content)
    for opened, closed in _OTHER_TAGS:
        if content.lstrip().startswith(opened):
            thought, close, answer = content.lstrip().removeprefix(opened).partition(closed)
            if opened == _ANALYSIS:
                thought, answer = (_END_OF_MESSAGE.sub("", text) for text in (thought, answer))
            content = THINK_OPEN + thought + (THINK_CLOSE if close else "") + answer
    if THINK_CLOSE in content or (THINK_OPEN in content and not reasoning):
        parts = split_response(content)
        content, thought = parts.answer, parts.reasoning.strip()
        # A thought that came both ways is kept once.
        if thought not in reasoning:
            reasoning = f"{reasoning.strip()}\n\n{thought}"
    return reasoning.strip(), content.strip()


class TeacherRejectsError(TeacherError):
    """The teacher rejects these settings (key, address, model), so retrying cannot help."""

    is_permanent = True


class BudgetError(TeacherError):
    """The budget is spent before the stage is done; what was paid for is kept for the next run."""

    is_permanent = True


class Teacher(Protocol):
    """Solves problems. `sample` may be called concurrently without limit; the teacher bounds its requests itself."""

    name: str
    prompt_version: str
    """Version of the prompt; it changes whenever the wording sent with a problem changes."""
    is_costly: bool
    """Whether replies cost time or money, so that each is written to the disk as it arrives."""

    @property
    def retries(self) -> Mapping[str, int]:
        """Return the number of retried requests so far, by reason."""
        ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings about the endpoints, for the report."""
        ...

    def count_earlier(self, usage: Usage) -> None:
        """Count what earlier runs of the stage spent against the budget."""
        ...

    def expect(self, num_samples: int) -> None:
        """Count on so many more samples, or fewer if negative: a teacher whose engines run here closes idle ones."""
        ...

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample of a problem. `seed` is the run's; the sample's own seed is derived from it.

        Raise TeacherError if the teacher cannot be reached at all.
        """
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


# ---- local ----
# Sample from a teacher whose weights are on disk, with the engines that evaluation uses.


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
    cfg: LocalTeacherConfig, model: Path, *, name: str, seed: int, workdir: Path, compute: EnginesAndJudges
) -> AsyncIterator[LocalTeacher]:
    """Start the engines of a teacher with the model of an artifact, and yield it; see `EnginesAndJudges`."""
    spec = EngineSpec.of_model(
        cfg.engine,
        model,
        num_threads=cfg.runtime.num_threads,
        seed=seed_for(seed, "distill/engine"),
        workdir=workdir,
        answer_tokens=cfg.sampling.max_new_tokens,
    )
    async with running(compute.start_sampler, spec) as sampler:
        yield LocalTeacher(cfg, sampler, load_tokenizer(spec.model_folder), name=name)
