"""The torch engine on a GPU; tests/generate/test_torch_engine.py checks the same claims on CPU."""

import asyncio
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "generate"))
from qwen3_folder import build_model, write_folder

from klear_core.config.engine import TorchEngineConfig, TorchEngineRuntime
from klear_core.generate.engine import SamplingParams
from klear_core.generate.torch_engine import TorchEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
PROMPTS = [tuple(65 + (7 * i + j) % 50 for j in range(length)) for i, length in enumerate((1, 16, 40, 100))]


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 2.0)])
def test_logps_are_those_of_transformers_before_and_after_an_update(tmp_path: Path, dtype: str, tolerance: float) -> None:
    models = [build_model(seed=seed).cuda() for seed in (0, 1)]
    folder = write_folder(tmp_path, models[0])
    cfg = TorchEngineConfig.model_validate({"dtype": dtype, "runtime": TorchEngineRuntime(device="cuda")})
    params = SamplingParams(num_samples=8, temperature=0.8, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=60, seed=1)

    async def main() -> None:
        engine = TorchEngine(folder, cfg, num_threads=1)
        for version, model in enumerate(models):
            await engine.load_weights(dict(model.state_dict()), version=version)
            groups = await asyncio.gather(*(engine.generate(prompt, params) for prompt in PROMPTS))
            for prompt, group in zip(PROMPTS, groups, strict=True):
                for completion in group:
                    ids = torch.tensor(completion.token_ids, device="cuda")
                    with torch.no_grad():
                        logits = model(torch.tensor([prompt + completion.token_ids], device="cuda")).logits[0, len(prompt) - 1 : -1]
                    expected = torch.log_softmax(logits.float() / 0.8, -1).gather(1, ids[:, None])[:, 0].cpu()
                    assert (expected - torch.tensor(completion.logps)).abs().max() < tolerance
                    assert set(completion.policy_versions) == {version}
        await engine.close()

    asyncio.run(main())
