import asyncio

import pytest
from fake_engine import END_ID, FakeAnswer, FakeEngine, scripted

from klear_core.errors import ResourceError
from klear_core.generate.engine import SamplingParams

PARAMS = SamplingParams(
    num_samples=2, temperature=1.0, top_p=1.0, top_k=0, repetition_penalty=1.0, max_new_tokens=10, seed=3
)


def test_texts_become_bytes_and_an_end_token() -> None:
    engine = FakeEngine(scripted({"1+1": "2"}))
    (first, second) = asyncio.run(engine.generate(b"1+1", PARAMS))
    assert first == second
    assert (first.text, first.token_ids, first.finish_reason) == ("2", (ord("2"), END_ID), "stop")
    assert engine.requests == [(tuple(b"1+1"), PARAMS)]


def test_long_answers_are_cut_at_the_budget() -> None:
    engine = FakeEngine(lambda *_: FakeAnswer(text="x" * 10))
    (answer, _) = asyncio.run(engine.generate(b"?", PARAMS))
    assert (answer.text, answer.finish_reason, len(answer.logps)) == ("x" * 10, "length", 10)


def test_exceptions_of_the_script_are_raised() -> None:
    engine = FakeEngine(lambda *_: ResourceError("boom"))
    with pytest.raises(ResourceError, match="boom"):
        asyncio.run(engine.generate(b"?", PARAMS))


def test_answers_wait_for_their_event_and_get_the_version_of_then() -> None:
    async def main() -> None:
        ready = asyncio.Event()
        engine = FakeEngine(lambda *_: FakeAnswer(text="late", after=ready))
        request = asyncio.create_task(engine.generate(b"?", PARAMS))
        await asyncio.sleep(0)
        await engine.load_weights({}, version=5)
        assert not request.done()
        ready.set()
        assert {c.policy_versions for c in await request} == {(5,) * 5}
        assert engine.loads == [({}, 5)]

    asyncio.run(main())
