"""The seam between Klear and whatever samples tokens: tokens in, tokens out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import TypeAdapter

from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's decoding; `seed` makes its samples reproducible on the same engine.

    Log-probs are of the distribution a token was drawn from. With top_p = 1, top_k = 0 and repetition_penalty = 1 that is
    `log_softmax(logits / temperature)`, the learner's own; otherwise it is renormalised over what those three leave, and old
    log-probs for a policy ratio must be recomputed. Greedy (temperature 0) reports temperature 1, untruncated.
    """

    num_samples: int
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        if self.num_samples < 1 or self.max_new_tokens < 1:
            raise ValueError(f"num_samples = {self.num_samples} and max_new_tokens = {self.max_new_tokens} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """A weight by its Hugging Face name."""

    name: str
    dtype: str
    """As torch calls it: `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffer:
    """Weights that wait in a learner's memory for one engine to fetch them: see `transfer.py`."""

    host: str
    port: int
    """Of the learner's store, where the two sides meet."""
    key: str
    """Of this hand-over among all that use the store."""
    engine: int
    num_ranks: int
    """Processes of the engine that fetch, each of them everything."""
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """How long either side waits for the other."""
    version: int
    tensors: tuple[TensorSpec, ...]
    """In the order in which they are sent."""
    chunk_bytes: int


_OFFER = TypeAdapter(WeightOffer)


def dump_offer(offer: WeightOffer) -> str:
    """As text, for the ways between processes that carry nothing else."""
    return _OFFER.dump_json(offer).decode()


def load_offer(text: str) -> WeightOffer:
    """What `dump_offer` wrote."""
    return _OFFER.validate_json(text)


WeightSource = Path | Mapping[str, "Tensor"] | WeightOffer
"""New weights: a Hugging Face folder, all tensors under their Hugging Face names, or a learner that has them."""


class InferenceEngine(Protocol):
    """Samples answers. Calls overlap freely: batching is the engine's own business."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """`params.num_samples` completions of one prompt, in sample order. ValueError if the prompt leaves no room."""
        ...

    async def close(self) -> None:
        """Release what is held; waiting requests fail."""
        ...


class TrainableEngine(InferenceEngine, Protocol):
    """An engine whose weights follow the policy under training."""

    version: int

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Use these weights from the next token on; cached prefixes of the old ones are forgotten."""
        ...


@runtime_checkable
class SleepingEngine(TrainableEngine, Protocol):
    """An engine that can lend its GPU memory to a learner while nothing is asked of it."""

    async def sleep(self) -> None:
        """Give the memory away. Nothing may run or be asked until `wake`."""
        ...

    async def wake(self) -> None:
        """Take the memory back, with the weights from before `sleep`; nothing changes for an engine that is awake."""
        ...
