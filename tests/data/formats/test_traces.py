"""Traces as the published data sets have them, with the columns that their cards list: those that fit and those that do not."""

import json
from pathlib import Path

import pytest

from klear_core.config.data import FileSource
from klear_core.data.formats.traces import PublishedTrace, check_traces, format_of, read_traces, split_reply
from klear_core.errors import ConfigError
from klear_core.types import Domain, Dropped

DATA = Path(__file__).parents[4] / "shared" / "data"
THOUGHT = "<think>\nhm\n</think>\n\nso \\boxed{2}"
SKY = (
    "<|begin_of_thought|>\n\nhm\n\n<|end_of_thought|>\n\n<|begin_of_solution|>\n\nso \\boxed{2}\n\n<|end_of_solution|>"
)
QUESTION = "What is 1+1?"
CHAT = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": THOUGHT}]
SHARE_GPT = [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": THOUGHT}]
PARTS = [
    {"role": "user", "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": " 1+1?"}]},
    {"role": "assistant", "content": [{"type": "text", "text": THOUGHT}]},
]

ROWS = {
    "messages": {"messages": CHAT},
    "messages, with a system prompt": {"messages": [{"role": "system", "content": "Think."}, *CHAT]},
    "messages, in parts": {"messages": PARTS},
    "messages, with the thinking apart": {
        "messages": [CHAT[0], {"role": "assistant", "content": "so \\boxed{2}", "reasoning_content": "hm"}]
    },
    "messages, with the thinking apart and in tags": {
        "messages": [
            CHAT[0],
            {"role": "assistant", "content": "so \\boxed{2}", "reasoning_content": "<think>\nhm\n</think>"},
        ]
    },
    "messages, with the thinking apart and in the text": {
        "messages": [CHAT[0], {"role": "assistant", "content": THOUGHT, "reasoning_content": "hm"}]
    },
    "Nemotron-Post-Training-Dataset-v2": {
        "uuid": "u",
        "license": "cc-by-4.0",
        "generator": "DeepSeek-R1-0528",
        "version": "v2",
        "category": "math",
        "reasoning": "on",
        "messages": CHAT,
    },
    "Llama-Nemotron, a text": {
        "input": QUESTION,
        "output": THOUGHT,
        "category": "math",
        "license": "cc-by-4.0",
        "reasoning": "on",
        "generator": "DeepSeek-R1",
        "used_in_training": "Ultra",
        "version": "v1.1",
        "system_prompt": "detailed thinking on",
    },
    "Llama-Nemotron, messages": {
        "input": [CHAT[0]],
        "output": THOUGHT,
        "category": "science",
        "license": "cc-by-4.0",
        "reasoning": "on",
        "generator": "DeepSeek-R1",
    },
    "AceReason-1.1-SFT": {"category": "math", "source": "NuminaMath", "input": QUESTION, "output": THOUGHT},
    "OpenThoughts-114k": {
        "system": "Your role as an assistant",
        "conversations": [
            {"from": "user", "value": "Return your final response within \\boxed{}. " + QUESTION},
            {"from": "assistant", "value": SKY},
        ],
    },
    "OpenThoughts3-1.2M": {"difficulty": 7, "source": "ai2-adapt", "domain": "math", "conversations": SHARE_GPT},
    "OpenThoughts3-1.2M, science": {"difficulty": 7, "source": "s", "domain": "science", "conversations": SHARE_GPT},
    "OpenThoughts-114k, metadata": {
        "problem": QUESTION,
        "deepseek_reasoning": "hm",
        "deepseek_solution": "so \\boxed{2}",
        "ground_truth_solution": "\\boxed{2}",
        "domain": "math",
        "source": "numina_math",
        "test_cases": None,
        "starter_code": None,
    },
    "OpenCodeReasoning": {
        "id": "a",
        "input": QUESTION,
        "output": THOUGHT,
        "source": "codeforces",
        "license": "cc-by-4.0",
        "dataset": "taco",
        "split": "train",
        "difficulty": "HARD",
        "solution": "print(2)",
    },
    "OpenCodeReasoning-2": {
        "id": "a",
        "question_id": "q",
        "question": QUESTION,
        "r1_generation": THOUGHT,
        "qwq_critique": "",
        "solution": "",
        "source": "codeforces",
        "license": "cc-by-4.0",
        "dataset": "taco",
        "split": "train",
        "difficulty": "HARD",
        "index": "1",
    },
    "s1K-1.1": {
        "solution": "2",
        "question": QUESTION,
        "deepseek_thinking_trajectory": "hm",
        "deepseek_attempt": "so \\boxed{2}",
    },
    "reasoning-from-scratch": {
        "problem": QUESTION,
        "gtruth_answer": "2",
        "message_thinking": "hm",
        "message_content": "so \\boxed{2}",
    },
    "prompt and response": {"prompt": QUESTION, "response": THOUGHT},
    "TRL, texts": {"prompt": QUESTION, "completion": THOUGHT},
    "TRL, messages": {"prompt": CHAT[:1], "completion": CHAT[1:]},
    "TRL, messages in parts, with a system prompt": {
        "prompt": [{"role": "system", "content": [{"type": "text", "text": "Think."}]}, PARTS[0]],
        "completion": PARTS[1:],
    },
    "Alpaca": {"instruction": QUESTION, "input": "", "output": THOUGHT},
}


