"""A model that exists is taken by folder or from a Hub: its needed files alone, once, each with a checksum."""

import hashlib
import json
import shutil

import pytest
import torch
from hub_server import REVISION, hub
from safetensors.torch import load_file, save_file
from tiny_models import tiny_folder

from klear_core.artifacts.model_files import check_folder, check_model, folder_of, is_here, licence_in, model_files
from klear_core.config.train import HfModelConfig, HubModelConfig
from klear_core.errors import ConfigError, DataError, ResourceError
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base, take_model, wanted_window
from klear_core.train.model import load_model

REPO = "some/sft-model"
CARD = b"---\nlanguage: en\nlicense: apache-2.0\n---\n# A model\nlicense: mit\n"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def published(tiny):
    files = {file.name: file.read_bytes() for file in tiny.iterdir()}
    others = {"pytorch_model.bin": b"again", "original/model.safetensors": b"again", "optimizer.pt": b"state"}
    return files | others | {"README.md": CARD}


def model_at(endpoint, cache, **more):
    return HubModelConfig(repo=REPO, revision=REVISION, runtime={"cache_dir": str(cache), "endpoint": endpoint}, **more)


def take(model, workdir, licence=""):
    workdir.mkdir(exist_ok=True)
    return take_model(model, licence=licence, workdir=workdir, telemetry=NullTelemetry())


def test_a_model_is_downloaded_once_and_only_what_is_needed_of_it(tmp_path, published, tiny):
    with hub(REPO, published, repo_type="model") as (endpoint, fetched):
        model = model_at(endpoint, tmp_path / "cache", max_position_embeddings=2048)
        check_model(model)
        assert fetched == ["config.json"]  # its size and architecture are known before it is downloaded
        assert not is_here(model)
        summary = take(model, tmp_path / "taken")
        needed = {file.name for file in tiny.iterdir()} | {"README.md"}
        assert sorted(fetched) == sorted(needed)
        take(model, tmp_path / "again")
        assert sorted(fetched) == sorted(needed)
    assert is_here(model)
    check_model(model)
    take(model, tmp_path / "offline")
    folder = model_folder(tmp_path / "taken")
    assert folder == folder_of(model)
    assert wanted_window(tmp_path / "taken") == 2048
    assert (summary.given.origin, summary.given.licence) == ("some/sft-model@0123456", "apache-2.0")
    assert {f.path for f in summary.given.files} == needed
    weights = next(f for f in summary.given.files if f.path == "model.safetensors")
    assert weights.sha256 == hashlib.sha256((tiny / "model.safetensors").read_bytes()).hexdigest()


def test_the_base_model_may_be_of_the_hub(tmp_path, published):
    with hub(REPO, published, repo_type="model") as (endpoint, _):
        model = model_at(endpoint, tmp_path / "cache")
        prepare_base(model, seed=0, workdir=tmp_path, telemetry=NullTelemetry())
    assert model_folder(tmp_path) == folder_of(model)


