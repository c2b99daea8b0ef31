"""A model leaves as a GGUF file and comes back as it was; what a GGUF file cannot say is refused by name, at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_models import TEXT, rewritten, write_model
from safetensors.torch import load_file
from tiny_models import tiny_folder
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from klear_core.artifacts.model_files import check_model
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.train import GgufModelConfig, GivenConfig, GivenFolder, GivenGguf, HfModelConfig
from klear_core.errors import ConfigError
from klear_core.generate.model_size import model_size
from klear_core.gguf_checks import check_gguf
from klear_core.gguf_header import read_gguf_header
from klear_core.hf_config import FolderTokenizer, read_hf_config
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import fingerprints_of, set_moved_aside, stages_of
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.train.base_model import model_folder, prepare_base, take_model
from klear_core.train.gguf_files import write_gguf

RULES = {"llama": "llama-bpe", "qwen2": "qwen2", "qwen3": "smollm"}
"""A rule of splitting for each family; which family has which does not matter here."""
ODD_TEXT = "Café  12345  naïve\n\n  x=7!? <think>\nthe answer</think> 'tis"  # é as two characters


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("families")
    return {family: write_model(family, root / family, rule) for family, rule in RULES.items()}


@pytest.fixture(scope="module")
def file(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(folders["llama"], path, "f16", name="tiny", licence="mit")
    return path


def take(file: Path, workdir: Path, **settings: int) -> Path:
    workdir.mkdir(parents=True, exist_ok=True)
    cfg = GgufModelConfig(path=str(file), **settings)
    take_model(cfg, licence="", workdir=workdir, telemetry=NullTelemetry())
    return model_folder(workdir)


def greedy(folder: Path) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = torch.tensor([[70, 80, 90, 100]])
    return model.generate(prompt, max_new_tokens=24, do_sample=False)[0].tolist()


# ---- there and back


@pytest.mark.parametrize("family", RULES)
def test_a_model_comes_back_from_float16_bit_by_bit_with_tokens_template_and_ends(family, folders, tmp_path):
    before = folders[family]
    write_gguf(before, tmp_path / "x.gguf", "f16", name="x", licence="")
    after = take(tmp_path / "x.gguf", tmp_path / "taken")
    old, new = load_file(before / "model.safetensors"), load_file(after / "model.safetensors")
    assert old.keys() == new.keys()
    assert [name for name in old if not torch.equal(old[name], new[name])] == []
    assert greedy(before) == greedy(after)
    tokenizers = [AutoTokenizer.from_pretrained(folder) for folder in (before, after)]
    for text in (*TEXT, ODD_TEXT):
        first, second = (tokenizer(text)["input_ids"] for tokenizer in tokenizers)
        assert first == second, text
    assert tokenizers[0].chat_template == tokenizers[1].chat_template
    assert FolderTokenizer(before).stop_ids == FolderTokenizer(after).stop_ids
    sizes = [read_hf_config(place).model_dump(exclude={"rope_parameters", "rope_theta"}) for place in (before, after)]
    described = {key: value for key, value in sizes[1].items() if key not in ("attention_bias", "mlp_bias")}
    assert {key: sizes[0][key] for key in described} | {"rms_norm_eps": 0} == described | {"rms_norm_eps": 0}


def test_the_header_tells_size_and_family_before_anything_is_converted(file, folders):
    assert model_size(GgufModelConfig(path=str(file))) == model_size(HfModelConfig(path=str(folders["llama"])))
    num_params = sum(w.numel() for w in load_file(folders["llama"] / "model.safetensors").values())
    assert read_gguf_header(file).num_params == num_params


def test_eight_bits_are_within_half_a_step_of_their_block(folders, tmp_path):
    write_gguf(folders["qwen3"], tmp_path / "x.gguf", "q8_0", name="x", licence="")
    write_gguf(folders["qwen3"], tmp_path / "y.gguf", "f16", name="x", licence="")
    assert (tmp_path / "x.gguf").stat().st_size < 0.7 * (tmp_path / "y.gguf").stat().st_size
    after = load_file(take(tmp_path / "x.gguf", tmp_path / "taken") / "model.safetensors")
    for name, before in load_file(folders["qwen3"] / "model.safetensors").items():
        blocks = before.reshape(-1, 32) if before.ndim > 1 else before.reshape(1, -1)
        # 127 steps to each side; the step itself is a float16, which is off by at most a thousandth
        allowed = blocks.abs().amax(1, keepdim=True) * (0.5 / 127 + 1e-3)
        assert ((after[name].reshape(blocks.shape) - blocks).abs() <= allowed).all(), name


def test_the_manifest_says_which_file_a_model_is_from_and_what_was_done(file, tmp_path):
    (tmp_path / "a").mkdir()
    cfg = GivenGguf(path=str(file)).as_model()
    summary = take_model(cfg, licence="", workdir=tmp_path / "a", telemetry=NullTelemetry())
    assert "dequantised from tiny.gguf (F16)" in summary.notes[0]
    assert summary.given is not None
    assert (summary.given.origin, summary.given.licence) == (str(file), "mit")
    assert [(f.path, f.size) for f in summary.given.files] == [("tiny.gguf", file.stat().st_size)]


def test_another_window_is_that_of_the_folder(file, tmp_path):
    assert read_hf_config(take(file, tmp_path, max_position_embeddings=4096)).max_position_embeddings == 4096


def test_a_killed_conversion_starts_again_and_a_whole_one_stays(file, tmp_path):
    (tmp_path / "model.tmp").mkdir()
    (tmp_path / "model.tmp" / "model.safetensors").write_text("half")
    folder = take(file, tmp_path)
    assert not (tmp_path / "model.tmp").exists()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    take(file, tmp_path)
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


# ---- settings and fingerprints


@pytest.mark.parametrize(
    "settings", [{"path": "x.gguf"}, {"kind": "hf", "path": "X.GGUF"}, {"kind": "gguf", "path": "x"}]
)
def test_a_path_that_ends_so_is_a_gguf_file(settings):
    assert isinstance(PipelineConfig.model_validate({"model": settings}).model, GgufModelConfig)


def test_a_given_model_is_one_by_its_ending_unless_it_is_a_folder(tmp_path, monkeypatch):
    for value in ("x.gguf", {"path": "x.gguf"}, {"kind": "folder", "path": "x.gguf"}):
        assert isinstance(GivenConfig.model_validate({"sft": value}).sft, GivenGguf)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").mkdir()
    assert isinstance(GivenConfig.model_validate({"sft": "x.gguf"}).sft, GivenFolder)


@pytest.mark.parametrize("of", ["model", "given.sft"])
def test_an_artifact_is_named_by_the_content_of_the_file_and_not_by_its_place(of, file, tmp_path):
    def named(path: Path) -> tuple[PipelineConfig, str]:
        model = {"kind": "gguf", "path": str(path)}
        settings = {"given": {"sft": model}} if of == "given.sft" else {"model": model}
        config = PipelineConfig.model_validate({"workspace": {"root": str(tmp_path / "ws")}, **settings})
        name = "sft" if of == "given.sft" else "base"
        return config, fingerprints_of(stages_of(config), config.workspace)[name].fingerprint

    other = tmp_path / "other.gguf"
    shutil.copy(file, other)
    (config, first), (_, second) = named(file), named(other)
    assert first == second
    kind = "given_model" if of == "given.sft" else "base"
    artifact = tmp_path / "ws" / "artifacts" / kind / first
    take(file, artifact)
    set_moved_aside(config)
    assert artifact.is_dir()  # it holds its model, and points nowhere
    other.write_bytes(other.read_bytes() + b"\0")
    assert named(other)[1] != first


# ---- refusals


ONES = np.ones(64, np.float32)
REFUSED = {
    "architecture": ({"keys": {"general.architecture": "gemma3"}}, r"architecture = 'gemma3'; .* llama, qwen2, qwen3"),
    "experts": ({"keys": {"llama.expert_count": 8}}, "8 experts"),
    "scaled positions": ({"keys": {"llama.rope.scaling.type": "yarn"}}, "positions are scaled .*'yarn'.* Hub id"),
    "factors of positions": ({"tensors": {"rope_freqs.weight": ONES}}, "positions are scaled .* rope_freqs.* Hub id"),
    "a part": ({"keys": {"split.count": 3}}, "llama-gguf-split --merge"),
    "no tokens": ({"without": ["tokenizer.ggml.tokens"]}, "no tokenizer in it"),
    "no tokenizer": ({"without": ["tokenizer.ggml.model"]}, "no tokenizer in it"),
    "another rule": ({"keys": {"tokenizer.ggml.pre": "viking"}}, "tokenizer.ggml.pre = 'viking'; known are llama-bpe"),
    "SentencePiece": ({"keys": {"tokenizer.ggml.model": "llama"}}, "tokenizer.ggml.model = 'llama'; known is 'gpt2'"),
    "unigrams": ({"keys": {"tokenizer.ggml.model": "t5"}}, "tokenizer.ggml.model = 't5'"),
    "no merges": ({"without": ["tokenizer.ggml.merges"]}, "no tokenizer.ggml.merges in it"),
    "no end": ({"without": ["tokenizer.ggml.eos_token_id"]}, "no tokenizer.ggml.eos_token_id in it"),
    "no such token": ({"keys": {"tokenizer.ggml.padding_token_id": 320}}, "padding_token_id = 320, .* 320 tokens"),
    "no template": ({"without": ["tokenizer.chat_template"]}, "no chat template in it"),
    "no size": ({"without": ["llama.embedding_length"]}, "no llama.embedding_length"),
    "heads by layer": ({"keys": {"llama.attention.head_count": [1, 2]}}, "llama.attention.head_count = "),
    "no heads": (
        {"without": ["llama.attention.key_length"], "keys": {"llama.attention.head_count": 0}},
        "head_count = 0: ",
    ),
    "layers in words": ({"keys": {"llama.block_count": "3"}}, "llama.block_count = '3': "),
    "more layers than tensors": (
        {"keys": {"llama.block_count": 2**32 - 1}},
        "block_count = 4294967295, but .* 30 tensors",
    ),
    "a token in words": ({"keys": {"tokenizer.ggml.bos_token_id": "1"}}, "tokenizer.ggml.bos_token_id = '1'"),
    "tokens as numbers": ({"keys": {"tokenizer.ggml.tokens": [1, 2]}}, "tokenizer.ggml.tokens is no list of texts"),
    "merges as numbers": ({"keys": {"tokenizer.ggml.merges": [1, 2]}}, "tokenizer.ggml.merges is no list of texts"),
    "parts in words": ({"keys": {"split.count": "3"}}, "llama-gguf-split --merge"),
    "a template in numbers": ({"keys": {"tokenizer.chat_template": 5}}, "no chat template in it"),
    "alignment": ({"keys": {"general.alignment": 0}}, "general.alignment = 0"),
    "a window": ({"keys": {"llama.attention.sliding_window": 127}}, "llama.attention.sliding_window = 127"),
    "other value heads": ({"keys": {"llama.attention.value_length": 8}}, "llama.attention.value_length = 8"),
    "half of a head rotated": ({"keys": {"llama.rope.dimension_count": 8}}, "llama.rope.dimension_count = 8"),
    "a factor without a type": ({"keys": {"llama.rope.scaling.factor": 4.0}}, "llama.rope.scaling.factor = 4.0"),
    "linear scaling": ({"keys": {"llama.rope.scale_linear": 4.0}}, "llama.rope.scale_linear = 4.0"),
    "capped logits": ({"keys": {"llama.final_logit_softcapping": 30.0}}, "final_logit_softcapping = 30.0"),
    "no matrix": ({"without": ["blk.1.ffn_up.weight"]}, "no blk.1.ffn_up.weight in it"),
    "no norm": ({"without": ["blk.2.attn_norm.weight"]}, "no blk.2.attn_norm.weight in it"),
    "no embeddings": ({"without": ["token_embd.weight"]}, "no token_embd.weight in it"),
    "a layer less": ({"keys": {"llama.block_count": 4}}, "no blk.3.attn_norm.weight, .* and 6 more in it"),
    "a layer more": (
        {"keys": {"llama.block_count": 2}},
        "blk.2.attn_norm.weight, .* and 6 more in it, .* plain llama does not",
    ),
    "a bias": ({"tensors": {"blk.0.attn_q.bias": ONES}}, "blk.0.attn_q.bias in it, .* plain llama does not have"),
    "a smaller matrix": (
        {"tensors": {"blk.0.ffn_up.weight": np.ones((48, 32), np.float32)}},
        r"\(48, 32\), and not \(64",
    ),
    "fewer embeddings": (
        {"keys": {"llama.vocab_size": 384}},
        r"output.weight has the shape \(320, 32\), and not \(384",
    ),
    "an unknown tensor": ({"tensors": {"blk.0.foo.weight": ONES}}, "blk.0.foo.weight in it"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_a_folder_could_not_hold_is_refused_by_name(why, file, tmp_path):
    changes, told = REFUSED[why]
    path = rewritten(file, tmp_path / "x.gguf", **changes)
    with pytest.raises(ConfigError, match=f"{path}: .*{told}"):
        check_gguf(path)


def test_a_copy_is_accepted_and_so_are_values_that_change_nothing(file, tmp_path):
    assert check_gguf(rewritten(file, tmp_path / "x.gguf")).tensors.keys() == read_gguf_header(file).tensors.keys()
    neutral = {
        "llama.attention.sliding_window": 128,  # as long as the context
        "llama.rope.scaling.factor": 1.0,
        "llama.rope.scale_linear": 0.0,
        "llama.rope.scaling.type": "none",
    }
    check_gguf(rewritten(file, tmp_path / "x.gguf", keys=neutral))


def test_the_end_of_a_turn_is_end_enough(file, tmp_path):
    other = {"without": ["tokenizer.ggml.eos_token_id"], "keys": {"tokenizer.ggml.eot_token_id": 2}}
    taken = take(rewritten(file, tmp_path / "x.gguf", **other), tmp_path / "taken")
    assert FolderTokenizer(taken).stop_ids == (2,)


@pytest.mark.parametrize(("family", "tensor"), [("qwen2", "blk.0.attn_k.bias"), ("qwen3", "blk.0.attn_q_norm.weight")])
def test_each_family_needs_the_tensors_of_its_own(family, tensor, folders, tmp_path):
    write_gguf(folders[family], tmp_path / "x.gguf", "f16", name="x", licence="")
    check_gguf(tmp_path / "x.gguf")
    with pytest.raises(ConfigError, match=f"no {tensor} in it"):
        check_gguf(rewritten(tmp_path / "x.gguf", tmp_path / "y.gguf", without=[tensor]))


def test_a_model_without_a_head_of_its_own_reuses_its_embeddings(file, tmp_path):
    path = rewritten(file, tmp_path / "x.gguf", without=["output.weight"])
    check_gguf(path)
    weights = load_file(take(path, tmp_path / "taken") / "model.safetensors")
    assert "lm_head.weight" not in weights


def test_heads_whose_size_a_file_does_not_state_share_the_hidden_size(folders, tmp_path):
    model = write_model("qwen3", tmp_path / "model", hidden_size=64)  # of 4 heads
    write_gguf(model, tmp_path / "x.gguf", "f16", name="x", licence="")
    sizes = [f"qwen3.{key}" for key in ("attention.key_length", "attention.value_length", "rope.dimension_count")]
    taken = take(rewritten(tmp_path / "x.gguf", tmp_path / "y.gguf", without=sizes), tmp_path / "taken")
    assert read_hf_config(taken).head_dim == 16
    assert greedy(taken) == greedy(model)


@pytest.mark.parametrize("merges", [["t h", "h zz"], ["th"]])
def test_merges_of_unknown_tokens_are_refused_with_the_file(merges, file, tmp_path):
    path = rewritten(file, tmp_path / "x.gguf", keys={"tokenizer.ggml.merges": merges})
    with pytest.raises(ConfigError, match=f"{path}: its tokenizer cannot be read"):
        take(path, tmp_path / "taken")
    assert not (tmp_path / "taken" / "model").exists()


@pytest.mark.parametrize("error", [MemoryError, ImportError])
def test_what_the_machine_lacks_is_not_said_of_the_file(error, file, tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(PreTrainedTokenizerFast, "from_pretrained", fails)
    with pytest.raises(error):
        take(file, tmp_path / "taken")


def test_a_file_that_is_not_there_another_or_half_is_refused_in_the_preflight(file, tmp_path):
    def problems(path: Path) -> list[str]:
        config = PipelineConfig(
            workspace=WorkspaceConfig(root=str(tmp_path / "ws")), model=GgufModelConfig(path=str(path))
        )
        return [problem for problem in problems_with(config) if str(path) in problem]

    content = file.read_bytes()
    half, short, text = (tmp_path / name for name in ("half.gguf", "short.gguf", "text.gguf"))
    half.write_bytes(content[: len(content) // 2])
    short.write_bytes(content[:2000])
    text.write_text("<html>not found</html>")
    (tmp_path / "empty.gguf").write_bytes(b"")
    for path, told in (
        (tmp_path / "none.gguf", "no such file"),
        (half, "cut off: it has"),
        (short, "its header is cut off or damaged"),
        (text, "not a GGUF file: it begins with b'<htm'"),
        (tmp_path / "empty.gguf", "not a GGUF file"),
    ):
        found = problems(path)
        assert len(found) == 1, found
        assert told in found[0]
    assert problems(file) == []


def test_a_file_that_lacks_the_end_of_its_last_tensor_is_refused_when_it_is_converted(file, tmp_path):
    (tmp_path / "x.gguf").write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"x\.gguf: its weights cannot be read"):
        take(tmp_path / "x.gguf", tmp_path / "taken")
    assert not (tmp_path / "taken" / "model").exists()


def test_a_missing_library_is_named_with_its_extra(file):
    code = (
        "import sys; sys.modules['gguf'] = None\n"
        "from klear_core.artifacts.model_files import check_model\n"
        "from klear_core.config.train import GgufModelConfig\n"
        f"check_model(GgufModelConfig(path={str(file)!r}))"
    )
    said = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True).stderr
    assert "ConfigError: GGUF files need the library gguf" in said
    assert "pip install -e '.[gguf]'" in said


def test_a_tokenizer_of_single_bytes_and_scaled_positions_are_not_written(folders, tmp_path):
    with pytest.raises(ConfigError, match="only byte-level BPE with merges"):
        write_gguf(tiny_folder(tmp_path / "tiny"), tmp_path / "x.gguf", "f16", name="x", licence="")
    shutil.copytree(folders["llama"], tmp_path / "scaled")
    config = tmp_path / "scaled" / "config.json"
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    config.write_text(json.dumps(json.loads(config.read_text()) | scaled))
    with pytest.raises(ConfigError, match="only plain Llama, Qwen2 and Qwen3 models are written"):
        write_gguf(tmp_path / "scaled", tmp_path / "x.gguf", "f16", name="x", licence="")


def test_a_base_model_of_a_pipeline_may_be_a_gguf_file(file, tmp_path):
    check_model(GgufModelConfig(path=str(file)))
    prepare_base(GgufModelConfig(path=str(file)), seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    assert (model_folder(tmp_path) / "model.safetensors").is_file()
