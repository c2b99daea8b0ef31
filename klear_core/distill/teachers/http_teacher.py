"""Request teacher samples from OpenAI-compatible chat endpoints: DeepSeek's API, or R1 served by vLLM or SGLang."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from random import Random

import httpx

from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.evaluate import ChatEndpoint, ChatRuntime
from klear_core.distill.teachers.fleet import (
    NO_KEYS,
    BlockKeys,
    Endpoint,
    Fleet,
    OverBudgetError,
    Refusals,
    RefusedByAllError,
    cost_of,
    request_headers,
)
from klear_core.distill.teachers.reply_stream import BadReplyError, ReplyReader, estimate_tokens
from klear_core.distill.teachers.teacher import (
    OVER_BUDGET,
    TeacherFailure,
    TeacherRejectsError,
    TeacherSample,
    Usage,
    prompt_version_of,
    question_of,
)
from klear_core.errors import TeacherError
from klear_core.seeding import seed_for
from klear_core.types import Problem, TeacherReply

log = logging.getLogger(__name__)

_CHECK_TIMEOUT_S = 5.0
_SEED_BITS = 31  # endpoints accept integers of different widths; 31 bits fit a signed 32-bit one
_REJECTIONS_TO_STOP = 3
"""Number of requests refused as invalid (400, 422) by all endpoints, with none accepted, that stop the stage."""


class HttpTeacher:
    """Streams one request per sample from a fleet of endpoints, with retries of everything that may pass.

    Create it in a running event loop. Raise ConfigError if an API key is missing.
    """

    is_costly = True

    def __init__(self, cfg: HttpTeacherConfig, keys: BlockKeys = NO_KEYS) -> None:
        self.cfg = cfg
        self.name = cfg.model
        self.prompt_version = prompt_version_of(cfg)
        self.retries: Counter[str] = Counter()
        self._num_refused = 0
        """Samples that every endpoint refused."""
        self._fleet = Fleet(cfg.runtime, model=cfg.model, max_tokens=cfg.max_tokens, keys=keys)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return which endpoints were given up in this run, and whose replies cannot be used, and why."""
        gone = [endpoint for endpoint in self._fleet.endpoints if endpoint.removed_because]
        given_up = [f"{e.cfg.base_url} was given up: {e.removed_because}" for e in gone]
        unusable = [note for endpoint in self._fleet.endpoints for note in endpoint.notes]
        return (*given_up, *unusable)

    def count_earlier(self, usage: Usage) -> None:
        """Count what earlier runs of the stage spent against the budget."""
        self._fleet.budget.spend(usage)

    def expect(self, num_samples: int) -> None:
        """Do nothing: no engines run here."""

    async def close(self) -> None:
        """Close all connections."""
        await self._fleet.close()

    async def sample(self, problem: Problem, *, sample_idx: int, seed: int) -> TeacherSample:
        """Return one sample, after as many attempts as needed; all of them send the same seed.

        Raise TeacherError if no endpoint can be reached, TeacherRejectsError if all reject key, address or model, or
        every request.
        """
        own_seed = seed_for(seed, "distill/teacher", problem.problem_id, sample_idx)
        return await self.ask(
            question_of(problem, self.cfg), temperature=self.cfg.temperature, top_p=self.cfg.top_p, seed=own_seed
        )

    async def ask(self, question: str, *, temperature: float, top_p: float, seed: int) -> TeacherSample:
        """Return the reply to a text, or how it failed; raise as `sample` does."""
        body = self._body(question, temperature=temperature, top_p=top_p, seed=seed)
        # Waits of their own, so that samples that failed together do not come back together.
        jitter = Random(seed_for(seed, "distill/backoff"))  # noqa: S311
        usage, avoid, num_tries, num_counted = Usage(), None, 0, 0
        refusals = Refusals()
        while True:
            num_tries += 1
            attempt = Attempt(self.cfg, self._fleet, body, refusals)
            try:
                outcome = await attempt.run(avoid)
            except RefusedByAllError:
                return TeacherSample(result=self._refused(refusals), usage=usage)
            except OverBudgetError:
                failure = TeacherFailure(reason=OVER_BUDGET, detail="the budget is spent")
                return TeacherSample(result=failure, usage=usage)
            usage += attempt.usage
            if isinstance(outcome, TeacherReply):
                return TeacherSample(result=outcome, usage=usage)
            # A full server that answers other requests is no failure of this sample, which waits as long as it takes.
            num_counted += outcome.is_counted and not (outcome.is_refusal and attempt.others_succeeded)
            if outcome.is_final:
                assert attempt.endpoint is not None
                refusals.said[attempt.endpoint] = outcome.detail
                continue  # to another endpoint, at once
            if num_counted >= self.cfg.runtime.max_attempts:
                failure = self._failure(outcome, refusals, num_tries=num_tries)
                return TeacherSample(result=failure, usage=usage)
            self.retries[outcome.reason] += 1
            await asyncio.sleep(self._backoff_s(num_tries, jitter))
            avoid = attempt.endpoint

    def _backoff_s(self, num_tries: int, jitter: Random) -> float:
        """Return a random wait below a bound that doubles with every try ("full jitter")."""
        runtime = self.cfg.runtime
        bound: float = min(runtime.first_backoff_s * 2.0 ** min(num_tries - 1, 30), runtime.max_backoff_s)
        return bound * jitter.random()

    def _refused(self, refusals: Refusals) -> TeacherFailure:
        """Return the failure of a sample that all endpoints refused. Raise TeacherRejectsError if they accept none."""
        self._num_refused += 1
        is_single = len(self._fleet.endpoints) == 1
        detail = next(iter(refusals.said.values())) if is_single else str(refusals)
        if self._num_refused >= _REJECTIONS_TO_STOP and not any(e.has_accepted for e in self._fleet.working):
            urls = [endpoint.url for endpoint in refusals.said]
            raise rejection(self.cfg, urls, "it accepts no request with these settings", detail)
        return TeacherFailure(reason="rejected", detail=detail)

    def _failure(self, last: FailedTry, refusals: Refusals, *, num_tries: int) -> TeacherFailure:
        """Return the sample's failure after the last attempt. Raise TeacherError if no endpoint works at all."""
        endpoints = self._fleet.working
        # An endpoint that answered since its last failure shows that the network works.
        if last.is_unreachable and all(e.failures_in_a_row for e in endpoints):
            urls = ", ".join(e.url for e in endpoints)
            raise TeacherError(
                f"the model {self.name!r} at {urls} cannot be reached after {num_tries} tries ({last.detail}); "
                "check that the server runs, its base_url and the network, then run again: "
                "all replies so far are kept"
            )
        refused = f"; refused by {refusals}" if refusals.said else ""
        return TeacherFailure(reason=last.reason, detail=f"{last.detail}, {num_tries} tries{refused}")

    def _body(self, question: str, *, temperature: float, top_p: float, seed: int) -> dict[str, object]:
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": question}],
            "temperature": temperature,
            "top_p": top_p,
            "max_tokens": self.cfg.max_tokens,
            "stream": True,
        }
        if self.cfg.send_seed:
            body["seed"] = seed % 2**_SEED_BITS
        return body