def test_progress_is_told_in_bytes(tmp_path, published):
    from klear_core.artifacts.model_files import download

    told = []
    with hub(REPO, published, repo_type="model") as (endpoint, _):
        download(model_at(endpoint, tmp_path), lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > len(published["model.safetensors"])


def test_weights_that_are_not_the_published_ones_are_refused(tmp_path, published):
    good = published["model.safetensors"]
    damaged = {"model.safetensors": bytes(len(good))}
    refused = pytest.raises(DataError, match=r"is damaged: its SHA-256 is .*delete it and run again")
    with hub(REPO, published, repo_type="model", sent=damaged) as (endpoint, _), refused:
        take(model_at(endpoint, tmp_path / "cache"), tmp_path / "taken")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("model.safetensors", b"version https://git-lfs.github.com/spec/v1\nsize 269060552\n", "pointer of git-lfs"),
        ("tokenizer.json", b"version https://git-lfs.github.com/spec/v1\nsize 11422654\n", "pointer of git-lfs"),
        ("model.safetensors", None, "cut off: it has .* bytes of "),
        ("model.safetensors", b"<html>", "cut off or damaged"),
        ("tokenizer_config.json", b'{"eos_token": "<|im', "cut off or damaged .*Unterminated string"),
    ],
)
def test_a_file_that_was_not_fetched_whole_is_named_before_a_run(tmp_path, tiny, name, content, told):
    """Weights are read hours after the check: when the first stage trains."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    whole = (folder / name).read_bytes()
    (folder / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    model = HfModelConfig(path=str(folder))
    for use in (check_model, lambda model: take(model, tmp_path / "taken")):
        with pytest.raises(ConfigError, match=rf"{folder / name}: .*{told}"):
            use(model)


@pytest.mark.parametrize(
    ("stated", "told"),
    [
        ({"vocab_size": 400}, "vocab_size = 400 .* the embedding of its weights is"),
        ({"hidden_size": 64}, "hidden_size = 64, but the embedding"),
        ({"num_hidden_layers": 1}, r"config\.json has 1 layers, but its weights have \d"),
    ],
)
def test_weights_of_another_size_are_refused_before_a_run(tmp_path, tiny, stated, told):
    """transformers leaves further layers out in silence."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] > 1
    (folder / "config.json").write_text(json.dumps(config | {"layer_types": None} | stated))
    for use in (check_model, lambda model: take(model, tmp_path / "taken")):
        with pytest.raises(ConfigError, match=told):
            use(HfModelConfig(path=str(folder)))


@pytest.mark.parametrize(("stated", "num_layers"), [(None, 0), (0, 0), (1, 1)])
def test_layers_that_predict_later_tokens_belong_to_the_model(tmp_path, tiny, stated, num_layers):
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": stated}))
    tensors = load_file(folder / "model.safetensors")
    for i in range(config["num_hidden_layers"], config["num_hidden_layers"] + num_layers):
        tensors[f"model.layers.{i}.eh_proj.weight"] = torch.zeros(2, 2)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    check_model(HfModelConfig(path=str(folder)), is_trained=False)