def source_of(tmp_path: Path, *rows: dict, **more) -> FileSource:
    path = tmp_path / "traces.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return FileSource(path=str(path), **more)


@pytest.mark.parametrize("name", ROWS)
def test_a_published_row_gives_its_question_thinking_and_answer(tmp_path, name):
    (trace,) = read_traces(source_of(tmp_path, ROWS[name]))
    assert isinstance(trace, PublishedTrace), trace
    assert trace.question == QUESTION
    (reply,) = trace.replies
    assert (reply.reasoning, reply.answer, reply.finish_reason) == ("hm", "so \\boxed{2}", "stop")
    assert trace.domain is (Domain.CODE if name.startswith("OpenCode") else Domain.MATH)


OPENR1 = {
    "problem": QUESTION,
    "solution": "2",
    "answer": "2",
    "problem_type": "Algebra",
    "question_type": "math-word-problem",
    "source": "olympiads",
    "uuid": "u",
    "is_reasoning_complete": [True, False, True],
    "generations": [THOUGHT, "<think>\nwait, wait", THOUGHT],
    "correctness_math_verify": [True, False, False],
    "correctness_llama": None,
    "finish_reasons": None,
    "correctness_count": 1,
    "messages": CHAT,
}


def test_every_generation_of_a_row_is_a_reply_with_what_the_row_says_of_it(tmp_path):
    (trace,) = read_traces(source_of(tmp_path, OPENR1))
    told = [(r.reasoning, r.finish_reason, r.published_verdict) for r in trace.replies]
    assert told == [("hm", "stop", "right"), ("wait, wait", "length", "wrong"), ("hm", "stop", "wrong")]


def test_a_generation_that_is_null_is_no_reply_of_the_word_none(tmp_path):
    row = OPENR1 | {"generations": [None, THOUGHT]}
    (trace,) = read_traces(source_of(tmp_path, row))
    told = [(r.reasoning, r.answer, r.published_verdict) for r in trace.replies]
    assert told == [("", "", "right"), ("hm", "so \\boxed{2}", "wrong")]


def test_the_input_of_an_instruction_belongs_to_the_question(tmp_path):
    (trace,) = read_traces(source_of(tmp_path, {"instruction": "Add.", "input": "1+1", "output": THOUGHT}))
    assert trace.question == "Add.\n\n1+1"


@pytest.mark.parametrize(
    ("text", "split"),
    [
        (THOUGHT, ("hm", "so \\boxed{2}", "stop")),
        ("hm</think>2", ("hm", "2", "stop")),  # the prompt opened the thinking
        ("<think>a</think>b<think>c</think>2", ("a</think>b<think>c", "2", "stop")),
        ("<think>hm", ("hm", "", "length")),
        ("Well. <think>hm", ("hm", "", "length")),
        ("<think>\n<think>\nhm\n</think>\n</think>\n2", ("hm", "2", "stop")),
        ("It is 2.", ("", "It is 2.", "stop")),
        (SKY, ("hm", "so \\boxed{2}", "stop")),
        (SKY.removesuffix("<|end_of_solution|>"), ("hm", "so \\boxed{2}", "length")),
        ("<|begin_of_thought|>hm", ("hm", "", "length")),
        ("hm<|end_of_thought|>2", ("hm", "2", "stop")),
        ("<|begin_of_thought|>hm<|end_of_thought|>2", ("hm", "2", "stop")),
    ],
)
def test_a_reply_is_split_at_its_tags(text, split):
    reply = split_reply(text)
    assert (reply.reasoning, reply.answer, reply.finish_reason) == split


