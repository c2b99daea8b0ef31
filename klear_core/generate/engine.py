"""Define the interface of the engines that sample tokens: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from pydantic import TypeAdapter

from klear_core.config.engine import SamplingConfig
from klear_core.types import Completion

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Decoding settings of one request; `seed` makes its samples reproducible on the same engine.

    Log-probs are those of the distribution that a token was drawn from. With top_p = 1, top_k = 0 and
    repetition_penalty = 1 that is `log_softmax(logits / temperature)`, the same as the learner's. Otherwise it is
    renormalised after those three, and old log-probs for a policy ratio must be recomputed. Greedy (temperature 0)
    reports temperature 1, untruncated.
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
            raise ValueError(
                f"num_samples = {self.num_samples} and max_new_tokens = {self.max_new_tokens} must be at least 1"
            )


def one_sample(sampling: SamplingConfig, *, seed: int) -> SamplingParams:
    """Return the request for one answer with a stage's decoding settings."""
    return SamplingParams(
        num_samples=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        max_new_tokens=sampling.max_new_tokens,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """Name, dtype and shape of one weight, under its Hugging Face name."""

    name: str
    dtype: str
    """The dtype's name in torch: `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightOffer:
    """An offer of new weights that one engine can fetch from a learner's memory; see `transfer.py`."""

    host: str
    port: int
    """Port of the learner's TCPStore, through which both sides form a process group."""
    key: str
    """Identifies this transfer among all that use the store."""
    engine: int
    num_ranks: int
    """Processes of the engine; each fetches all weights."""
    backend: Literal["gloo", "nccl"]
    timeout_s: float
    """Seconds that an engine waits for the learner; the learner waits half as long."""
    version: int
    tensors: tuple[TensorSpec, ...]
    """All tensors, in the order in which they are sent."""
    chunk_bytes: int


_OFFER = TypeAdapter(WeightOffer)


def dump_offer(offer: WeightOffer) -> str:
    """Serialise an offer as JSON, for calls between processes that carry only text."""
    return _OFFER.dump_json(offer).decode()


def load_offer(text: str) -> WeightOffer:
    """Parse the output of `dump_offer`."""
    return _OFFER.validate_json(text)


WeightSource = Path | Mapping[str, "Tensor"] | WeightOffer
"""New weights: a Hugging Face folder, all tensors by Hugging Face name, or an offer to fetch them from a learner."""


class InferenceEngine(Protocol):
    """Samples completions. Calls may overlap: each engine does its own batching."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.num_samples` completions of one prompt, in sample order.

        Raise ValueError if the prompt leaves no room.
        """
        ...

    async def close(self) -> None:
        """Release all resources; open requests fail."""
        ...


class TrainableEngine(InferenceEngine, Protocol):
    """An engine whose weights can be replaced by those of the policy under training."""

    version: int

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Use these weights from the next token on, and drop all cached prefixes of the old ones."""
        ...


@runtime_checkable
class SeparateEngine(TrainableEngine, Protocol):
    """An engine with processes of its own, each of which fetches the weights."""

    async def digest_offered(self, offer: WeightOffer) -> list[str]:
        """Fetch offered tensors without loading them; return a digest of what each process received."""
        ...


@runtime_checkable
class SleepingEngine(TrainableEngine, Protocol):
    """An engine that can release its GPU memory to a learner while it has no requests."""

    async def sleep(self) -> None:
        """Release the GPU memory. No request may run or start until `wake`."""
        ...

    async def wake(self) -> None:
        """Take the memory back, with the weights from before `sleep`. No effect on an engine that is awake."""
        ...
