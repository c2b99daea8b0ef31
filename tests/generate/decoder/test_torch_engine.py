import asyncio
import copy
import itertools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch
from decoder_folder import END_ID, FAMILIES, build_model, write_folder
from transformers import Qwen3ForCausalLM

from klear_core.config.evaluate import TorchEngineConfig, TorchEngineRuntime
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.decoder.torch_engine import TorchEngine
from klear_core.generate.engine import SamplingParams, logps_of
from klear_core.types import Completion

MAX_LEN = 256
DEFAULT = TorchEngineConfig()
PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 2, 16, 17, 40, 100))]


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return build_model(max_len=MAX_LEN)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, model: Qwen3ForCausalLM) -> Path:
    return write_folder(tmp_path_factory.mktemp("model"), model)


def params(**changes: float) -> SamplingParams:
    defaults = {
        "num_samples": 2,
        "temperature": 0.8,
        "top_p": 1.0,
        "top_k": 0,
        "repetition_penalty": 1.0,
        "max_new_tokens": 30,
        "seed": 1,
    }
    return SamplingParams(**(defaults | changes))  # type: ignore[arg-type]


def run(folder: Path, body: Callable[[TorchEngine], Awaitable[None]], cfg: TorchEngineConfig = DEFAULT) -> None:
    async def main() -> None:
        engine = TorchEngine(folder, cfg, num_threads=1)
        try:
            await body(engine)
        finally:
            await engine.close()

    asyncio.run(main())


@torch.no_grad()
def reference_logits(model: Qwen3ForCausalLM, prompt: tuple[int, ...], completion: Completion) -> torch.Tensor:
    """Logits at each new token, from transformers' forward over the whole sequence."""
    return model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1].float()


def logp_errors(
    model: Qwen3ForCausalLM, prompt: tuple[int, ...], completion: Completion, *, temperature: float
) -> torch.Tensor:
    logp_TV = torch.log_softmax(reference_logits(model, prompt, completion) / temperature, -1)
    expected_T = logp_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    return (expected_T - torch.tensor(completion.logps)).abs()


def logp_error(
    model: Qwen3ForCausalLM, prompt: tuple[int, ...], completion: Completion, *, temperature: float
) -> float:
    return logp_errors(model, prompt, completion, temperature=temperature).max().item()


