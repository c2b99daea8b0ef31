"""One optimizer step: the same from any cut of the batch, and never applied if it is not finite."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import ONE, nll_heads, packed, random_rows, tiny_folder

from klear_core.config.train import OptimConfig, TrainRuntime
from klear_core.errors import TrainingError
from klear_core.train.model import load_model
from klear_core.train.step import Updater, check_profiled, profiled, save_bad_batch

CFG = OptimConfig(lr=1e-2, min_lr_ratio=0.1, warmup_steps=2, max_grad_norm=0.5)


def mean_nll(batch, factor=1.0):
    return nll_heads(batch, factor / batch.num_loss_tokens)


def updater(folder):
    policy = load_model(folder, device="cpu")
    return policy, Updater(policy, CFG, ONE, num_steps=10)


def test_loss_norm_and_weights_do_not_depend_on_micro_batches(tmp_path):
    folder, rows = tiny_folder(tmp_path), random_rows([9, 30, 14, 22])
    results, weights = [], []
    for tokens in (1 << 20, 31):
        policy, up = updater(folder)
        batch = packed(rows, tokens)
        results.append(up.update(batch, mean_nll(batch), step=0))
        weights.append([p.detach() for p in policy.parameters()])
    assert len(results[0].outputs) < len(results[1].outputs)
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-6)
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-5)
    torch.testing.assert_close(weights[0], weights[1], atol=1e-6, rtol=0)


def test_a_step_reports_the_scheduled_rate_and_lowers_the_loss(tmp_path):
    _, up = updater(tiny_folder(tmp_path))
    batch = packed(random_rows([9, 30]))
    results = [up.update(batch, mean_nll(batch), step=s) for s in range(3)]
    assert [r.lr for r in results] == pytest.approx([0.005, 0.01, 0.01])
    assert results[2].loss < results[0].loss


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_leaves_weights_and_moments_untouched(tmp_path, factor):
    policy, up = updater(tiny_folder(tmp_path))
    batch = packed(random_rows([9, 30]))
    up.update(batch, mean_nll(batch), step=0)
    before = [p.detach().clone() for p in policy.parameters()]
    moments = [s["exp_avg"].clone() for s in up.optimizer.state.values()]
    assert not up.update(batch, mean_nll(batch, factor), step=1).is_applied
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(moments, up.optimizer.state.values(), strict=True))
    assert up.update(batch, mean_nll(batch), step=2).is_applied


def test_a_skipped_batch_is_kept_and_one_too_many_stops(tmp_path):
    rows = random_rows([4])
    save_bad_batch(tmp_path / "skipped", rows, step=7, num_skipped=1, max_skipped=1)
    kept = json.loads((tmp_path / "skipped" / "step-00000007-1.json").read_text())
    assert (kept[0]["token_ids"], kept[0]["loss_mask"]) == (list(rows[0].token_ids), [False, False, False, True])
    with pytest.raises(TrainingError, match=r"2 updates .* 1 are allowed"):
        save_bad_batch(tmp_path / "skipped", rows, step=9, num_skipped=2, max_skipped=1)


def test_a_batch_that_cannot_be_kept_hides_no_error(tmp_path, caplog):
    (tmp_path / "skipped").write_text("a file in the way, as a full disk is")
    save_bad_batch(tmp_path / "skipped", random_rows([4]), step=7, num_skipped=1, max_skipped=1)
    assert "these rows are not kept" in caplog.text
    with pytest.raises(TrainingError, match=r"2 updates .* 1 are allowed"):
        save_bad_batch(tmp_path / "skipped", random_rows([4]), step=9, num_skipped=2, max_skipped=1)
    with profiled((0, 9), 3, tmp_path / "skipped", rank=0):
        torch.ones(4) @ torch.ones(4)


def test_steps_to_record_that_end_before_they_begin_are_refused() -> None:
    assert TrainRuntime(profile_steps=(3, 3)).profile_steps == (3, 3)
    with pytest.raises(ValueError, match=r"profile_steps = \[3, 2\]: the first step comes after the last"):
        TrainRuntime(profile_steps=(3, 2))


def test_steps_to_record_that_the_training_does_not_reach_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    check_profiled((300, 400), 300)
    check_profiled(None, 300)
    assert not caplog.records
    check_profiled((301, 400), 300)
    assert "profile_steps = [301, 400]: this training has 300 steps, so none is recorded" in caplog.text


@pytest.mark.parametrize(("step", "is_recorded"), [(1, False), (2, True), (3, True), (4, False)])
def test_steps_within_the_setting_are_recorded(tmp_path: Path, step: int, is_recorded: bool) -> None:
    with profiled((2, 3), step, tmp_path / "profile", rank=1):
        torch.ones(4) @ torch.ones(4)
    files = list((tmp_path / "profile").glob("*.json"))
    assert [file.name for file in files] == ([f"step-{step:08d}-rank-1.json"] if is_recorded else [])
    if files:
        assert any("dot" in str(event.get("name")) for event in json.loads(files[0].read_text())["traceEvents"])
