"""Turn questions into token ids, and sampled text into reasoning and answer.

Only this module knows the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError
from klear_core.types import Completion

if TYPE_CHECKING:
    Tokenizer = Any  # transformers ships no types for its fast tokenizers

_DATE = datetime(2024, 7, 26, tzinfo=UTC)
"""Today, for templates that write the date. The clock's would change prompts, and so weights and scores, by the day;
this is the one that Llama 3's templates have where there is no clock."""
_QUESTION = "1+1 = ?"
"""A question to try a template with."""
THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"
TURN_END = "<|im_end|>"
PAD = "<|endoftext|>"
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the same class in a tokenizer_config.json written by transformers 4 and 5."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""Qwen's turns, without its tool and thinking switches; equals what Qwen3's own template renders for one user turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitResponse:
    """A response split in two; `is_closed` is False if the thinking never ended (then `answer` is empty)."""

    reasoning: str
    answer: str
    is_closed: bool


def render_prompt(tokenizer: Tokenizer, question: str) -> tuple[int, ...]:
    """Encode one user turn and the opening of the assistant's.

    No system prompt, nothing added (the paper's protocol, section 4.1).
    """
    # The template writes the special tokens itself; a tokenizer that adds a BOS would put a second one there.
    return tuple(tokenizer.encode(prompt_text(tokenizer, question), add_special_tokens=False))


def prompt_text(tokenizer: Tokenizer, question: str) -> str:
    """Return the text that `render_prompt` encodes."""
    messages = [{"role": "user", "content": question}]
    text: str = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, strftime_now=_DATE.strftime
    )
    return text


def check_same_tokens(*, student: Path, teacher: Path) -> None:
    """Raise ConfigError if the models in two folders have different tokens: one's log-probs would be of other text."""
    note = different_tokens(load_tokenizer(student).get_vocab(), load_tokenizer(teacher).get_vocab())
    if note:
        raise ConfigError(f"student {student}, teacher {teacher}: {note}")


def different_tokens(student: Mapping[str, int], teacher: Mapping[str, int]) -> str:
    """Return which of the student's tokens have another id, or none, for the teacher; empty if all are the same."""
    different = [token for token, i in sorted(student.items(), key=lambda entry: entry[1]) if teacher.get(token) != i]
    if not different:
        return ""
    return (
        f"{len(different):,} of the student's tokens have another id, or none, for the teacher "
        f"({', '.join(map(repr, different[:3]))}): it must have the student's tokenizer"
    )


def opening_of(tokenizer: Tokenizer) -> str:
    """Return the start of every response that the chat template puts into the prompt; empty for most templates.

    Templates of models that always think end the prompt with `<think>` and a line break (DeepSeek-R1-Distill).
    """
    _, tag, rest = prompt_text(tokenizer, _QUESTION).partition(_QUESTION)[2].rpartition(THINK_OPEN)
    return "" if rest.strip() else tag + rest


def continuation(response: str, opening: str) -> str:
    """Return what is left of a response after the opening that the prompt holds: the text that the model writes."""
    if not opening:
        return response
    if response.startswith(opening):
        return response.removeprefix(opening)
    # The template puts other white space behind the tag than `render_response`.
    return response.removeprefix(THINK_OPEN).lstrip()


