"""Eight stalls: each is named within seconds of the limit, with the object that is waited for and what it did last.

`-s` prints the table of docs/cluster.md, whose limit is 60 s; here it is 1 s.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from distill_fakes import FakeJudge, FakeTeacher, make_problem
from fake_engine import FakeAnswer, FakeEngine
from rl_builders import problem, rl_config, tiny_base
from test_gang_stall import FakeRank, gang_of, stops

from klear_core.artifacts.bucket import Bucket
from klear_core.config.distill import DistillConfig
from klear_core.distill.collect import collect_traces
from klear_core.generate.pool import EnginePool
from klear_core.metrics import NullTelemetry
from klear_core.prompts import load_tokenizer
from klear_core.rl.loop import sync_weights
from klear_core.rl.rollout import Collector, RolloutClient
from klear_core.rl.stream import PromptStream
from klear_core.train.base_model import model_folder
from klear_core.types import Outcome, Problem, Verdict
from klear_core.waits import loop_watched, tell_after
from tasks.delivery import Connection, Limits, StageRun, Undelivered

pytest.importorskip("ray")
from klear_core.cluster.ray_calls import within

LIMIT_S = 1.0
PATIENCE_S = 60.0  # on a busy machine: no stall lasts that long, for each ends once its line is there
RIGHT = Verdict(outcome=Outcome.SCORED, score=1.0)


@pytest.fixture(autouse=True)
def _soon() -> Iterator[None]:
    before = tell_after(LIMIT_S)
    yield
    tell_after(before)


class Heard(logging.Handler):
    """Keeps when each line was logged, and tells when there is one that matches."""

    def __init__(self, pattern: str) -> None:
        super().__init__(logging.WARNING)
        self.pattern = pattern
        self.is_named = threading.Event()
        self.lines: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = record.getMessage()
        self.lines.append((time.monotonic(), line))
        if re.search(self.pattern, line):
            self.is_named.set()

    def seconds_until(self, pattern: str, since: float) -> float | None:
        return next((at - since for at, line in self.lines if re.search(pattern, line)), None)


@contextmanager
def named(pattern: str, stall: str) -> Iterator[Heard]:
    """Assert that the block's stall is named in time by a line that matches."""
    heard, logger = Heard(pattern), logging.getLogger()
    logger.addHandler(heard)
    began = time.monotonic()
    try:
        yield heard
    finally:
        logger.removeHandler(heard)
    seconds = heard.seconds_until(pattern, began)
    assert seconds is not None, heard.lines
    assert LIMIT_S <= seconds <= LIMIT_S + PATIENCE_S
    line = next(line for _, line in heard.lines if re.search(pattern, line))
    print(f"| {stall} | {seconds:.1f} s | {line} |")


def until_named(heard: Heard, waits: Callable[[], Any]) -> None:
    """Let something wait until it is named."""

    async def drive() -> None:
        waiting = asyncio.ensure_future(waits())
        deadline = time.monotonic() + PATIENCE_S
        while not (heard.is_named.is_set() or waiting.done()) and time.monotonic() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(drive())


def quietly(call: Callable[[], object]) -> None:
    """Call without an error: what the stalled side says after the test concerns nobody."""
    with suppress(Exception):
        call()


async def never(*_: object, **__: object) -> Any:
    await asyncio.sleep(3600)


async def says_right(_problem: Problem, _response: str) -> Verdict:
    return RIGHT


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return load_tokenizer(model_folder(tiny_base(tmp_path_factory.mktemp("base"))))


class Hangs(FakeEngine):
    name, is_queued, limit = "rollout actor 0", False, 64
    generate = never


def collected(tokenizer: object, engine: Any, judge: Any, status: Callable[[], str]) -> Any:
    stream = PromptStream([problem(f"q{i}") for i in range(4)], seed=0)
    sampler = RolloutClient(engine, judge, tokenizer, rl_config(), seed=0, engine_status=status)
    return Collector(sampler, stream, rl_config()).collect()