BAD = {
    "two questions": ({"messages": [CHAT[0], *CHAT]}, "not_single_turn"),
    "two answers": ({"messages": [*CHAT, CHAT[1]]}, "not_single_turn"),
    "no answer": ({"messages": CHAT[:1]}, "not_single_turn"),
    "a greeting before the question": ({"messages": CHAT[::-1]}, "not_single_turn"),
    "an empty answer": ({"messages": [CHAT[0], {"role": "assistant", "content": " "}]}, "empty_field"),
    "no list": ({"messages": "hi"}, "wrong_type"),
    "an image in a question": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, CHAT[1]]},
        "not_text",
    ),
    "a part without text": ({"messages": [{"role": "user", "content": [{"type": "text"}]}, CHAT[1]]}, "missing_field"),
    "a part whose text is null": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}, CHAT[1]]},
        "wrong_type",
    ),
    "no part": ({"messages": [{"role": "user", "content": []}, CHAT[1]]}, "empty_field"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_row_that_is_no_trace_is_dropped_by_name(tmp_path, name):
    row, reason = BAD[name]
    good, dropped = read_traces(source_of(tmp_path, ROWS["messages"], row))
    assert isinstance(good, PublishedTrace)
    assert isinstance(dropped, Dropped)
    assert (dropped.reason, "traces.jsonl:2" in dropped.detail) == (reason, True)


@pytest.mark.parametrize("left", [{"prompt": QUESTION}, {"question": QUESTION}, {"response": THOUGHT}])
def test_a_later_pair_without_a_part_is_dropped(tmp_path, left):
    good, dropped = read_traces(source_of(tmp_path, {"prompt": QUESTION, "response": THOUGHT}, left))
    assert isinstance(good, PublishedTrace)
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "missing_field"


def test_a_completion_of_several_messages_is_dropped(tmp_path):
    prompt, completion = CHAT[:1], [CHAT[1], *CHAT]
    (dropped,) = read_traces(source_of(tmp_path, {"prompt": prompt, "completion": completion}))
    assert isinstance(dropped, Dropped)
    assert dropped.reason == "not_single_turn"


def test_rows_of_no_known_format_are_refused_with_the_keys_of_the_first(tmp_path):
    source = source_of(tmp_path, {"q": "1+1", "a": "2"})
    with pytest.raises(ConfigError, match=r"traces.jsonl:1: no known format of traces has the keys \['a', 'q'\]"):
        check_traces(source)


def test_a_file_of_which_no_row_is_a_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"none of the first 1 rows can be used as a trace; .*expected one assistant"):
        check_traces(source_of(tmp_path, {"messages": CHAT[:1]}))


def test_a_format_of_prompts_cannot_be_named_for_traces(tmp_path):
    with pytest.raises(ConfigError, match="row_schema = 'verl' is for prompts; the format of traces is detected"):
        check_traces(source_of(tmp_path, ROWS["messages"], row_schema="verl"))


def test_of_several_formats_that_fit_the_one_with_the_most_keys_is_taken():
    for row in [*ROWS.values(), OPENR1]:
        format_of(row, where="x")  # raises if two fit equally well
    assert format_of(dict.fromkeys(["messages", "prompt", "response"]), where="x").name == "prompt_response"
    assert format_of(dict.fromkeys(["messages", "conversations"]), where="x").name == "messages"
    both = "problem generations is_reasoning_complete question deepseek_thinking_trajectory deepseek_attempt"
    with pytest.raises(ConfigError, match=r"could be any of openr1_math, s1k; remove the columns of all but one"):
        format_of(dict.fromkeys(both.split()), where="x")


@pytest.mark.skipif(not DATA.is_dir(), reason="the real data sets are not beside this checkout")
@pytest.mark.parametrize(
    ("path", "num_rows", "num_whole"), [("cot-r1-small/rasbt_r1.json", 5, 5), ("cot-skythought", 610, 255)]
)
def test_real_traces_can_be_read(path, num_rows, num_whole):
    traces = list(read_traces(FileSource(path=str(DATA / path))))
    replies = [reply for trace in traces if isinstance(trace, PublishedTrace) for reply in trace.replies]
    assert (len(traces), len(replies)) == (num_rows, num_rows)
    assert sum(reply.finish_reason == "stop" and bool(reply.reasoning) for reply in replies) == num_whole
