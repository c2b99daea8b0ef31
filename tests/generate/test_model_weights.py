from pathlib import Path

import pytest
import torch
from decoder_folder import build_model, write_folder
from safetensors.torch import save_file

from klear_core.errors import ConfigError
from klear_core.generate.decoder.decoder import Decoder
from klear_core.generate.decoder.shape import read_shape
from klear_core.generate.model_weights import HEAD, check_shapes, tensor_shapes, tensors, wanted_shapes


def test_one_file_many_shards_and_a_mapping_are_the_same_weights(tmp_path: Path) -> None:
    model = build_model(is_tied=False)
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    expected = dict(model.state_dict())
    for source in (tmp_path / "one", tmp_path / "many", expected):
        assert tensor_shapes(source) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
        found = dict(tensors(source))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_single_file_comes_before_an_index_as_in_transformers(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00001-of-00002.safetensors"}}')
    assert tensor_shapes(tmp_path).keys() == build_model().state_dict().keys() - {HEAD}


def test_the_constants_in_files_of_old_llamas_are_no_weights(tmp_path: Path) -> None:
    """Neither our sampler, nor a learner's weights for vLLM, are refused for the lack of them."""
    model = build_model(family="llama")
    folder = write_folder(tmp_path, model)
    stored = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    constants = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(2)}
    save_file(stored | constants, folder / "model.safetensors")
    check_shapes(stored_shapes := {name: tuple(t.shape) for name, t in stored.items()}, wanted_shapes(folder))
    assert tensor_shapes(folder) == stored_shapes
    decoder = Decoder(read_shape(folder), dtype=torch.float32, device=torch.device("cpu"))
    decoder.load(folder)
    assert torch.equal(decoder.embed, stored["model.embed_tokens.weight"])


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    build_model().save_pretrained(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        tensor_shapes(tmp_path)


def test_a_tied_head_may_come_along_and_nothing_else() -> None:
    expected = {"a": (2, 3)}
    check_shapes({"a": (2, 3), HEAD: (2, 3)}, expected)
    for found, complaint in (
        ({}, r"missing \['a'\]"),
        ({"a": (3, 2)}, r"a has shape \(3, 2\)"),
        ({"a": (2, 3), "b": (1,)}, r"unknown \['b'\]"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            check_shapes(found, expected)
    with pytest.raises(ConfigError, match="missing"):
        check_shapes({"a": (2, 3)}, expected | {HEAD: (2, 3)})


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_folder_that_stores_its_tied_head_does_not_ask_for_it(tmp_path: Path, is_tied: bool) -> None:
    """Published folders and exports in another dtype do; a learner offers each weight once."""
    model = build_model(is_tied=is_tied)
    folder = write_folder(tmp_path, model)
    save_file({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "model.safetensors")
    distinct = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert HEAD in tensor_shapes(folder)
    assert (HEAD in distinct) != is_tied
    assert wanted_shapes(folder) == distinct
    check_shapes(distinct, wanted_shapes(folder))