def check_endpoints(runtime: ChatRuntime, keys: BlockKeys = NO_KEYS) -> None:
    """Request the list of models of every endpoint once; log a warning for one that does not answer beside others.

    Raise TeacherError if no response comes from any within seconds, TeacherRejectsError if an API key is rejected. Any
    other response passes, because not every endpoint has such a list.
    """
    silent = []
    for endpoint in runtime.endpoints:
        try:
            _check_endpoint(endpoint, keys)
        except TeacherRejectsError:
            raise
        except TeacherError as e:
            silent.append(e)
    num_all = len(runtime.endpoints)
    if len(silent) == num_all > 1:
        raise TeacherError(f"no server answers at any of its {num_all} endpoints; the last: {silent[-1]}")
    if len(silent) == num_all:
        raise silent[0]
    for error in silent:
        log.warning("%s; the other endpoints get its requests until it answers", error)


def _check_endpoint(endpoint: ChatEndpoint, keys: BlockKeys) -> None:
    url = endpoint.base_url.rstrip("/") + "/models"
    try:
        # The body, which may be anything and have no end, is not read.
        with httpx.stream("GET", url, headers=request_headers(endpoint, keys), timeout=_CHECK_TIMEOUT_S) as response:
            status = response.status_code
    except (httpx.TransportError, httpx.InvalidURL) as e:
        raise TeacherError(
            f"no server answers at base_url = {endpoint.base_url!r}: "
            f"tried GET {url} for {_CHECK_TIMEOUT_S:g} s ({type(e).__name__}: {e}); "
            "start it, or correct its address"
        ) from e
    if status in (401, 403):
        raise TeacherRejectsError(f"GET {url}: HTTP {status}: {FATAL_STATUSES[status]}")


