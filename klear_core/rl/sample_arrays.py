"""Training samples as arrays, so that a learner rank is sent the tokens of its own alone. Imports no torch.

A step of a thousand GPUs has hundreds of millions of tokens. As tuples every rank would unpickle all of them; as arrays
(int32 ids, float32 log-probs, masks as lengths of runs) they are 8 bytes a token, 12 with a teacher's log-probs and 8
more for each of its likeliest tokens, which Ray's store shares without a copy.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from klear_core.types import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """Tokens of some samples, end to end."""

    indices: tuple[int, ...]
    """Places of these samples among all of the step."""
    ids: np.ndarray
    """int32."""
    logps: np.ndarray
    """float32, as the learner computes with them; 0 on prompts."""
    teacher_logps: np.ndarray
    """float32; only of the samples that have them."""
    top_ids: np.ndarray
    """int32; the teacher's likeliest tokens in these samples."""
    top_logps: np.ndarray


_NO_IDS, _NO_LOGPS = np.empty(0, np.int32), np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleArrays:
    """A `TrainSample` as arrays; a rank has the tokens of its own samples, and of the others the counts."""

    index: int
    """Place among the samples of the step."""
    problem_id: str
    advantage: float
    is_positive: bool
    oldest_version: int
    runs: tuple[int, ...]
    """Lengths of the runs of equal values in the loss mask. The first run is of False, and may be empty."""
    num_tokens: int
    num_loss_tokens: int
    prompt_key: int
    """Number of the prompt, among the different ones of the step."""
    token_ids: np.ndarray
    """int32; empty for a sample of another rank, as `sampler_logps` is."""
    sampler_logps: np.ndarray
    has_teacher: bool
    teacher_logps: np.ndarray
    num_tops: int
    """Length of `top_ids`, which is empty for a sample of another rank."""
    top_ids: np.ndarray
    top_logps: np.ndarray

    @property
    def num_prompt_tokens(self) -> int:
        """Return the number of tokens before the first that carries loss."""
        return self.runs[0]

    @property
    def loss_mask(self) -> np.ndarray:
        """Return the loss mask."""
        return np.repeat(np.arange(len(self.runs)) % 2 == 1, self.runs)

    def record(self) -> TrainSample:
        """Return the sample as a record, which can be written to a file."""
        return TrainSample(
            problem_id=self.problem_id,
            token_ids=tuple(self.token_ids.tolist()),
            loss_mask=tuple(self.loss_mask.tolist()),
            sampler_logps=tuple(self.sampler_logps.tolist()),
            advantage=self.advantage,
            is_positive=self.is_positive,
            oldest_version=self.oldest_version,
            teacher_logps=tuple(self.teacher_logps.tolist()),
            top_ids=tuple(self.top_ids.tolist()),
            top_logps=tuple(self.top_logps.tolist()),
        )


LearnerSample = TrainSample | SampleArrays
"""A sample as the learner reads it: the record where all is in one process, arrays on a rank of several."""
SampleT = TypeVar("SampleT", bound=LearnerSample)


def without_tokens(samples: Sequence[TrainSample]) -> tuple[SampleArrays, ...]:
    """Return samples with everything but the tokens: what every rank needs to plan the step as the others do."""
    numbers: dict[Hashable, int] = {}
    arrays = []
    for index, sample in enumerate(samples):
        mask = np.fromiter(sample.loss_mask, np.bool_, len(sample.loss_mask))
        # Where the mask changes; a leading False gives a mask that begins with True an empty first run.
        changes = np.flatnonzero(np.diff(mask, prepend=False))
        runs = np.diff(changes, prepend=0, append=len(mask))
        prompt = sample.token_ids[: int(runs[0])]
        arrays.append(
            SampleArrays(
                index=index,
                problem_id=sample.problem_id,
                advantage=sample.advantage,
                is_positive=sample.is_positive,
                oldest_version=sample.oldest_version,
                runs=tuple(runs.tolist()),
                num_tokens=len(mask),
                num_loss_tokens=int(mask.sum()),
                prompt_key=numbers.setdefault(prompt, len(numbers)),
                token_ids=_NO_IDS,
                sampler_logps=_NO_LOGPS,
                has_teacher=sample.has_teacher,
                teacher_logps=_NO_LOGPS,
                num_tops=len(sample.top_ids),
                top_ids=_NO_IDS,
                top_logps=_NO_LOGPS,
            )
        )
    return tuple(arrays)


def tokens_of(samples: Sequence[TrainSample], indices: Sequence[int]) -> Tokens:
    """Return the tokens of these of the samples."""
    chosen = [samples[i] for i in indices]
    ends = np.cumsum([0, *(len(sample.token_ids) for sample in chosen)]).tolist()
    ids, logps = np.empty(ends[-1], np.int32), np.empty(ends[-1], np.float32)
    for sample, start, end in zip(chosen, ends, ends[1:], strict=False):
        ids[start:end] = np.fromiter(sample.token_ids, np.int32, end - start)
        # Rounded here and not in the learner, which computes with float32: the same rounding of the same numbers.
        logps[start:end] = np.fromiter(sample.sampler_logps, np.float32, end - start)
    scored = [np.fromiter(s.teacher_logps, np.float32, s.num_tokens) for s in chosen if s.has_teacher]
    tops = [np.fromiter(s.top_ids, np.int32, len(s.top_ids)) for s in chosen]
    top_logps = [np.fromiter(s.top_logps, np.float32, len(s.top_logps)) for s in chosen]
    return Tokens(
        indices=tuple(indices),
        ids=ids,
        logps=logps,
        teacher_logps=np.concatenate([_NO_LOGPS, *scored]),
        top_ids=np.concatenate([_NO_IDS, *tops]),
        top_logps=np.concatenate([_NO_LOGPS, *top_logps]),
    )


def with_tokens(counts: Sequence[SampleArrays], tokens: Tokens) -> list[SampleArrays]:
    """Return all samples of the step, those of `tokens` with views of its arrays."""
    samples, start, teacher_start, top_start = list(counts), 0, 0, 0
    for i in tokens.indices:
        end = start + samples[i].num_tokens
        teacher_end = teacher_start + samples[i].num_tokens * samples[i].has_teacher
        top_end = top_start + samples[i].num_tops
        samples[i] = replace(
            samples[i],
            token_ids=tokens.ids[start:end],
            sampler_logps=tokens.logps[start:end],
            teacher_logps=tokens.teacher_logps[teacher_start:teacher_end],
            top_ids=tokens.top_ids[top_start:top_end],
            top_logps=tokens.top_logps[top_start:top_end],
        )
        start, teacher_start, top_start = end, teacher_end, top_end
    return samples


def samples_here(samples: Sequence[LearnerSample]) -> list[TrainSample]:
    """Return as records those of the samples whose tokens are here."""
    records = []
    for sample in samples:
        match sample:
            case TrainSample():
                records.append(sample)
            case SampleArrays() if len(sample.token_ids):
                records.append(sample.record())
    return records
