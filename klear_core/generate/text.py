"""Decode token ids and find the end tokens of a model folder, for the engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from klear_core.errors import ConfigError
from klear_core.types import FinishReason


class FolderTokenizer:
    """The `tokenizer.json` of a Hugging Face folder.

    Raise ConfigError if it is missing, or if no end token is declared.
    """

    def __init__(self, model_folder: Path) -> None:
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing: engines need a fast tokenizer")
        self._tokenizer = Tokenizer.from_file(str(path))
        self.stop_ids = self._stop_ids(model_folder)

    def decode(self, token_ids: Sequence[int], finish_reason: FinishReason) -> str:
        """Return the text with special tokens shown (think tags may be some), except the end token that stopped it."""
        # a completion that stopped ends with its end token, one that ran out of tokens has none
        shown_ids = token_ids[:-1] if finish_reason == "stop" else token_ids
        text: str = self._tokenizer.decode(list(shown_ids), skip_special_tokens=False)
        return text

    def _stop_ids(self, model_folder: Path) -> tuple[int, ...]:
        """Return the tokenizer's eos and every eos of `generation_config.json`, in ascending order."""
        # a chat model may end its turns with another token than the tokenizer's eos: any token in either file stops
        listed = _read_json(model_folder / "generation_config.json").get("eos_token_id")
        stop_ids = set(listed if isinstance(listed, list) else [listed])
        eos = _read_json(model_folder / "tokenizer_config.json").get("eos_token")
        if eos:
            stop_ids.add(self._tokenizer.token_to_id(eos["content"] if isinstance(eos, dict) else eos))
        stop_ids.discard(None)  # not listed, or not in the vocabulary
        if not stop_ids:
            raise ConfigError(
                f"{model_folder}: no end token in tokenizer_config.json or generation_config.json: "
                "no answer would ever stop"
            )
        return tuple(sorted(stop_ids))


def _read_json(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_text()) if path.is_file() else {}
    assert isinstance(content, dict), path
    return content