# ---- http attempt ----
# Send one request to a teacher's endpoint, read the streamed reply, and say how the attempt ended.


_MOST_ERROR_BYTES = 65_536
_USAGE_WAIT_S, _CLOSE_WAIT_S = 10.0, 1.0
"""Seconds to wait after the end of a reply for the token counts, and after these for the end of the response."""
_REFUSED_STATUSES = (429, 503, 529)
"""Statuses of a server that is full; 529 is that of some hosted services."""
_RETRIED_STATUSES = (408, 409, 425)  # besides those of a full server and every other 5xx
FATAL_STATUSES = {
    301: "the address has moved; use the new one as base_url",
    302: "the address redirects; use the other one as base_url",
    307: "the address redirects; use the other one as base_url",
    308: "the address has moved; use the new one as base_url",
    401: "the API key is missing or wrong; check the variable (api_key_env) or the Prefect block "
    "(api_key_block) that holds it",
    402: "the account has no balance left",
    403: "the API key may not use this model",
    404: "no such address or model; check base_url (it ends before /chat/completions) and the name of the model",
    405: "this address takes no chat requests; check base_url",
}
"""Statuses that no retry can change, with the cause and what to check."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedTry:
    """A failed attempt."""

    reason: str
    detail: str
    is_refusal: bool = False
    """Whether the server is full, rather than at fault."""
    is_final: bool = False
    """Whether another attempt at this endpoint cannot help."""
    is_unreachable: bool = False
    is_counted: bool = True
    """Whether it counts towards `max_attempts`."""
    retry_after_s: float = 0.0


class Attempt:
    """One request: takes a slot, reads the stream, counts tokens, and reports success or failure to the endpoint."""

    def __init__(self, cfg: HttpTeacherConfig, fleet: Fleet, body: dict[str, object], refusals: Refusals) -> None:
        self.usage = Usage()
        self.endpoint: Endpoint | None = None
        self.others_succeeded = False
        """Whether the endpoint finished another reply while this attempt ran."""
        self._cfg, self._fleet, self._body, self._refusals = cfg, fleet, body, refusals
        prompt = str(body["messages"])
        self._input_tokens = estimate_tokens(len(prompt))
        self._most_input_tokens = len(prompt.encode(errors="replace"))  # a token has at least one byte
        self._has_stream_options = False
        self._reader = ReplyReader(max_tokens=cfg.max_tokens)

    async def run(self, avoid: Endpoint | None) -> TeacherReply | FailedTry:
        """Return the reply or how the attempt failed. Raise TeacherRejectsError if no endpoint is left.

        Raise RefusedByAllError if all endpoints that are left have refused this request.
        """
        refused_by = self._refusals.said
        endpoint = self.endpoint = await self._fleet.acquire(
            self._most_input_tokens, avoid=avoid, refused_by=refused_by
        )
        sent_at, num_succeeded = time.monotonic(), endpoint.num_succeeded
        outcome: TeacherReply | FailedTry
        try:
            try:
                outcome = await self._request(endpoint)
            # Around all of `_request`: its handlers of timeouts and lost connections end replies too.
            except BadReplyError as e:
                outcome = FailedTry(reason=e.reason, detail=e.detail)
            # Before the slot is released, so that the next request heeds a pause.
            if isinstance(outcome, TeacherReply):
                self._report_success(endpoint, outcome)
            else:
                self._report_failure(endpoint, outcome, sent_at)
        finally:
            # Count before the reservation is released, so that the budget holds; also if the attempt is cancelled.
            self._count_usage(endpoint)
            self._fleet.release(endpoint, self._most_input_tokens)
        self.others_succeeded = endpoint.num_succeeded > num_succeeded
        if isinstance(outcome, TeacherReply):
            self.usage = replace(self.usage, replies=1, **self._reply_marks())
            return outcome
        return replace(outcome, detail=endpoint.redact(outcome.detail))

    def _report_success(self, endpoint: Endpoint, reply: TeacherReply) -> None:
        endpoint.succeeded()
        if reply.defect:
            endpoint.count_unusable(reply.defect)
        if not self._reader.is_stream:
            endpoint.can_stream = False
            self._fleet.count_tokens(endpoint, reply.num_tokens)

    def _report_failure(self, endpoint: Endpoint, outcome: FailedTry, sent_at: float) -> None:
        """Adapt limit and pause of the endpoint to a failed attempt."""
        # The limit is not cut below the number of requests that the server serves now. After a timeout these are the
        # requests with a first token, because such a server queues the others; after a refusal all that it accepted.
        is_waiting = outcome.reason == "timeout"
        now, num_serving = time.monotonic(), endpoint.num_streaming if is_waiting else endpoint.num_accepted
        if outcome.is_final:
            return  # the request is at fault, or the settings are: `Fleet.accepted` counts these if another accepts it
        if outcome.is_refusal:
            endpoint.limit.refuse(num_served=num_serving, sent_at=sent_at, now=now)
        # A server that answers 429, or refuses while it serves other requests, works: only its limit is too high.
        if outcome.reason != "http_429" and not (outcome.is_refusal and num_serving):
            endpoint.failed(now, endpoint.redact(outcome.detail))
        endpoint.pause(min(outcome.retry_after_s, self._cfg.runtime.max_retry_after_s), now)

    async def _request(self, endpoint: Endpoint) -> TeacherReply | FailedTry:
        runtime = self._cfg.runtime
        try:
            async with asyncio.timeout(runtime.first_token_timeout_s) as silence:
                async with self._open(endpoint) as response:
                    if response.status_code == httpx.codes.OK:
                        return await self._read(response, endpoint, silence)
                    return await self._refusal(response, endpoint)
        except TimeoutError:
            if self._reader.is_finished:
                return self._finished()  # only the token counts are missing
            if self._reader.num_pieces:
                detail = f"no token for {runtime.silence_timeout_s:g} s after {self._reader.num_pieces} pieces"
                return FailedTry(reason="silence", detail=detail)
            detail = f"no first token within {runtime.first_token_timeout_s:g} s"
            return FailedTry(reason="timeout", detail=detail, is_refusal=True)
        except (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError) as e:
            return FailedTry(reason="unreachable", detail=f"{type(e).__name__}: {e}", is_unreachable=True)
        except httpx.RequestError as e:
            if self._reader.is_finished:
                return self._finished()
            detail = f"{type(e).__name__}: {e}, after {self._reader.num_pieces} pieces"
            return FailedTry(reason="connection_lost", detail=detail)

    @asynccontextmanager
    async def _open(self, endpoint: Endpoint) -> AsyncIterator[httpx.Response]:
        body = {"model": endpoint.model} | self._body
        self._has_stream_options = endpoint.takes_stream_options
        if self._has_stream_options:
            body["stream_options"] = {"include_usage": True}
        # Counted when it is sent, so that an attempt that is cancelled counts too.
        self.usage = Usage(attempts=1)
        async with endpoint.client.stream("POST", endpoint.url, json=body) as response:
            yield response

    async def _read(self, response: httpx.Response, endpoint: Endpoint, silence: asyncio.Timeout) -> TeacherReply:
        """Read a reply to its end. Only text extends the deadline, so keep-alive lines cannot hide a dead model."""
        reader, loop = self._reader, asyncio.get_running_loop()
        endpoint.num_accepted += 1
        self._fleet.accepted(endpoint, self._refusals)
        try:
            async for chunk in response.aiter_bytes():
                num_pieces, was_finished = reader.num_pieces, reader.is_finished
                reader.feed(chunk)
                num_new = reader.num_pieces - num_pieces
                if num_new:
                    endpoint.num_streaming += num_pieces == 0
                    silence.reschedule(loop.time() + self._cfg.runtime.silence_timeout_s)
                    self._fleet.count_tokens(endpoint, num_new)
                # The text is complete: wait a little for the token counts, then for the end of the response.
                if reader.is_finished and not was_finished:
                    silence.reschedule(loop.time() + min(_USAGE_WAIT_S, self._cfg.runtime.silence_timeout_s))
                if reader.is_done:
                    silence.reschedule(loop.time() + _CLOSE_WAIT_S)
                if reader.is_over_limit:
                    break
        finally:
            endpoint.num_accepted -= 1
            endpoint.num_streaming -= reader.num_pieces > 0
        return self._finished()

    def _finished(self) -> TeacherReply:
        reply = self._reader.finish()
        assert self.endpoint is not None
        redact = self.endpoint.redact_reply
        return replace(
            reply,
            reasoning=redact(reply.reasoning),
            answer=redact(reply.answer),
            defect=self.endpoint.redact(reply.defect),
        )

    async def _refusal(self, response: httpx.Response, endpoint: Endpoint) -> FailedTry:
        """Read an error response. Raise TeacherRejectsError if it is permanent and no other endpoint is left."""
        status = response.status_code
        text = endpoint.redact((await _first_bytes(response)).decode(errors="replace"))
        detail = f"HTTP {status}: {text[:300]!r}"
        if status in FATAL_STATUSES:
            self._fleet.give_up(endpoint, f"{FATAL_STATUSES[status]} ({detail})")
            if not self._fleet.working:
                raise rejection(self._cfg, [endpoint.url], FATAL_STATUSES[status], detail)
            return FailedTry(reason=f"http_{status}", detail=detail)
        if status in _REFUSED_STATUSES or status in _RETRIED_STATUSES or response.is_server_error:
            is_refusal = status in _REFUSED_STATUSES
            wait_s = _retry_after_s(response)
            return FailedTry(reason=f"http_{status}", detail=detail, is_refusal=is_refusal, retry_after_s=wait_s)
        if self._has_stream_options and "stream_options" in text:
            endpoint.takes_stream_options = False  # an older server; tokens are then estimated
            return FailedTry(reason="no_stream_options", detail=detail, is_counted=False)
        return FailedTry(reason="rejected", detail=detail, is_final=True)

    def _count_usage(self, endpoint: Endpoint) -> None:
        """Count the tokens of this attempt; a request that was refused, or never answered, used none."""
        reader = self._reader
        if reader.num_pieces or reader.has_usage:
            given = self._input_tokens if reader.input_tokens is None else reader.input_tokens
            cost = cost_of(endpoint.cfg, input_tokens=given, output_tokens=reader.output_tokens)
            self.usage = replace(self.usage, input_tokens=given, output_tokens=reader.output_tokens, cost=cost)
        self._fleet.budget.spend(self.usage)

    def _reply_marks(self) -> dict[str, int]:
        is_unseeded = self._cfg.send_seed and not self._reader.has_fingerprint
        return {"estimated": int(not self._reader.has_usage), "unseeded": int(is_unseeded)}


def rejection(cfg: HttpTeacherConfig, urls: Sequence[str], cause: str, detail: str) -> TeacherRejectsError:
    """Return the error of a teacher that rejects requests at these addresses for a cause."""
    at = ", ".join(urls)
    return TeacherRejectsError(f"the model {cfg.model!r} at {at} rejects the request: {cause} ({detail})")


async def _first_bytes(response: httpx.Response) -> bytes:
    """Return the start of an error's body; a server may send one without an end."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > _MOST_ERROR_BYTES:
            break
    return body


def _retry_after_s(response: httpx.Response) -> float:
    """Return the seconds to wait from `Retry-After`, given as seconds or a date; 0 if absent or unreadable."""
    value = response.headers.get("Retry-After", "").strip()
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", value):  # the standard knows whole seconds, some servers fractions
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError, OverflowError):  # a year of 20 digits
        return 0.0