def test_an_engine(tokenizer: object) -> None:
    async def drive() -> None:
        pool = EnginePool([cast("Any", Hangs(lambda *_: FakeAnswer(text="")))], lambda *_: None)
        pool._slots[0].is_up = True
        await collected(tokenizer, pool, says_right, pool.status)

    with named(r"waiting for \d+ answers from rollout actor 0 \(\d+ requests\).* \(no answer yet\)", "engine") as heard:
        until_named(heard, drive)


def test_a_judge(tokenizer: object) -> None:
    engine = FakeEngine(lambda *_: FakeAnswer(text="right"))
    with named(
        r"waiting for 0 answers .*last answer \d+ s ago\), \d+ verdicts from the judges \(no verdict", "judge"
    ) as heard:
        until_named(heard, lambda: collected(tokenizer, engine, never, lambda: "the fake engine"))


def test_a_weight_transfer() -> None:
    with named("waiting for rollout actor 3 to receive part 2 of 4", "weight transfer, one engine") as heard:
        until_named(
            heard, lambda: within(never(), 600, "rollout actor 3", "receive part 2 of 4 of the weights of version 7")
        )


def test_weights_that_the_engines_do_not_take() -> None:
    class Learner:
        async def weights(self) -> Path:
            return Path()

    class Engines:
        load_weights = never

    with named("waiting for the engines to load the weights of version 7", "weight transfer, all") as heard:
        until_named(heard, lambda: sync_weights(cast("Any", Learner()), cast("Any", Engines()), None, version=7))


def test_a_rank() -> None:
    async def drive() -> None:
        await gang_of(FakeRank(stops)).wait([asyncio.sleep(3600)], "do a step", stall_timeout_s=600)

    with named(r"waiting for the learner to do a step; last done: learner rank 0: micro-batch 1", "rank") as heard:
        until_named(heard, drive)


def test_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("s3fs")
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and never answers
        host, port = silent.getsockname()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "klear")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        with named(rf"waiting for the store s3://klear/x \(host {host}:{port}\) to answer a request", "store") as heard:
            reading = threading.Thread(target=quietly, args=(lambda: Bucket("s3://klear/x").read("a"),), daemon=True)
            reading.start()
            heard.is_named.wait(PATIENCE_S)


def test_mlflow(tmp_path: Path) -> None:
    released = threading.Event()

    class Silent:
        def open(self, _record: object) -> None:
            released.wait(600)

    class Record:
        metrics_file, run_id, stage = str(tmp_path / "metrics.jsonl"), "r", "rl"

    connection = Connection(cast("Any", Silent()), Undelivered(tmp_path), "http://mlflow:5000", limits=Limits())
    run = StageRun(connection, cast("Any", Record()))
    with named(
        "waiting for MLflow at http://mlflow:5000 to take .*; last: nothing yet; 0 values are unsent", "MLflow"
    ) as heard:
        sending = threading.Thread(target=quietly, args=(run._send,), daemon=True)
        sending.start()
        heard.is_named.wait(PATIENCE_S)
    released.set()


def test_a_teacher(tmp_path: Path) -> None:
    class Silent(FakeTeacher):
        sample = never

    def waits() -> Any:
        return collect_traces(
            DistillConfig(),
            cast("Any", Silent()),
            FakeJudge().judge_async,
            [make_problem(i) for i in range(3)],
            seed=0,
            workdir=tmp_path,
            telemetry=NullTelemetry(),
        )

    with named(r"waiting for replies of the teacher.*; last: 0 problems done, 0 tokens", "teacher") as heard:
        until_named(heard, waits)


def test_the_driver() -> None:
    async def busy() -> None:
        with loop_watched("engines, ranks and judges wait for it"):
            await asyncio.sleep(0)
            deadline = time.monotonic() + PATIENCE_S
            while not heard.is_named.is_set() and time.monotonic() < deadline:
                time.sleep(0.05)  # noqa: ASYNC251  # the stall

    with named(r"waiting for the driver, whose event loop is busy in busy \(test_stalls.py:\d+\)", "driver") as heard:
        asyncio.run(busy())
