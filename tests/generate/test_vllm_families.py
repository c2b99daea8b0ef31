"""Models of several families, trained with LoRA and exported merged: vLLM computes what transformers computes of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_marks import VLLM_MARKS

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))
from family_models import write_family
from tiny_models import ONE, nll_heads, packed, random_rows

from klear_core.config.train import LoraConfig, OptimConfig
from klear_core.train.distributed import full_weights
from klear_core.train.model import Adapters, export_model, load_model
from klear_core.train.step import Updater

pytestmark = list(VLLM_MARKS)
PROMPT = [65 + (i * i) % 97 for i in range(24)]
TOLERANCE = 5e-5
"""Nats, float32, as in test_vllm_engine.py."""
FAMILIES = ["qwen2", "qwen3", "llama", "mistral", "gemma", "gemma3"]


def export_merged(base: Path, target: Path) -> None:
    """Three updates of adapters, large enough that the base model would give other log-probs."""
    policy = load_model(base, device="cpu", adapters=Adapters(cfg=LoraConfig(rank=4), seed=1))
    updater = Updater(policy, OptimConfig(lr=3e-2), ONE, num_steps=3)
    batch = packed(random_rows([30, 20]))
    for step in range(3):
        updater.update(batch, nll_heads(batch, 1 / 44), step=step)
    export_model(full_weights(policy), base, target)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    for name in FAMILIES:
        export_merged(write_family(name, folder / f"{name}-base", hidden_size=128, head_dim=32), folder / name)
    return folder


@pytest.fixture(scope="module")
def sampled(exports: Path) -> dict[str, dict[str, list[float]]]:
    """Tokens and log-probs of vLLM's greedy answer, by folder."""
    script = Path(__file__).with_name("vllm_folders.py")
    done = subprocess.run(
        [sys.executable, script, *(str(exports / name) for name in FAMILIES)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, list[float]]] = json.loads(done.stdout.splitlines()[-1])
    return found


@torch.no_grad()
def logps_of(folder: Path, token_ids: list[float]) -> torch.Tensor:
    """logp_TV at the new tokens, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    return model(torch.tensor([[*PROMPT, *token_ids]])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_vllm_and_transformers_agree_on_a_merged_export(
    name: str, exports: Path, sampled: dict[str, dict[str, list[float]]]
) -> None:
    answer = sampled[str(exports / name)]
    chosen = torch.tensor(answer["token_ids"])[:, None]
    logp_TV = logps_of(exports / name, answer["token_ids"])
    logp_T = logp_TV.gather(1, chosen)[:, 0]
    assert len(answer["token_ids"]) == 12
    assert (logp_T - torch.tensor(answer["logps"])).abs().max() < TOLERANCE
    assert (logp_TV.amax(-1) - logp_T).max() < TOLERANCE  # greedy
    before_T = logps_of(exports / f"{name}-base", answer["token_ids"]).gather(1, chosen)[:, 0]
    assert (before_T - logp_T).abs().max() > 100 * TOLERANCE
