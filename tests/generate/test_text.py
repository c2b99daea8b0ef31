import json
from pathlib import Path

import pytest
from decoder_folder import END_ID, build_model, write_folder

from klear_core.errors import ConfigError
from klear_core.hf_config import FolderTokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, build_model())


def change(path: Path, **fields: object) -> None:
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | fields).items() if v is not None}))


def test_only_the_token_that_ended_the_answer_is_hidden(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    think = [259, 65, END_ID, 260, END_ID]
    assert tokenizer.decode(think, "stop") == "<think>b<|im_end|></think>"
    assert tokenizer.decode(think, "length") == "<think>b<|im_end|></think><|im_end|>"


def test_end_tokens_are_those_of_tokenizer_and_generation_config(folder: Path) -> None:
    assert FolderTokenizer(folder).stop_ids == (END_ID,)
    change(folder / "generation_config.json", eos_token_id=[256, END_ID])
    assert FolderTokenizer(folder).stop_ids == (256, END_ID)
    change(folder / "generation_config.json", eos_token_id=256)
    change(folder / "tokenizer_config.json", eos_token={"content": "</think>"})
    assert FolderTokenizer(folder).stop_ids == (256, 260)


def test_a_folder_without_end_token_or_tokenizer_is_refused(folder: Path) -> None:
    change(folder / "generation_config.json", eos_token_id=None)
    change(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="no end token"):
        FolderTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="missing"):
        FolderTokenizer(folder)
