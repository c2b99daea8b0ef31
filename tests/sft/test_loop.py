"""SFT end to end on a tiny model: it learns, it says so, and a killed run ends where an unbroken one does."""

import json
import signal
from pathlib import Path

import pytest
import torch
from gloo_ranks import run_ranks
from peft import PeftModel
from safetensors.torch import load_file, save_file
from sft_scorers import CountingScorer, opened, with_curve
from sft_traces import config, inputs, trace
from transformers import AutoModelForCausalLM

from klear_core.artifacts.records import shard_name, write_shard
from klear_core.config.train import CheckpointConfig, LoraConfig, SftOptimConfig, SftRuntime
from klear_core.errors import ConfigError, TrainingError
from klear_core.metrics import NullTelemetry
from klear_core.prompts import CHAT_TEMPLATE, load_tokenizer
from klear_core.sft.loop import train_sft
from klear_core.stopping import Requeued, requeued_by_signal
from klear_core.train.inline_eval import no_scorer


class KilledError(Exception):
    """Stands for SIGKILL: nobody catches it."""


class Recorder(NullTelemetry):
    """Keeps what was logged; dies at a step if told so."""

    def __init__(self, die_at: int | None = None):
        self.rows: dict[int, dict[str, float]] = {}
        self.die_at = die_at

    def log(self, metrics, *, step):
        self.rows[step] = dict(metrics)
        if step == self.die_at:
            raise KilledError

    def column(self, name):
        return [self.rows[s][name] for s in sorted(self.rows) if name in self.rows[s]]


@pytest.fixture(scope="module")
def given(tmp_path_factory) -> tuple[Path, Path]:
    return inputs(tmp_path_factory.mktemp("inputs"))


def run(given, workdir, telemetry=None, scorer=None, **changes):
    model, traces = given
    cfg = config(**changes)
    return train_sft(
        cfg if scorer is None else with_curve(cfg, every_steps=5),
        model=model,
        traces=traces,
        seed=5,
        workdir=workdir,
        telemetry=telemetry or NullTelemetry(),
        run_ranks=run_ranks,
        open_scorer=no_scorer if scorer is None else opened(scorer),
    )


def weights(workdir):
    return load_file(workdir / "model" / "model.safetensors")


def spoil(model):
    """One weight of the model becomes NaN, and with it every loss."""
    path = model / "model" / "model.safetensors"
    broken = load_file(path)
    broken["model.norm.weight"][0] = float("nan")
    save_file(broken, path, metadata={"format": "pt"})


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_loss_falls_and_metrics_say_what_was_done(given, tmp_path):
    seen = Recorder()
    summary = run(given, tmp_path, seen, num_epochs=12)
    losses = seen.column("sft/loss/train")
    assert losses[-1] < 0.6 * losses[0]
    assert seen.column("sft/loss/validation")[-1] == summary.counts["validation_loss"]
    assert list(seen.rows) == list(range(1, int(summary.counts["steps"]) + 1))
    assert all(len(name.split("/")) == 3 for name in seen.rows[4])
    assert seen.column("sft/optim/lr")[:4] == pytest.approx([4e-3 / 3, 8e-3 / 3, 4e-3, 4e-3], rel=1e-2)
    assert summary.counts["tokens"] == sum(seen.column("sft/batch/tokens"))


def test_the_ledger_accounts_for_every_trace(given, tmp_path):
    tokenise, hold_out, weigh = run(given, tmp_path).ledger
    assert tokenise.num_in == 40
    assert tokenise.num_out == hold_out.num_in
    assert hold_out.dropped["validation"] >= 1
    assert (weigh.num_in, weigh.num_out, weigh.dropped) == (hold_out.num_out, hold_out.num_out, {})


