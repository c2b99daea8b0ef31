"""Ask a trained model questions, with the engine, chat template and context window that the pipeline uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.config.engine import LocalEngineConfig
from klear_core.errors import DataError
from klear_core.generate.engine import InferenceEngine, SamplingParams
from klear_core.generate.factory import build_engine
from klear_core.hf_config import read_hf_config
from klear_core.prompts import completed, load_tokenizer, opening_of, render_prompt
from klear_core.types import Completion

if TYPE_CHECKING:
    from klear_core.prompts import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatParams:
    """Sampling settings for one question."""

    temperature: float = 0.0
    """0 is greedy."""
    max_tokens: int | None = None
    """Most tokens of one answer, thinking included; None uses all that the window leaves."""
    num_samples: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatModel:
    """A loaded model with its tokenizer; call `close` when done."""

    engine: InferenceEngine
    tokenizer: Tokenizer
    window: int
    """Positions for question and answer together."""

    async def ask(self, question: str, chat_params: ChatParams) -> list[Completion]:
        """Return the answers to one question, sent as one user turn.

        Raise DataError if it leaves no room for an answer, or is not text.
        """
        try:
            question.encode()
        except UnicodeEncodeError as e:
            raise DataError(f"the question is not text in UTF-8: {e}") from e
        prompt_ids = render_prompt(self.tokenizer, question)
        room = self.window - len(prompt_ids)
        if room < 1:
            raise DataError(
                f"the question takes {len(prompt_ids)} tokens with the marks of its turn, "
                f"and the model's window holds {self.window}, answer included; shorten it"
            )
        params = SamplingParams(
            num_samples=chat_params.num_samples,
            temperature=chat_params.temperature,
            # no truncation: samples come from the model's own distribution at this temperature
            top_p=1.0,
            top_k=0,
            repetition_penalty=1.0,
            max_new_tokens=min(room, chat_params.max_tokens or room),
            seed=chat_params.seed,
        )
        opening = opening_of(self.tokenizer)
        return [completed(completion, opening) for completion in await self.engine.generate(prompt_ids, params)]

    async def close(self) -> None:
        """Release the engine."""
        await self.engine.close()


async def open_chat(
    folder: Path, cfg: LocalEngineConfig, *, num_threads: int, seed: int, window: int | None = None
) -> ChatModel:
    """Load the model and tokenizer of a Hugging Face folder. `window` raises the positions that its config states.

    Raise ConfigError if the engine cannot run this model, ResourceError if the engine is not installed.
    """
    tokenizer = load_tokenizer(folder)
    engine = await build_engine(cfg, folder, num_threads=num_threads, seed=seed, window=window)
    return ChatModel(engine=engine, tokenizer=tokenizer, window=read_hf_config(folder).window(window))
