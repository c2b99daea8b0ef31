"""Models of several families train as transformers computes them: packed rows as the rows alone, and exports that load."""

import json

import pytest
import torch
from family_models import FAMILIES, write_family
from tiny_models import packed, random_rows
from transformers import AutoModelForCausalLM

from klear_core.config.train import LoraConfig
from klear_core.errors import ConfigError
from klear_core.train.distributed import full_weights
from klear_core.train.logps import token_logps
from klear_core.train.model import Adapters, export_model, load_model


@pytest.fixture(params=FAMILIES, scope="module")
def folder(request, tmp_path_factory):
    return write_family(request.param, tmp_path_factory.mktemp("model"))


def _logps(policy, rows):
    """Log-probs of each row's loss tokens, with all rows in one packed sequence."""
    (micro,) = packed(rows, 1 << 20).micro_batches
    found = policy(micro, lambda hidden, weight: token_logps(hidden, weight, micro.target_N)).logp_N
    parts = dict(zip(micro.rows, found.split(micro.counts), strict=True))
    return [parts[i] for i in range(len(rows))]


def _logps_of_transformers(model, row):
    ids = torch.tensor([row.token_ids])
    table = model(ids).logits[0, :-1].log_softmax(-1)
    chosen = table.gather(1, ids[0, 1:, None])[:, 0]
    return chosen[torch.tensor(row.loss_mask)[1:]]


def test_packed_rows_have_the_log_probs_and_gradients_that_transformers_gives_each_row_alone(folder):
    rows = random_rows([5, 23, 40, 12])
    policy = load_model(folder, device="cpu")
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").train()
    found, wanted = _logps(policy, rows), [_logps_of_transformers(plain, row) for row in rows]
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
    torch.cat(found).mean().backward()
    torch.cat(wanted).mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters()}
    for name, p in policy.hf.named_parameters():
        torch.testing.assert_close(p.grad, gradients[name], atol=2e-5, rtol=1e-3, msg=name)


def test_an_export_loads_in_transformers_with_the_same_logits(folder, tmp_path):
    policy = load_model(folder, device="cpu")
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(1.01)
    export_model(full_weights(policy), folder, tmp_path / "model")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager")
    (row,) = random_rows([30])
    torch.testing.assert_close(_logps(policy, [row])[0], _logps_of_transformers(exported, row), atol=2e-5, rtol=0)


def test_capped_logits_are_refused(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ConfigError, match=r"final_logit_softcapping=30\.0"):
        load_model(tmp_path, device="cpu")


def test_adapters_of_every_family_merge_to_the_trained_model(folder, tmp_path):
    policy = load_model(folder, device="cpu", adapters=Adapters(cfg=LoraConfig(rank=4), seed=1))
    names = list(full_weights(load_model(folder, device="cpu")))
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if ".lora_B." in name:
                weight.normal_(0, 0.05, generator=torch.Generator().manual_seed(len(name)))
    assert list(full_weights(policy)) == names
    export_model(full_weights(policy), folder, tmp_path / "model")
    rows = random_rows([9, 20])
    merged, base = load_model(tmp_path / "model", device="cpu"), load_model(folder, device="cpu")
    for got, want, before in zip(*(_logps(m, rows) for m in (policy, merged, base)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        assert (got - before).abs().max() > 1e-3