def test_rows_that_weights_leave_out_or_no_step_reaches_do_not_count_as_trained(tmp_path):
    """Half of the rows are left out, and of the others two steps of eight take sixteen."""
    model, _ = inputs(tmp_path / "in")
    both = [trace(f"{i}?", source="chain" if i % 2 else "web") for i in range(60)]
    write_shard(tmp_path / "traces" / "traces" / shard_name(0, 1), both)
    given = model, tmp_path / "traces"
    *_, weigh = run(given, tmp_path / "weighed", source_weights={"web": 0.0}, validation_frac=0.0).ledger
    assert (weigh.num_in, weigh.num_out, weigh.dropped) == (60, 30, {"source_weights": 30})
    *_, weigh = run(given, tmp_path / "cut", source_weights={"web": 0.0}, validation_frac=0.0, max_steps=2).ledger
    assert (weigh.num_in, weigh.num_out, weigh.dropped) == (60, 16, {"source_weights": 30, "max_steps": 14})


def test_max_steps_ends_the_run_and_the_schedule(given, tmp_path):
    seen = Recorder()
    assert run(given, tmp_path, seen, max_steps=5).counts["steps"] == 5
    assert seen.rows[5]["sft/optim/lr"] == pytest.approx(0.05 * 4e-3)


@pytest.mark.parametrize(
    "die_at", [1, 4, 5, 9]
)  # before any checkpoint, mid-epoch, at an epoch's end, at the last step
def test_a_killed_run_ends_with_the_weights_of_an_unbroken_one(given, tmp_path, die_at):
    whole, again = Recorder(), Recorder()
    summary = run(given, tmp_path / "whole", whole)
    with pytest.raises(KilledError):
        run(given, tmp_path / "cut", Recorder(die_at))
    resumed = run(given, tmp_path / "cut", again)
    assert summary.counts == resumed.counts
    assert summary.counts["steps"] == 9
    assert min(again.rows) == (die_at - 1) // 3 * 3 + 1  # it went on from the checkpoint before, one every 3 steps
    for step, row in again.rows.items():
        assert row["sft/loss/train"] == whole.rows[step]["sft/loss/train"]
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "cut"))


class Signalled(Recorder):
    """Sends SIGUSR1 to this process when a step is logged."""

    def log(self, metrics, *, step):
        self.rows[step] = dict(metrics)
        if step == self.die_at:
            signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_to_move_saves_its_step_and_ends_with_the_weights_of_an_unbroken_one(
    given, tmp_path, asynchronous
):
    checkpoint = CheckpointConfig(every_steps=100, asynchronous=asynchronous)
    runtime = SftRuntime(device="cpu", checkpoint=checkpoint)
    run(given, tmp_path / "whole", runtime=runtime)
    with requeued_by_signal(), pytest.raises(Requeued):
        run(given, tmp_path / "moved", Signalled(4), runtime=runtime)
    assert [folder.name for folder in (tmp_path / "moved" / "scratch" / "checkpoints").iterdir()] == ["step-00000004"]
    again = Recorder()
    run(given, tmp_path / "moved", again, runtime=runtime)
    assert sorted(again.rows) == [5, 6, 7, 8, 9]
    assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "moved"))


def test_a_run_killed_after_its_last_step_only_exports(given, tmp_path):
    summary = run(given, tmp_path)
    want = weights(tmp_path)
    seen = Recorder()
    assert run(given, tmp_path, seen) == summary
    assert seen.rows == {}
    assert_same_weights(want, weights(tmp_path))


def test_the_last_checkpoint_knows_the_last_validation_so_that_nobody_computes_it_again(given, tmp_path):
    seen = Recorder()
    summary = run(given, tmp_path, seen)
    newest = max((tmp_path / "scratch" / "checkpoints").iterdir())
    kept = json.loads((newest / "seal.json").read_text())["counters"]["validation_loss"]
    assert kept == summary.counts["validation_loss"] == seen.column("sft/loss/validation")[-1]


def test_micro_batches_do_not_change_the_losses(given, tmp_path):
    whole, cut = Recorder(), Recorder()
    model, traces = given
    for seen, tokens in ((whole, 1 << 16), (cut, 64)):
        cfg = config(max_steps=4)
        cfg = cfg.model_copy(update={"runtime": cfg.runtime.model_copy(update={"tokens_per_microbatch": tokens})})
        train_sft(cfg, model=model, traces=traces, seed=5, workdir=tmp_path / str(tokens), telemetry=seen)
    assert whole.column("sft/loss/train") == pytest.approx(cut.column("sft/loss/train"), rel=1e-4)