@pytest.mark.parametrize(
    ("add", "told"),
    [
        ({"model.layers.0.self_attn.o_proj.bias": (32,)}, r"1 tensors .* no place .*o_proj\.bias"),
        ({"model.norm.weight": (7,)}, r"model\.norm\.weight is \[7\] in the weights, but \[\d+\] by config\.json"),
    ],
)
def test_tensors_that_the_model_would_not_use_are_refused(tmp_path, tiny, add, told):
    folder = shutil.copytree(tiny, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors") | {name: torch.zeros(shape) for name, shape in add.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=told):
        load_model(folder, device="cpu")


def test_without_a_network_the_command_that_fetches_the_model_is_told(tmp_path, monkeypatch):
    model = model_at("http://127.0.0.1:9", tmp_path)
    told = rf"{REPO} at revision {REVISION}: is not in the cache .*hf download {REPO} --revision {REVISION}\) and copy"
    with pytest.raises(ConfigError, match=told):
        check_model(model)


def test_a_download_that_breaks_off_may_be_tried_again(tmp_path, published):
    with hub(REPO, published, repo_type="model") as (endpoint, _):
        gone = {name: content for name, content in published.items() if name != "model.safetensors"}
        refused = pytest.raises(ConfigError, match=r"no model\.safetensors .*there are optimizer\.pt, .*convert them")
        with hub(REPO, gone, repo_type="model") as (without_weights, _), refused:
            check_model(model_at(without_weights, tmp_path / "other"))
        check_model(model_at(endpoint, tmp_path / "cache"))
    with pytest.raises((ConfigError, ResourceError), match="the Hub cannot be reached"):
        take(model_at(endpoint, tmp_path / "cache"), tmp_path / "taken")
    with hub(REPO, published, repo_type="model") as (endpoint, _):
        take(model_at(endpoint, tmp_path / "cache"), tmp_path / "taken")


def test_a_repository_that_does_not_exist_is_named(tmp_path, published):
    refused = pytest.raises(ConfigError, match=f"{REPO} at revision .*the Hub has no such model or commit")
    with hub("some/other", published, repo_type="model") as (endpoint, _), refused:
        check_model(model_at(endpoint, tmp_path))


def test_a_revision_must_be_a_commit():
    with pytest.raises(ValueError, match="'main' is no commit: a revision has 40 hex digits"):
        HubModelConfig(repo=REPO, revision="main")


SHARDED = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
PLAIN = ["config.json", "tokenizer.json", "tokenizer_config.json"]


def test_of_several_forms_of_the_weights_one_is_chosen():
    mistral = [*PLAIN, *SHARDED, "consolidated.safetensors", "pytorch_model.bin", "tf_model.h5", "merges.txt"]
    assert model_files(mistral, at="x") == sorted([*PLAIN, *SHARDED, "merges.txt"])
    assert model_files([*PLAIN, "model.safetensors", *SHARDED], at="x") == [*PLAIN[:1], "model.safetensors", *PLAIN[1:]]


WRONG = {
    "no config": (["model.safetensors"], "no config.json there, so this is not a model"),
    "an adapter": (["adapter_config.json", "adapter_model.safetensors"], "an adapter without its base model"),
    "no weights": (PLAIN, "no model.safetensors and no shards .*there are none"),
    "no tokenizer": (["config.json", "model.safetensors"], "no tokenizer there"),
    "no index": ([*PLAIN, *SHARDED[:2]], "2 shards of weights and no model.safetensors.index.json"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_model_is_refused_with_what_is_missing(wrong):
    names, told = WRONG[wrong]
    with pytest.raises(ConfigError, match=f"x: .*{told}"):
        model_files(names, at="x")


def test_a_shard_that_the_index_names_and_the_folder_lacks_is_named(tmp_path, tiny):
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "model.safetensors").rename(folder / SHARDED[0])
    index = {"weight_map": {"a": SHARDED[0], "b": SHARDED[1]}}
    (folder / SHARDED[2]).write_text(json.dumps(index))
    with pytest.raises(ConfigError, match=rf"1 of its weight files are missing \({SHARDED[1]}\)"):
        check_folder(folder)


CONFIGS = {
    "another class": ({"architectures": ["BertForMaskedLM"]}, r"architectures = \['BertForMaskedLM'\]"),
    "another type": ({"model_type": "no_such_type"}, "model_type = 'no_such_type' is unknown to the transformers"),
}


@pytest.mark.parametrize("wrong", CONFIGS)
def test_a_model_that_transformers_or_klear_cannot_train_is_refused(tmp_path, tiny, wrong):
    change, told = CONFIGS[wrong]
    folder = shutil.copytree(tiny, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change))
    for is_trained in (True, False):
        with pytest.raises(ConfigError, match=told):
            check_folder(folder, is_trained=is_trained)


def test_a_type_that_is_defined_in_the_folder_of_another_is_known(tmp_path, tiny):
    from klear_core.hf_config import check_model_type

    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma3_text"}))
    check_model_type(tmp_path)


def test_a_folder_is_pointed_to_with_its_checksums_and_a_declared_licence(tmp_path, tiny):
    summary = take(HfModelConfig(path=str(tiny)), tmp_path / "taken", licence="mit")
    assert model_folder(tmp_path / "taken") == tiny
    assert (summary.given.origin, summary.given.licence) == (str(tiny), "mit")
    assert {f.path: f.size for f in summary.given.files} == {f.name: f.stat().st_size for f in tiny.iterdir()}


def test_a_card_without_a_header_states_no_licence(tmp_path):
    assert licence_in(tmp_path) == ""
    (tmp_path / "README.md").write_text("# A model\nlicense: mit\n")
    assert licence_in(tmp_path) == ""


@pytest.mark.parametrize(
    ("header", "licence"),
    [
        ("license: mit", "mit"),
        ("license: 'apache-2.0'\npretty_name: x", "apache-2.0"),
        ("language:\n- en\nlicense:\n- cc-by-4.0\n- mit\nsize_categories:\n- 1K<n<10K", "cc-by-4.0, mit"),
        ("license:\n  - mit", "mit"),
        ("license: [mit, apache-2.0]", "mit, apache-2.0"),
        ("license:\npretty_name: x", ""),
    ],
)
def test_a_card_states_one_licence_or_a_list_of_them(header: str, licence: str, tmp_path) -> None:
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\nlicense: none\n")
    assert licence_in(tmp_path) == licence