def completed(completion: Completion, opening: str) -> Completion:
    """Return the completion with the opening of its prompt in its text, as judges and people read responses."""
    return replace(completion, text=opening + completion.text) if opening else completion


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[int, ...]]:
    """Encode many texts at once, on all cores."""
    return [tuple(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]


def render_response(reasoning: str, answer: str) -> str:
    """Return a response in the R1 format that the model learns to write."""
    return f"{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{answer}"


def encode_response(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """Encode a response as the model should produce it: its tokens and the end of the turn."""
    return (*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id)


def decode_response(tokenizer: Tokenizer, token_ids: tuple[int, ...] | list[int]) -> str:
    """Decode sampled ids: keep thinking tags, remove the end of the turn and padding."""
    hidden = (tokenizer.eos_token_id, tokenizer.pad_token_id)
    text: str = tokenizer.decode([i for i in token_ids if i not in hidden], skip_special_tokens=False)
    return text


def split_response(text: str) -> SplitResponse:
    """Split a response at its last `</think>`: a model that thinks twice is judged by its last answer."""
    before, tag, after = text.rpartition(THINK_CLOSE)
    reasoning, answer = (before, after) if tag else (text, "")
    reasoning = reasoning.strip().removeprefix(THINK_OPEN).strip()
    return SplitResponse(reasoning=reasoning, answer=answer.strip(), is_closed=bool(tag))


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer of a model folder, with the token that ends a chat turn as its eos. Never asks a hub.

    Base models declare the end of a document there (Qwen3-8B-Base), which ends no chat turn. ConfigError if there is no
    tokenizer, no chat template, or no single token that ends a turn.
    """
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        raise ConfigError(f"{folder}: no tokenizer_config.json; a model folder must hold its tokenizer")
    tokenizer = _tokenizer_class(json.loads(path.read_text())).from_pretrained(folder, local_files_only=True)
    if not tokenizer.chat_template:
        raise ConfigError(f"{folder}: the tokenizer has no chat template")
    try:
        turn_end = _turn_end(tokenizer)
    except ConfigError as e:
        raise ConfigError(f"{folder}: {e}") from e
    # Padding takes the declared eos before that is replaced, so that it is not the token that ends a turn.
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token or turn_end
    tokenizer.eos_token = turn_end
    return tokenizer


def _tokenizer_class(declared: Mapping[str, object]) -> type[Tokenizer]:
    """Return the class that reads a folder's tokenizer.

    If the folder names the generic class, which AutoTokenizer would also choose, import it directly: AutoTokenizer
    loads the registry of all models, four seconds of CPU time.
    """
    if declared.get("tokenizer_class") in _GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast  # type: ignore[no-any-return]
    from transformers import AutoTokenizer

    return AutoTokenizer  # type: ignore[no-any-return]


def build_byte_tokenizer() -> Tokenizer:
    """Build a tokenizer of 256 bytes and Qwen's special tokens, which encodes any text. Token id = byte value."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: byte for byte, char in enumerate(_byte_chars())}
    inner = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_tokens([AddedToken(t, special=True, normalized=False) for t in (PAD, "<|im_start|>", TURN_END)])
    inner.add_tokens([AddedToken(t, special=False, normalized=False) for t in (THINK_OPEN, THINK_CLOSE)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=TURN_END, pad_token=PAD, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def padded_vocab_size(tokenizer: Tokenizer) -> int:
    """Return the vocabulary size, rounded up to a multiple of 64 for fast matrix kernels."""
    size: int = len(tokenizer)
    return -(-size // 64) * 64


def check_template(tokenizer: Tokenizer) -> None:
    """Check what SFT and sampling assume about a tokenizer; ConfigError says which part does not hold."""
    text = continuation(render_response("1+1=2", "\\boxed{2}"), opening_of(tokenizer))
    prompt_ids, response_ids = render_prompt(tokenizer, _QUESTION), encode_response(tokenizer, text)
    # A judge reads what is decoded, and must find the tags and the answer that SFT taught.
    if decode_response(tokenizer, response_ids) != text:
        raise ConfigError(
            f"template: {text!r} comes back from the tokenizer as {decode_response(tokenizer, response_ids)!r}"
        )
    prompt = tokenizer.decode(prompt_ids, skip_special_tokens=False)
    _, asked, turn = prompt.partition(_QUESTION)
    if not asked:
        raise ConfigError(f"template: the question {_QUESTION!r} is not in the prompt {prompt!r}")
    _, opened, begun = turn.rpartition(THINK_OPEN)
    if opened and begun.strip() and THINK_CLOSE not in begun:
        raise ConfigError(
            f"template: the prompt opens the thinking and goes on with {begun.strip()!r}, with which no trace begins; "
            f"let it end with {THINK_OPEN}, or without"
        )
    joined = tuple(tokenizer.encode(prompt + text, add_special_tokens=False)) + response_ids[-1:]
    if joined != prompt_ids + response_ids:
        raise ConfigError(
            "template: prompt and response give other tokens together than apart, "
            "so sampling would not see what SFT taught"
        )
    turn_end = _turn_end(tokenizer)
    if turn_end != tokenizer.eos_token:
        raise ConfigError(
            f"template: a turn ends in {turn_end!r}, but the tokenizer's eos_token is {tokenizer.eos_token!r}"
        )


def _turn_end(tokenizer: Tokenizer) -> str:
    """Return what the template puts after an assistant's message; ConfigError unless it is one token."""
    answer = "1+1=2"
    messages = [{"role": "user", "content": "1+1 = ?"}, {"role": "assistant", "content": answer}]
    text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    # What the template writes after the last message: the end of turn, and often a line break.
    end = text.rpartition(answer)[2].strip()
    # Some templates also end the conversation, with the declared eos (Phi-3): the turn ends with what comes before it.
    if tokenizer.eos_token and end != tokenizer.eos_token:
        end = end.removesuffix(tokenizer.eos_token).strip()
    if len(tokenizer.encode(end, add_special_tokens=False)) != 1:
        raise ConfigError(
            f"template: an assistant's turn ends in {end!r}, which is not one token, so an answer would have no end"
        )
    return end


def _byte_chars() -> list[str]:
    """Return the printable character for every byte in byte-level tokenizers (GPT-2).

    A printable byte is itself; the others count up from U+0100.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    chars: list[str] = []
    num_others = 0
    for byte in range(256):
        if byte in printable:
            chars.append(chr(byte))
        else:
            chars.append(chr(256 + num_others))
            num_others += 1
    return chars


# ---- window ----
# Find the part of a response in which an answer counts.


NO_CLOSE_TAG = "no </think>"
NO_OPEN_TAG = "no <think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class NoAnswer:
    """The reason why a response has no answer to judge."""

    reason: str


def find_answer_text(response: str, cfg: VerifyConfig) -> str | NoAnswer:
    """Return the text to search for an answer, or the required tag that is missing."""
    has_close = THINK_CLOSE in response
    if cfg.tags != "none" and not has_close:
        return NoAnswer(reason=NO_CLOSE_TAG)
    if cfg.tags == "both" and THINK_OPEN not in response:
        return NoAnswer(reason=NO_OPEN_TAG)
    if cfg.window == "whole" or not has_close:
        return response
    return response.rsplit(THINK_CLOSE, 1)[1]
