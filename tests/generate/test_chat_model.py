"""Chat shows a response from its beginning, also where the template has put the beginning into the prompt."""

import asyncio
import io
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from fake_engine import FakeAnswer, FakeEngine
from rich.console import Console
from test_hf_config import QWEN3, write_config

from flows.evaluate_model import _Stream
from klear_core.config.evaluate import TorchEngineConfig, VllmEngineConfig
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ResourceError
from klear_core.generate.chat import ChatModel, ChatParams, chat_engine
from klear_core.generate.engine import OnTokens, SamplingParams, StreamingEngine
from klear_core.generate.factory import build_engine
from klear_core.hf_config import read_hf_config
from klear_core.metrics import NullTelemetry
from klear_core.products import instructions
from klear_core.prompts import build_byte_tokenizer
from klear_core.train.base_model import prepare_base
from klear_core.types import Completion


def test_thinking_that_the_prompt_opens_is_shown_with_its_tag() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "assistant\\n<think>\\n")
    model = ChatModel(engine=FakeEngine(lambda *_: FakeAnswer(text="4</think>4")), tokenizer=tokenizer, window=1000)
    (said,) = asyncio.run(model.ask("2 + 2?", ChatParams()))
    assert said.text == "<think>\n4</think>4"


class Streaming:
    """An engine that tells two characters, and later half of a third, before its answer."""

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Completion]:
        ids = tuple(build_byte_tokenizer().encode("abé", add_special_tokens=False))
        if on_tokens is not None:
            on_tokens(0, ids[:2])
            await asyncio.sleep(0.2)
            on_tokens(0, ids[:3])
            await asyncio.sleep(0)
        done = {"logps": (0.0,) * len(ids), "policy_versions": (0,) * len(ids)}
        return [Completion(text="abé", token_ids=ids, finish_reason="stop", **done)]

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        return await self.stream(prompt_ids, params, None)

    async def close(self) -> None:
        pass


def test_the_text_of_an_unfinished_answer_has_no_half_of_a_character() -> None:
    texts: list[str] = []
    model = ChatModel(engine=Streaming(), tokenizer=build_byte_tokenizer(), window=1000)
    (said,) = asyncio.run(model.ask("2 + 2?", ChatParams(), texts.append))
    assert (said.text, texts) == ("abé", ["ab", "ab"])


def test_the_torch_engine_tells_each_token_of_an_unfinished_sample_once(tmp_path: Path) -> None:
    prepare_base(TinyModelConfig(hidden_size=16, num_layers=1), seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    told: list[tuple[int, ...]] = []

    async def answer() -> Completion:
        engine = await build_engine(TorchEngineConfig(), tmp_path / "model", num_threads=1, seed=0)
        assert isinstance(engine, StreamingEngine)
        greedy = SamplingParams(
            num_samples=1, temperature=0, top_p=1, top_k=0, repetition_penalty=1, max_new_tokens=8, seed=0
        )
        (streamed,) = await engine.stream([5, 6], greedy, lambda _sample, ids: told.append(ids))
        (plain,) = await engine.generate([5, 6], greedy)
        await engine.close()
        assert streamed == plain
        return streamed

    whole = asyncio.run(answer()).token_ids
    assert told == [whole[:n] for n in range(1, len(whole))]


def test_an_answer_is_printed_as_it_comes_and_once() -> None:
    file = io.StringIO()
    stream = _Stream(Console(file=file, width=20))
    text = "<think>\na long line that no terminal of this width holds\n</think>\n\n[bold]4"
    for end in range(0, len(text), 3):
        stream.show(text[:end])
    assert file.getvalue() == text[: len(file.getvalue())] != ""
    stream.end(text)
    assert file.getvalue() == text + "\n"


def test_a_large_model_is_asked_in_bfloat16_where_that_is_fast_and_refused_without_memory_for_it(
    tmp_path: Path,
) -> None:
    """Qwen3-8B in float32 is 33 GB."""
    small = write_config(tmp_path / "small", json.dumps(QWEN3))
    large = write_config(tmp_path / "large", json.dumps(QWEN3 | {"num_hidden_layers": 20_000}))
    num_params = read_hf_config(large).num_params
    is_half = torch.cuda.is_available() or bool(instructions())
    cfg = chat_engine("auto", large, free_bytes=4 * num_params)
    assert cfg == TorchEngineConfig(dtype="bfloat16" if is_half else "float32")
    assert chat_engine("auto", small, free_bytes=0) == TorchEngineConfig()
    assert chat_engine("vllm", large, free_bytes=0) == VllmEngineConfig()
    if not torch.cuda.is_available():
        with pytest.raises(
            ResourceError, match=r"billion weights take .* GB in b?float.* and 0\.0 GB of memory are free"
        ):
            chat_engine("torch", large, free_bytes=0)
