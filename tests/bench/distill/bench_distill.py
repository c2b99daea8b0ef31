"""How much of what a server can give the HTTP teacher gets, beside a client that was told the server's best concurrency.

The server streams every reply at the speed of a large model and serves 64 requests at its best. Of two servers one answers
429 to more; the other takes them and slows down more than in proportion. The teacher starts at eight requests and knows
neither. The first 12 s, in which it searches, and the end, when requests run out, are not measured: a distillation takes
days. Replies take 0.7 to 6 s instead of minutes, and the teacher's window is a tenth of its default. The server measures
its own use, so that other work on the machine counts for neither side.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib.metadata import version

import httpx

from klear_core.config.distill import HttpTeacherConfig
from klear_core.distill.teachers.http_teacher import HttpTeacher
from klear_core.types import Difficulty, Domain, MathReference, Problem, TeacherReply

CAPACITY = 64
NUM_REPLIES, SEARCH_S = 700, 12.0
FIRST_TOKEN_S, PIECE_S, TOKENS_A_PIECE = 0.2, 0.1, 10
MIN_PIECES, MAX_PIECES = 6, 60
TARGET = 0.95


def measure() -> list[dict[str, object]]:
    """Return the share of both servers' best that both clients get, and their ratios."""
    versions = {"httpx": version("httpx"), "python": sys.version.split()[0]}
    measures: list[dict[str, object]] = []
    for kind in ("refusing", "slowing"):
        told, found = _share(kind, _run_bare_client), _share(kind, _run_teacher)
        ratio = found / told
        entries = [
            (f"distill/share_told/{kind}", told, "of the server", "-", True),
            (f"distill/share_found/{kind}", found, "of the server", f">= {TARGET}", found >= TARGET),
            (f"distill/found_over_told/{kind}", ratio, "times", f">= {TARGET}", ratio >= TARGET),
        ]
        measures += [
            {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions}
            for n, v, u, t, ok in entries
        ]
    return measures


def _share(kind: str, client: Callable[[str], Coroutine[None, None, None]]) -> float:
    with _server(kind) as url:
        asyncio.run(client(url))
        return float(httpx.get(f"{url}/share").json()["share"])


async def _run_teacher(url: str) -> None:
    settings = {"base_url": url, "model": "bench", "runtime": {"probe_s": 1.0, "first_backoff_s": 0.2}}
    teacher = HttpTeacher(HttpTeacherConfig.model_validate(settings))
    problem = Problem(
        problem_id="bench",
        source="bench",
        domain=Domain.MATH,
        question="?",
        reference=MathReference(answers=("4",)),
        difficulty=Difficulty.HARD,
    )
    samples = [teacher.sample(problem, sample_idx=i, seed=0) for i in range(NUM_REPLIES)]
    results = [sample.result for sample in await asyncio.gather(*samples)]
    await teacher.close()
    assert all(isinstance(result, TeacherReply) for result in results)


async def _run_bare_client(url: str) -> None:
    slots = asyncio.Semaphore(CAPACITY)
    client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None))

    async def request(seed: int) -> None:
        async with slots, client.stream("POST", f"{url}/chat/completions", json={"seed": seed}) as response:
            async for _ in response.aiter_lines():
                pass

    await asyncio.gather(*(request(i * 7919) for i in range(NUM_REPLIES)))
    await client.aclose()


@contextmanager
def _server(kind: str) -> Iterator[str]:
    """Run the server in a process of its own."""
    command = [sys.executable, __file__, kind]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.communicate()


class _Server:
    """Streams replies of 60 to 600 tokens, whose length follows from the seed."""

    def __init__(self, kind: str) -> None:
        self.is_refusing = kind == "refusing"
        self.num_active = 0
        self._changed_at: float | None = None
        self._first_at, self._used_s = 0.0, 0.0
        self.share = 0.0
        """Use of the server from the end of the search to the start of the last request."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                if head.startswith(b"GET"):
                    body = json.dumps({"share": self.share}).encode()
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
                    continue
                lengths = [line[15:] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
                await self._answer(json.loads(await reader.readexactly(int(lengths[0]))), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client is done
        finally:
            writer.close()

    def _change_active(self, change: int) -> None:
        now = time.monotonic()
        if self._changed_at is None:
            self._changed_at = self._first_at = now
        n = self.num_active
        # 64 requests run at full speed; above that, each at (64 / n) ** 1.5 of it
        counted_from = self._first_at + SEARCH_S
        if now > counted_from:
            elapsed_s = now - max(self._changed_at, counted_from)
            self._used_s += elapsed_s * min(n / CAPACITY, (CAPACITY / max(n, 1)) ** 0.5)
            if change > 0:
                self.share = self._used_s / (now - counted_from)
        self._changed_at = now
        self.num_active += change

    async def _answer(self, body: dict[str, int], writer: asyncio.StreamWriter) -> None:
        if self.is_refusing and self.num_active >= CAPACITY:
            writer.write(b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull")
            return
        self._change_active(1)
        try:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            num_pieces = MIN_PIECES + body["seed"] % (MAX_PIECES - MIN_PIECES)
            due = time.monotonic() + FIRST_TOKEN_S
            for _ in range(num_pieces):
                # by the clock: what a busy machine delays is caught up with
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                _send(writer, {"choices": [{"index": 0, "delta": {"reasoning_content": " word" * TOKENS_A_PIECE}}]})
                due += PIECE_S * max(1.0, self.num_active / CAPACITY) ** 1.5
            _send(writer, {"choices": [{"index": 0, "delta": {"content": "4"}, "finish_reason": "stop"}]})
            usage = {"prompt_tokens": 9, "completion_tokens": num_pieces * TOKENS_A_PIECE}
            _send(writer, {"choices": [], "usage": usage})
            writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            await writer.drain()
        finally:
            self._change_active(-1)


def _send(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    data = b"data: " + json.dumps(event).encode() + b"\n\n"
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


async def _run_server(kind: str) -> None:
    server = await asyncio.start_server(_Server(kind).serve, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_run_server(sys.argv[1]))
