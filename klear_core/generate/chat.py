"""Ask a trained model questions, with the engine, chat template and context window that the pipeline uses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from klear_core.artifacts.model_files import check_whole
from klear_core.config.evaluate import LocalEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.errors import DataError, ResourceError
from klear_core.generate.decoder.shape import is_supported
from klear_core.generate.engine import InferenceEngine, SamplingParams, StreamingEngine
from klear_core.generate.factory import build_engine
from klear_core.hf_config import read_hf_config
from klear_core.prompts import completed, load_tokenizer, opening_of, render_prompt
from klear_core.types import Completion

if TYPE_CHECKING:
    from klear_core.prompts import Tokenizer

EngineChoice = Literal["auto", "torch", "vllm"]
_SMALL = 200_000_000
"""Weights up to which a model takes less than a gigabyte in float32."""
_TEXT_EVERY_S = 0.05
"""Seconds between two decodings of an unfinished answer."""


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

    async def ask(
        self, question: str, chat_params: ChatParams, on_text: Callable[[str], None] | None = None
    ) -> list[Completion]:
        """Return the answers to one question, sent as one user turn; tell `on_text` a single answer's text so far.

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
        if on_text is None or params.num_samples > 1 or not isinstance(self.engine, StreamingEngine):
            return [completed(completion, opening) for completion in await self.engine.generate(prompt_ids, params)]
        text_so_far = _TextSoFar(self.tokenizer, opening, on_text)
        return [completed(done, opening) for done in await self.engine.stream(prompt_ids, params, text_so_far)]

    async def close(self) -> None:
        """Release the engine."""
        await self.engine.close()


class _TextSoFar:
    """Decodes the tokens of an unfinished answer, some times a second, because each time it decodes all of them."""

    def __init__(self, tokenizer: Tokenizer, opening: str, on_text: Callable[[str], None]) -> None:
        self._tokenizer, self._opening, self._on_text = tokenizer, opening, on_text
        self._loop = asyncio.get_running_loop()
        self._due_at = 0.0

    def __call__(self, _sample: int, token_ids: tuple[int, ...]) -> None:
        """Tell the text, without a character whose last bytes are still to come."""
        now = time.monotonic()
        if now < self._due_at:
            return
        self._due_at = now + _TEXT_EVERY_S
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        # In the caller's thread: an error of what shows the text must not end the engine's.
        self._loop.call_soon_threadsafe(self._on_text, self._opening + str(text).rstrip("\ufffd"))


def chat_engine(choice: EngineChoice, folder: Path, *, free_bytes: int | None = None) -> LocalEngineConfig:
    """Return the engine for a model: ours or, if asked for or by its family, vLLM.

    Larger models are asked in bfloat16 wherever that is fast. Raise ResourceError if the weights exceed the memory of a
    CPU, of which `free_bytes` are free (None: what the system says).
    """
    if choice == "vllm" or (choice == "auto" and not is_supported(folder)):
        return VllmEngineConfig()
    num_params = read_hf_config(folder).num_params
    if num_params <= _SMALL:
        return TorchEngineConfig()  # float32, as in the evaluation of small models

    import psutil

    from klear_core.generate.decoder.torch_engine import device_name
    from klear_core.products import instructions

    is_on_gpu = device_name(TorchEngineConfig()) == "cuda"
    cfg = TorchEngineConfig(dtype="bfloat16" if is_on_gpu or instructions() else "float32")
    free_bytes = psutil.virtual_memory().available if free_bytes is None else free_bytes
    needed_bytes = num_params * (2 if cfg.dtype == "bfloat16" else 4)
    if not is_on_gpu and needed_bytes > free_bytes:
        raise ResourceError(
            f"{folder}: {num_params / 1e9:.1f} billion weights take {needed_bytes / 1e9:.1f} GB in {cfg.dtype}, and "
            f"{free_bytes / 1e9:.1f} GB of memory are free; ask it on a GPU or a larger machine"
        )
    return cfg


async def open_chat(
    folder: Path, cfg: LocalEngineConfig, *, num_threads: int, seed: int, window: int | None = None
) -> ChatModel:
    """Load the model and tokenizer of a Hugging Face folder. `window` raises the positions that its config states.

    Raise ConfigError if its files are not whole or the engine cannot run it, ResourceError if the engine is not
    installed.
    """
    check_whole(folder)
    tokenizer = load_tokenizer(folder)
    engine = await build_engine(cfg, folder, num_threads=num_threads, seed=seed, window=window)
    return ChatModel(engine=engine, tokenizer=tokenizer, window=read_hf_config(folder).window(window))
