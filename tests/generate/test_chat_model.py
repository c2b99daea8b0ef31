"""Chat shows a response from its beginning, also where the template has put the beginning into the prompt."""

import asyncio

from klear_core.generate.engine import FakeAnswer, FakeEngine
from klear_core.generate.factory import ChatModel, ChatParams
from klear_core.prompts import build_byte_tokenizer


def test_thinking_that_the_prompt_opens_is_shown_with_its_tag() -> None:
    tokenizer = build_byte_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\\n", "assistant\\n<think>\\n")
    model = ChatModel(engine=FakeEngine(lambda *_: FakeAnswer(text="4</think>4")), tokenizer=tokenizer, window=1000)
    (said,) = asyncio.run(model.ask("2 + 2?", ChatParams()))
    assert said.text == "<think>\n4</think>4"