def test_the_result_loads_with_its_tokenizer(given, tmp_path):
    run(given, tmp_path, max_steps=1, dtype="float32")
    assert load_tokenizer(tmp_path / "model").chat_template == CHAT_TEMPLATE


def test_a_bad_template_stops_before_the_first_step(tmp_path):
    model, traces = inputs(tmp_path / "in")
    template = model / "model" / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\\n", "assistant\\n<think>\\nOkay,"))
    with pytest.raises(ConfigError, match="goes on with 'Okay,'"):
        run((model, traces), tmp_path / "out")


def test_weights_that_are_not_finite_stop_the_stage_and_leave_the_batches(tmp_path):
    model, traces = inputs(tmp_path / "in")
    spoil(model)
    with pytest.raises(TrainingError, match="6 updates"):
        run((model, traces), tmp_path / "out")
    assert len(list((tmp_path / "out" / "skipped").iterdir())) == 6


def test_a_stage_whose_updates_are_all_skipped_has_no_losses_and_says_why(tmp_path):
    model, traces = inputs(tmp_path / "in")
    spoil(model)
    seen = Recorder()
    runtime = SftRuntime(device="cpu", max_nonfinite_steps=100)
    summary = run((model, traces), tmp_path / "out", seen, runtime=runtime)
    assert summary.counts == {"steps": 9, "tokens": 0, "skipped": 9}
    assert "9 updates were skipped" in summary.notes[0]
    per_update = {"sft/loss/train", "sft/grad/norm", "sft/batch/tokens", "sft/batch/fill", "sft/batch/busy"}
    assert not any(per_update & row.keys() for row in seen.rows.values())


@pytest.mark.slow
@pytest.mark.parametrize("context_parallel", [1, 2])
def test_two_ranks_train_as_one_process(given, tmp_path, context_parallel):
    one, two, scorer = Recorder(), Recorder(), CountingScorer()
    run(given, tmp_path / "one", one, max_steps=5)
    run(given, tmp_path / "two", two, scorer, max_steps=5, num_workers=2, context_parallel=context_parallel)
    assert two.column("sft/loss/train") == pytest.approx(one.column("sft/loss/train"), abs=1e-5)
    assert two.column("sft/loss/validation") == pytest.approx(one.column("sft/loss/validation"), abs=1e-5)
    assert two.column("sft/grad/norm") == pytest.approx(one.column("sft/grad/norm"), rel=1e-4)
    # both take part in the export of whole models, which are scored beside the training
    base, last = scorer.seen
    assert_same_weights(base, load_file(given[0] / "model" / "model.safetensors"))
    assert_same_weights(last, weights(tmp_path / "two"))


LORA = {"lora": LoraConfig(rank=4, dropout=0.1), "optim": SftOptimConfig(lr=3e-2, min_lr_ratio=0.05, warmup_steps=3)}


def test_adapters_learn_and_a_killed_run_with_dropout_ends_as_an_unbroken_one(given, tmp_path):
    """The killed one dies in a process whose random numbers were drawn from already."""
    seen = Recorder()
    summary = run(given, tmp_path / "a", seen, num_epochs=6, **LORA)
    losses = seen.column("sft/loss/train")
    assert losses[-1] < 0.92 * losses[0]
    with pytest.raises(KilledError):
        run(given, tmp_path / "b", Recorder(die_at=7), num_epochs=6, **LORA)
    torch.rand(5)
    assert run(given, tmp_path / "b", num_epochs=6, **LORA).counts == summary.counts
    assert_same_weights(weights(tmp_path / "a"), weights(tmp_path / "b"))
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "a" / "adapter" / name).read_bytes() == (tmp_path / "b" / "adapter" / name).read_bytes()


def test_the_adapter_on_the_base_is_the_merged_model(given, tmp_path):
    run(given, tmp_path, **LORA)
    base = AutoModelForCausalLM.from_pretrained(given[0] / "model")
    merged = PeftModel.from_pretrained(base, tmp_path / "adapter").merge_and_unload().state_dict()
    for name, weight in weights(tmp_path).items():
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-6)


def test_full_training_writes_no_adapter(given, tmp_path):
    run(given, tmp_path, max_steps=1)
    assert not (tmp_path / "adapter").exists()
