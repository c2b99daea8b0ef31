from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_models import write_model
from hub_server import REVISION, hub
from klear_command import ROOT
from manifests import manifest

from klear_core.artifacts.store import LocalStore
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.prompts import decode_response
from klear_core.scores import visible
from klear_core.train.base_model import prepare_base
from klear_core.train.gguf_files import write_gguf

TINY = TinyModelConfig(
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    intermediate_size=24,
    max_position_embeddings=64,
)
ASK = """
import sys
from flows.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
heavy = ("prefect", "mlflow", "ray", "vllm", "sklearn", "transformers.models.auto")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""
"""The command `klear`, which shows on its last line of errors what it has imported of these."""
NOT_ASKED = "the question takes 69 tokens with the marks of its turn, and the model's window holds 64"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with one model, of 64 positions and random weights, and an artifact that is no model."""
    root = tmp_path_factory.mktemp("runs")
    store = LocalStore(root / "artifacts")
    with store.create("rl", "5eedab1e") as slot:
        prepare_base(TINY, seed=0, workdir=slot.workdir, telemetry=NullTelemetry())
        slot.publish(manifest("rl", "5eedab1e"))
    with store.create("curate", "c0ffee00") as slot:
        slot.publish(manifest("curate", "c0ffee00"))
    return root


def answer_of_transformers(folder: Path, question: str, *, max_tokens: int) -> str:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    made = model.generate(**prompt, max_new_tokens=max_tokens, do_sample=False)
    return decode_response(tokenizer, made[0, prompt["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("which", ["rl", "5eed", "artifacts/rl/5eedab1e", "artifacts/rl/5eedab1e/model"])
def test_the_answer_is_that_of_transformers_with_the_same_folder(klear, runs, monkeypatch, which):
    monkeypatch.chdir(runs)
    said = klear("chat", which, "3,+4=?", "--root", runs, "--max-tokens", 12)
    assert said.status == 0, said.err
    expected = visible(answer_of_transformers(runs / "artifacts/rl/5eedab1e/model", "3,+4=?", max_tokens=12))
    assert said.out == expected + "\n"
    assert "cut off after 12 tokens" in said.err


def test_without_a_question_every_line_is_one_and_what_cannot_be_asked_stops_no_other(klear, runs, monkeypatch):
    def chat(lines: str):
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        return klear("chat", "rl", "--root", runs, "--max-tokens", 5)

    both = chat(f"first\n\n{'x' * 50}\nsecond\n")
    assert NOT_ASKED in both.err
    assert (both.status, "1 of the questions could not be asked" in both.err) == (2, True)
    first, second = chat("first\n"), chat("second\n")
    assert both.out == first.out + second.out
    assert first.out != second.out
    assert (first.status, chat("").status) == (0, 0)


def test_a_line_that_is_not_utf_8_stops_no_other(klear, runs, monkeypatch):
    def chat(lines: bytes):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return klear("chat", "rl", "--root", runs, "--max-tokens", 5)

    said = chat(b"a \xff byte\nsecond\n")
    assert "error: the question is not text in UTF-8" in said.err
    assert (said.status, said.out) == (2, chat(b"second\n").out)


def test_a_question_that_fills_the_window_is_an_error_that_says_so(klear, runs):
    said = klear("chat", "rl", "x" * 50, "--root", runs)
    assert (said.status, said.out) == (2, "")
    assert NOT_ASKED in said.err


def test_by_default_an_answer_may_fill_the_window(klear, runs):
    said = klear("chat", "rl", "x" * 40, "--root", runs)
    assert "cut off after 5 tokens" in said.err


def test_a_seed_makes_sampled_answers_reproducible(klear, runs):
    def answers(seed: int) -> str:
        return klear(
            "chat", "rl", "1", "--root", runs, "--max-tokens", 8, "--temperature", 1, "--samples", 2, "--seed", seed
        ).out

    assert answers(1) == answers(1) != answers(2)
    assert "── 1 of 2" in answers(1)
    assert "── 2 of 2" in answers(1)


def test_several_greedy_answers_are_refused(klear, runs):
    said = klear("chat", "rl", "1", "--root", runs, "--samples", 2)
    assert (said.status, "greedy answers are all the same" in said.err) == (2, True)


def test_an_empty_question_is_refused(klear, runs):
    """As a variable of the shell that is not set gives it."""
    for question in ("", " "):
        assert "the question is empty" in klear("chat", "rl", question, "--root", runs).err


def test_what_is_no_model_or_not_there_is_named(klear, runs):
    none = klear("chat", "sft", "1", "--root", runs)
    assert none.status != 0
    assert "no artifact 'sft'" in none.err
    curated = klear("chat", "curate", "1", "--root", runs)
    assert curated.status != 0
    assert "models are made by the stages base, sft, rl" in curated.err


@pytest.mark.slow
def test_a_model_of_the_hub_is_downloaded_once_and_asked_without_anything_heavy(klear, runs, tmp_path):
    folder = runs / "artifacts/rl/5eedab1e/model"
    files = {file.name: file.read_bytes() for file in folder.iterdir()}
    here = klear("chat", "rl", "1", "--root", runs, "--max-tokens", 8)

    def ask(endpoint: str) -> subprocess.CompletedProcess[str]:
        """In a process of its own: huggingface_hub reads its settings when it is imported."""
        command = [sys.executable, "-c", ASK, "chat", f"owner/tiny@{REVISION}", "1", "--max-tokens", "8"]
        own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(
            command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )

    with hub("owner/tiny", files, repo_type="model") as (endpoint, fetched):
        asked = ask(endpoint)
    assert asked.returncode == 0, asked.stderr
    assert asked.stdout == here.out
    assert asked.stderr.splitlines()[-1] == "[]"
    assert "model.safetensors" in fetched
    again = ask(endpoint)  # nobody listens there now
    assert (again.returncode, again.stdout) == (0, here.out)


def test_a_model_that_is_neither_here_nor_on_the_hub_is_named_as_both(klear, runs, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    said = klear("chat", "owner/none", "1", "--root", runs)
    assert said.status == 2
    assert "no artifact 'owner/none'" in said.err
    assert "as a model of the Hub: " in said.err


def test_a_model_of_another_family_is_asked_with_vllm(klear, runs, tmp_path):
    folder = shutil.copytree(runs / "artifacts/rl/5eedab1e/model", tmp_path / "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    said = klear("chat", folder, "1")
    assert said.status != 0
    assert "vllm" in said.err  # not installed here, or it finds that these are no weights of a Gemma


@pytest.mark.slow
def test_a_gguf_file_is_asked_and_converted_once(tmp_path):
    """In processes of their own: the first starts Prefect for the stage that converts it."""
    folder = write_model("qwen3", tmp_path / "model")
    write_gguf(folder, tmp_path / "tiny.gguf", "f16", name="tiny", licence="")
    command = [sys.executable, "-c", "from flows.cli import main; main()", "chat", "tiny.gguf", "3,+4=?"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    answers = []
    for _ in range(2):
        said = subprocess.run(
            [*command, "--max-tokens", "12"], check=True, capture_output=True, text=True, cwd=tmp_path, env=env
        )
        answers.append(said.stdout)
    assert answers == [visible(answer_of_transformers(folder, "3,+4=?", max_tokens=12)) + "\n"] * 2
    assert len(list((tmp_path / "runs" / "artifacts" / "given_model").iterdir())) == 1
    assert "reused" in said.stderr