def test_logps_are_those_of_transformers_at_the_sampling_temperature(folder: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        for prompt in PROMPTS:
            for completion in await engine.generate(prompt, params(num_samples=4)):
                assert (
                    logp_error(model, prompt, completion, temperature=0.8) < 2e-5
                )  # logits reach 40 here: a few units in the last place

    run(folder, body)


def test_an_untied_head_is_used(tmp_path: Path) -> None:
    model = build_model(is_tied=False, max_len=MAX_LEN)

    async def body(engine: TorchEngine) -> None:
        for completion in await engine.generate(PROMPTS[3], params()):
            assert logp_error(model, PROMPTS[3], completion, temperature=0.8) < 2e-5

    run(write_folder(tmp_path, model), body)


def test_greedy_takes_the_largest_logit_and_reports_temperature_one(folder: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        for prompt in PROMPTS:
            (completion,) = await engine.generate(prompt, params(temperature=0.0, num_samples=1, top_p=0.5))
            assert reference_logits(model, prompt, completion).argmax(-1).tolist() == list(completion.token_ids)
            assert logp_error(model, prompt, completion, temperature=1.0) < 2e-5

    run(folder, body)


def test_a_row_is_the_same_to_the_bit_in_any_batch(folder: Path) -> None:
    async def body(engine: TorchEngine) -> None:
        crowd = await asyncio.gather(
            *(engine.generate(p, params(seed=s, num_samples=3)) for s in range(6) for p in PROMPTS)
        )
        for i, (seed, prompt) in enumerate((s, p) for s in range(6) for p in PROMPTS):
            assert await engine.generate(prompt, params(seed=seed, num_samples=3)) == crowd[i]

    run(folder, body)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answers_that_share_a_prompt_are_exact_while_others_join_and_leave(
    folder: Path, model: Qwen3ForCausalLM, temperature: float
) -> None:
    requests = [
        (prompt, params(num_samples=3, temperature=temperature, max_new_tokens=n))
        for n in (40, 3, 17)
        for prompt in PROMPTS
    ]

    async def body(engine: TorchEngine) -> None:
        groups = await asyncio.gather(*(engine.generate(prompt, decoding) for prompt, decoding in requests))
        for (prompt, decoding), group in zip(requests, groups, strict=True):
            for completion in group:
                assert completion.finish_reason == "stop" or len(completion.token_ids) == decoding.max_new_tokens
                assert logp_error(model, prompt, completion, temperature=temperature or 1.0) < 2e-5
                if temperature == 0:
                    assert reference_logits(model, prompt, completion).argmax(-1).tolist() == list(completion.token_ids)

    run(folder, body, TorchEngineConfig(runtime=TorchEngineRuntime(max_batch_size=7)))


def test_more_samples_than_rows_queue_up(folder: Path) -> None:
    narrow = TorchEngineConfig(runtime=TorchEngineRuntime(max_batch_size=3))
    answers: dict[int, list[Completion]] = {}

    async def body(engine: TorchEngine) -> None:
        size = len(answers)
        answers[size] = await engine.generate(PROMPTS[2], params(num_samples=20))

    run(folder, body)
    run(folder, body, narrow)
    assert answers[0] == answers[1]


def test_top_k_keeps_to_the_k_largest_and_renormalises(folder: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        for completion in await engine.generate(PROMPTS[2], params(top_k=2, temperature=2.0, num_samples=4)):
            top_T2 = (reference_logits(model, PROMPTS[2], completion) / 2.0).topk(2)
            for token_id, logp, values, indices in zip(completion.token_ids, completion.logps, *top_T2, strict=True):
                assert token_id in indices.tolist()
                assert logp == pytest.approx(
                    torch.log_softmax(values, -1)[indices.tolist().index(token_id)].item(), abs=2e-5
                )

    run(folder, body)


def test_repetition_penalty_counts_prompt_and_answer(folder: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        (completion,) = await engine.generate(
            PROMPTS[4], params(repetition_penalty=1.5, temperature=0.0, num_samples=1)
        )
        for t, logits in enumerate(reference_logits(model, PROMPTS[4], completion)):
            seen = list({*PROMPTS[4], *completion.token_ids[:t]})
            logits[seen] = torch.where(logits[seen] > 0, logits[seen] / 1.5, logits[seen] * 1.5)
            assert completion.token_ids[t] == logits.argmax().item()
        (free,) = await engine.generate(PROMPTS[4], params(temperature=0.0, num_samples=1))
        assert free.token_ids != completion.token_ids

    run(folder, body)


def test_rows_of_one_batch_keep_their_own_decoding(folder: Path) -> None:
    kinds = [
        params(),
        params(temperature=0.0),
        params(top_p=0.7),
        params(top_k=3, temperature=1.5),
        params(repetition_penalty=1.3),
    ]

    async def body(engine: TorchEngine) -> None:
        mixed = await asyncio.gather(*(engine.generate(PROMPTS[3], kind) for kind in kinds))
        assert mixed == [await engine.generate(PROMPTS[3], kind) for kind in kinds]

    run(folder, body)


def test_the_end_token_is_in_the_ids_and_not_in_the_text_while_think_tags_stay(tmp_path: Path) -> None:
    model = build_model(max_len=MAX_LEN, is_tied=False)
    chain = [65, 259, 66, 260, 67, END_ID]  # b <think> c </think> d <|im_end|>
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.model.norm.weight.fill_(1.0)
        for i, (token, following) in enumerate(itertools.pairwise(chain)):
            model.model.embed_tokens.weight[token, i] = 1.0
            model.lm_head.weight[following, i] = 5.0

    async def body(engine: TorchEngine) -> None:
        (completion,) = await engine.generate([65], params(temperature=0.0, num_samples=1))
        assert completion.token_ids == (259, 66, 260, 67, END_ID)
        assert completion.finish_reason == "stop"
        assert completion.text == "<think>c</think>d"

    folder = write_folder(tmp_path, model)
    run(folder, body)


def test_every_end_token_of_the_generation_config_stops(folder: Path, tmp_path: Path, model: Qwen3ForCausalLM) -> None:
    stops_everywhere = write_folder(tmp_path, model)
    path = stops_everywhere / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": list(range(200))}))

    async def body(engine: TorchEngine) -> None:
        (completion,) = await engine.generate(PROMPTS[3], params(num_samples=1))
        assert completion.finish_reason == "stop"
        assert [t for t in completion.token_ids if t < 200 or t == END_ID] == [completion.token_ids[-1]]

    run(stops_everywhere, body)


def test_new_weights_serve_the_next_token_and_each_token_says_whose_it_is(
    folder: Path, model: Qwen3ForCausalLM
) -> None:
    newer = build_model(seed=1, max_len=MAX_LEN)

    async def body(engine: TorchEngine) -> None:
        prompt = PROMPTS[4]
        mixed: list[Completion] = []
        for seed in range(50):  # the sampler may be done before we get to run again, but not every time
            await engine.load_weights(dict(model.state_dict()), version=0)
            long = asyncio.create_task(
                engine.generate(prompt, params(max_new_tokens=200, num_samples=4, temperature=1.5, seed=seed))
            )
            await engine.generate(prompt, params(max_new_tokens=4, num_samples=1))
            await engine.load_weights(dict(newer.state_dict()), version=7)
            mixed = [c for c in await long if len(set(c.policy_versions)) == 2]
            if mixed:
                break
        assert mixed
        for completion in mixed:
            first_new = completion.policy_versions.index(7)
            assert completion.policy_versions == (0,) * first_new + (7,) * (len(completion.token_ids) - first_new)
            for scorer, span in ((model, slice(0, first_new)), (newer, slice(first_new, None))):
                logp_TV = torch.log_softmax(reference_logits(scorer, prompt, completion) / 1.5, -1)
                expected = logp_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
                assert torch.allclose(expected[span], torch.tensor(completion.logps)[span], atol=5e-5)
        (after,) = await engine.generate(prompt, params(num_samples=1))
        assert logp_error(newer, prompt, after, temperature=0.8) < 2e-5

    run(folder, body)


def test_weights_that_do_not_fit_are_refused_and_the_old_ones_go_on(folder: Path, model: Qwen3ForCausalLM) -> None:
    async def body(engine: TorchEngine) -> None:
        before = await engine.generate(PROMPTS[2], params())
        wide = dict(build_model(hidden_size=64).state_dict())
        partial = {name: tensor for name, tensor in build_model(seed=2).state_dict().items() if "layers.1" not in name}
        for weights, complaint in (
            (wide, "shape"),
            (partial, "missing"),
            (wide | {"extra": torch.zeros(1)}, "unknown"),
        ):
            with pytest.raises(ConfigError, match=complaint):
                await engine.load_weights(weights, version=1)
        assert engine.version == 0
        assert await engine.generate(PROMPTS[2], params()) == before

    run(folder, body)


def test_a_cancelled_request_frees_its_rows(folder: Path) -> None:
    async def body(engine: TorchEngine) -> None:
        for seed in range(50):  # the sampler may be done before we get to run again, but not every time
            request = asyncio.create_task(
                engine.generate(PROMPTS[2], params(max_new_tokens=200, num_samples=8, seed=seed))
            )
            await engine.generate(PROMPTS[0], params(max_new_tokens=1))
            if request.cancel():
                break
        with pytest.raises(asyncio.CancelledError):
            await request
        assert len(await engine.generate(PROMPTS[2], params())) == 2

    run(folder, body, TorchEngineConfig(runtime=TorchEngineRuntime(max_batch_size=8)))


def test_bfloat16_stays_near_transformers_bfloat16(folder: Path, model: Qwen3ForCausalLM) -> None:
    """Sums in another order differ by roundings of logits that reach 40: by 0.023 on average in 1,900 tokens, and by 0.24 at most."""
    half = copy.deepcopy(model).to(torch.bfloat16)

    async def body(engine: TorchEngine) -> None:
        completions = await engine.generate(PROMPTS[2], params(num_samples=8))
        error_N = torch.cat([logp_errors(half, PROMPTS[2], c, temperature=0.8) for c in completions])
        assert error_N.mean() < 0.1
        assert error_N.max() < 1.0

    run(folder, body, TorchEngineConfig(dtype="bfloat16"))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model_type": "mistral"}, "model_type"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_parameters = {'rope_type': 'yarn'"),
        # Llama 3.1 to 3.3, whose files have the older name
        ({"rope_parameters": None, "rope_scaling": {"rope_type": "llama3"}}, "rope_scaling = {'rope_type': 'llama3'}"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_other_architectures_are_sent_to_vllm(
    tmp_path: Path, model: Qwen3ForCausalLM, change: dict[str, object], complaint: str
) -> None:
    folder = write_folder(tmp_path, model)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ConfigError, match=rf'{complaint}.*engine\.kind = "vllm"'):
        TorchEngine(folder, TorchEngineConfig(), num_threads=1)


def test_a_window_of_any_length_is_used_to_its_end(tmp_path: Path) -> None:
    """100 positions: a cache of whole vectors has more."""
    model = build_model(max_len=100)
    prompt = tuple(65 + i % 50 for i in range(98))

    async def body(engine: TorchEngine) -> None:
        (completion,) = await engine.generate(prompt, params(num_samples=1, seed=3))
        assert len(completion.token_ids) == 2
        assert logp_error(model, prompt, completion, temperature=0.8) < 2e-5

    run(write_folder(tmp_path, model), body)


def test_prompt_tokens_outside_the_vocabulary_are_refused(folder: Path) -> None:
    async def body(engine: TorchEngine) -> None:
        for bad in (-1, 264):
            with pytest.raises(ValueError, match="vocabulary"):
                await engine.generate([65, bad], params())

    run(folder, body)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_worker_that_dies_fails_everybody_with_its_reason(folder: Path, model: Qwen3ForCausalLM) -> None:
    unreadable = {
        name: tensor.to("meta") for name, tensor in model.state_dict().items()
    }  # right names and shapes, no data

    async def body(engine: TorchEngine) -> None:
        waiting = asyncio.create_task(engine.generate(PROMPTS[2], params(max_new_tokens=200, num_samples=1000)))
        await asyncio.sleep(0)
        with pytest.raises(ResourceError, match="stopped before it answered") as failure:
            await engine.load_weights(unreadable, version=1)
        assert isinstance(failure.value.__cause__, NotImplementedError)
        with pytest.raises(ResourceError):
            await waiting
        with pytest.raises(ResourceError, match="has stopped"):
            await engine.generate(PROMPTS[2], params())

    run(folder, body)


def test_scores_are_those_of_the_temperature_and_every_family(tmp_path: Path) -> None:
    """At temperature 0.5 the log-probs of an answer are those of transformers' logits times two."""
    answer = [70 + i % 100 for i in range(300)]  # more than the logits computed together
    for family in FAMILIES:
        model = build_model(family=family, max_len=512)
        logits_TV = model(torch.tensor([[65, *answer]])).logits[0, :-1].float()
        wanted_T = torch.log_softmax(logits_TV / 0.5, -1).gather(1, torch.tensor(answer)[:, None])[:, 0]
        folder = write_folder(tmp_path / family, model)

        async def body(folder: Path = folder) -> tuple[float, ...]:
            engine = TorchEngine(folder, TorchEngineConfig(), num_threads=1)
            found = await logps_of(engine, [65], answer, temperature=0.5)
            await engine.close()
            return found.logps

        assert asyncio.run(body()) == pytest.approx(wanted_T.tolist(), abs=1e-4)
