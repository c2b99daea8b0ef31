"""The tiny model's weights by their scales, and pointers to folders that are checked before anything is spent."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_folder
from transformers import AutoModelForCausalLM

from klear_core.config.train import GivenFolder, HfModelConfig, TinyModelConfig
from klear_core.errors import ArtifactError, ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.prompts import check_template, load_tokenizer
from klear_core.train.base_model import model_folder, prepare_base, take_model, wanted_window


def point(path: Path, workdir: Path, window: int | None = None):
    workdir.mkdir(exist_ok=True)
    cfg = HfModelConfig(path=str(path), max_position_embeddings=window)
    return prepare_base(cfg, seed=0, workdir=workdir, telemetry=NullTelemetry())


def test_weights_have_the_scales_that_small_models_need(tmp_path):
    prepare_base(TinyModelConfig(), seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    weights = AutoModelForCausalLM.from_pretrained(model_folder(tmp_path)).state_dict()
    assert weights["model.embed_tokens.weight"].std().item() == pytest.approx(0.1, rel=0.03)
    assert weights["model.layers.0.mlp.up_proj.weight"].std().item() == pytest.approx(64**-0.5, rel=0.03)
    assert weights["model.layers.2.mlp.down_proj.weight"].std().item() == pytest.approx(192**-0.5 / 6**0.5, rel=0.03)
    assert weights["model.layers.1.self_attn.o_proj.weight"].std().item() == pytest.approx(64**-0.5 / 6**0.5, rel=0.03)
    assert torch.equal(weights["model.norm.weight"], torch.ones(64))
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"] or torch.equal(
        weights["lm_head.weight"], weights["model.embed_tokens.weight"]
    )


def test_the_same_seed_gives_the_same_bits_and_another_seed_others(tmp_path):
    a, b, c = (tiny_folder(tmp_path / str(i), seed=s) / "model.safetensors" for i, s in enumerate((1, 1, 2)))
    assert a.read_bytes() == b.read_bytes()
    assert a.read_bytes() != c.read_bytes()


def test_the_global_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    want = torch.rand(1)
    torch.manual_seed(5)
    tiny_folder(tmp_path)
    assert torch.equal(torch.rand(1), want)


def test_tiny_tokenizer_passes_the_template_check(tmp_path):
    check_template(load_tokenizer(tiny_folder(tmp_path)))


def test_a_hugging_face_folder_is_pointed_to_not_copied(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    summary = point(folder, tmp_path / "base", window=2048)
    assert model_folder(tmp_path / "base") == folder
    assert wanted_window(tmp_path / "base") == 2048
    assert summary.counts["weight_bytes"] == (folder / "model.safetensors").stat().st_size


def test_what_a_folder_lacks_is_named(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    for missing in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        broken = tmp_path / missing
        shutil.copytree(folder, broken)
        (broken / missing).unlink()
        (broken / "vocab.json").write_text("{}")  # engines read tokenizer.json alone
        with pytest.raises(ConfigError, match=str(broken)):
            point(broken, tmp_path / "base")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("", "the tokenizer has no chat template"),
        ("{{ 'Hello<|im_end|>' }}", "template: an assistant's turn ends in"),
        (
            "{% for m in messages %}{% if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}",
            "template: the question '1\\+1 = \\?' is not in the prompt",
        ),
    ],
)
def test_a_model_whose_chat_template_is_missing_or_does_not_fit_is_refused_by_its_folder(tmp_path, template, message):
    folder = tiny_folder(tmp_path / "hf")
    (folder / "chat_template.jinja").write_text(template)
    cfg = GivenFolder(path=str(folder)).as_model()
    (tmp_path / "given").mkdir()
    with pytest.raises(ConfigError, match=f"{folder}: .*{message}"):
        take_model(cfg, licence="", workdir=tmp_path / "given", telemetry=NullTelemetry())


def test_a_tokenizer_with_more_tokens_than_the_model_embeds_is_refused(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(260)
    model.save_pretrained(folder)
    with pytest.raises(ConfigError, match=r"261 tokens.*only 260"):
        point(folder, tmp_path / "base")


def test_a_pointer_to_weights_that_were_replaced_is_an_artifact_error(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    point(folder, tmp_path / "base")
    (folder / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(ArtifactError, match="not those that it was made for"):
        model_folder(tmp_path / "base")


def test_a_file_that_is_no_part_of_the_model_may_come_beside_it(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    point(folder, tmp_path / "base")
    (folder / "consolidated.safetensors").write_bytes(b"the same weights in another format, as Mistral has them")
    assert model_folder(tmp_path / "base") == folder


def test_a_model_whose_files_do_not_list_the_end_of_a_turn_has_a_note(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    assert point(folder, tmp_path / "base").notes == ()
    for file, key, value in (("tokenizer", "eos_token", "<|endoftext|>"), ("generation", "eos_token_id", 256)):
        path = folder / f"{file}_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    (note,) = point(folder, tmp_path / "base").notes
    assert "its template ends a turn with '<|im_end|>', which neither" in note


def test_a_second_run_replaces_what_a_killed_one_left(tmp_path):
    first = (tiny_folder(tmp_path) / "model.safetensors").read_bytes()
    assert (tiny_folder(tmp_path) / "model.safetensors").read_bytes() == first


def test_a_pointer_to_a_folder_that_is_gone_is_an_artifact_error(tmp_path):
    folder = tiny_folder(tmp_path / "hf")
    point(folder, tmp_path / "base")
    shutil.rmtree(folder)
    with pytest.raises(ArtifactError, match="points to"):
        model_folder(tmp_path / "base")
    with pytest.raises(ArtifactError, match="neither"):
        model_folder(tmp_path)
