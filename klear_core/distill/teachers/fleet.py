"""Choose an endpoint for every request: one that works and has a free slot, in proportion to the weights."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import httpx
from pydantic import SecretStr

from klear_core.config.evaluate import BudgetConfig, ChatEndpoint, ChatRuntime
from klear_core.distill.teachers.teacher import Usage
from klear_core.errors import ConfigError
from klear_core.generate.http_engine import ConcurrencyLimit

# ---- budget ----
# Keep what a distillation spends within its budget.


class Budget:
    """Adds up tokens and cost. The longest reply of every open request is reserved, so that the sum never exceeds the
    budget."""

    def __init__(self, cfg: BudgetConfig) -> None:
        self._cfg = cfg
        self._spent, self._reserved = Usage(), Usage()

    def spend(self, usage: Usage) -> None:
        """Count what was used."""
        self._spent += usage

    def fits(self, request: Usage) -> bool:
        """Return whether a request fits beside what is spent and reserved."""
        return self._is_within(self._spent + self._reserved + request)

    def will_never_fit(self, request: Usage) -> bool:
        """Return whether a request would not fit even if all open ones cost nothing."""
        return not self._is_within(self._spent + request)

    def reserve(self, request: Usage) -> None:
        """Reserve the most that a request can use."""
        self._reserved += request

    def release(self, request: Usage) -> None:
        """Return the reservation of a finished request."""
        self._reserved = Usage(
            input_tokens=self._reserved.input_tokens - request.input_tokens,
            output_tokens=self._reserved.output_tokens - request.output_tokens,
            cost=self._reserved.cost - request.cost,
        )

    def _is_within(self, usage: Usage) -> bool:
        cfg = self._cfg
        has_tokens = cfg.max_tokens is None or usage.tokens <= cfg.max_tokens
        # a billionth of slack, because adding and subtracting reservations in floating point leaves rounding errors
        has_money = cfg.max_cost is None or usage.cost <= cfg.max_cost * (1 + 1e-9)
        return has_tokens and has_money


def cost_of(endpoint: ChatEndpoint, *, input_tokens: int, output_tokens: int) -> float:
    """Return the price of tokens at an endpoint, in the currency of its prices."""
    return (input_tokens * endpoint.input_price + output_tokens * endpoint.output_price) / 1e6


# ---- keys ----
# Find the API key of an endpoint, in an environment variable or among the keys read from Prefect blocks.


BlockKeys = Mapping[str, SecretStr]
"""API keys by the name of the Prefect block that holds them. They are read outside the core, which knows no Prefect."""
NO_KEYS: BlockKeys = MappingProxyType({})
MAKE_BLOCK = "make a block of type Secret with this name in Prefect's UI (Blocks), on the server that the run uses"


def request_headers(cfg: ChatEndpoint, keys: BlockKeys = NO_KEYS) -> dict[str, str]:
    """Return the headers that carry the key. Raise ConfigError, without the key, if there is none or it is unusable.

    `keys` has those that are in Prefect blocks.
    """
    if cfg.api_key_env:
        named, place = f"api_key_env = {cfg.api_key_env!r}", "environment variable"
        key, remedy = os.environ.get(cfg.api_key_env, "").strip(), "export it and run again"
    elif cfg.api_key_block:
        named, place = f"api_key_block = {cfg.api_key_block!r}", "Prefect block"
        secret = keys.get(cfg.api_key_block)
        key, remedy = secret.get_secret_value().strip() if secret else "", MAKE_BLOCK
    else:
        return {}
    if not key:
        raise ConfigError(f"{cfg.base_url}, {named}: this {place} is not set; {remedy}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"{cfg.base_url}, {named}: this {place} holds characters that no API key has")
    return {"Authorization": f"Bearer {key}"}


# ---- fleet ----


log = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 3
"""Failures without a success between them after which an endpoint is left out."""
_LONGEST_LEFT_OUT = 16
"""Most times `left_out_s` for which an endpoint is left out."""
_SECRET_CHARS = 16
"""Length from which a key is masked in replies, too. Shorter ones are placeholders such as vLLM's `EMPTY`, and words
that a program may use."""
_MIN_BEGINNING = 6
"""Shortest beginning of a key that is masked."""


_UNREAD_TO_NAME = 2
"""Replies in the same shape that cannot be used, after which the endpoint is named."""
_REFUSALS_TO_GIVE_UP = 3
"""Requests refused by an endpoint that accepted none, and accepted by others, after which it gets no more."""


class OverBudgetError(Exception):
    """Raised if the budget has no room for a request at any endpoint, even after all open requests have ended."""


class RefusedByAllError(Exception):
    """Raised if every endpoint that is left and answers has refused a request as wrong."""


class Endpoint:
    """One server: its connections, its requests in flight, and how it fares."""

    def __init__(self, cfg: ChatEndpoint, runtime: ChatRuntime, *, model: str, now: float, keys: BlockKeys) -> None:
        self.cfg = cfg
        self.model = cfg.model or model
        self.url = cfg.base_url.rstrip("/") + "/chat/completions"
        self.limit = ConcurrencyLimit(
            minimum=runtime.min_concurrency, maximum=runtime.max_concurrency, window_s=runtime.probe_s, now=now
        )
        self.in_flight = 0
        self.num_accepted = 0
        """Requests in flight that the server has begun to answer."""
        self.num_streaming = 0
        """Requests in flight that have received their first token."""
        self.can_stream = True
        """False once a reply came in one piece."""
        self.num_succeeded = 0
        self.replies_in_window = 0
        self.has_accepted = False
        """Whether it has begun to answer a request in this run."""
        self.num_refused = 0
        """Requests that it refused as wrong before it accepted any, and that another endpoint accepted."""
        self.failures_in_a_row = 0
        self.resume_at = now
        """No request is sent before this time."""
        self.removed_because = ""
        """The reason for which it gets no more requests in this run; empty if it gets them."""
        self.unusable: Counter[str] = Counter()
        """Replies whose shape cannot be used, by what is wrong with it."""
        self.takes_stream_options = True
        self._runtime = runtime
        self._times_left_out = 0
        self._headers = request_headers(cfg, keys)
        self._key = self._headers.get("Authorization", "").removeprefix("Bearer ")
        self._key_or_beginning = _beginnings_of(self._key)
        self.client = httpx.AsyncClient(
            headers=self._headers,
            timeout=httpx.Timeout(None, connect=runtime.connect_timeout_s),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=runtime.max_concurrency),
        )

    def redact(self, text: str) -> str:
        """Return an error's text without the API key, which servers may echo.

        The beginning of a key is removed too, because the text may have been cut in the middle of it.
        """
        return self._key_or_beginning.sub("[key]", text) if self._key else text

    def redact_reply(self, text: str) -> str:
        """Return a reply's text without the API key. A placeholder is no secret, and stays."""
        return text.replace(self._key, "[key]") if len(self._key) >= _SECRET_CHARS else text

    def can_take(self, now: float) -> bool:
        """Return whether a request may be sent now."""
        return not self.removed_because and now >= self.resume_at and self.in_flight < self.limit.value

    @property
    def may_accept(self) -> bool:
        """Return whether it is in use and has answered in this run, or has not failed often enough to be left out."""
        return not self.removed_because and (self.has_accepted or self.failures_in_a_row < _FAILURES_IN_A_ROW)

    def pause(self, seconds: float, now: float) -> None:
        """Send nothing for some time: the server asked for it."""
        self.resume_at = max(self.resume_at, now + seconds)

    def succeeded(self) -> None:
        """Count a whole reply."""
        self.num_succeeded += 1
        self.replies_in_window += 1
        self.failures_in_a_row = 0
        self._times_left_out = 0

    def count_unusable(self, defect: str) -> None:
        """Count a whole reply in a shape that cannot be used; log the second of a kind."""
        # Up to the example that may follow, which differs from reply to reply.
        kind = defect.partition(": ")[0]
        self.unusable[kind] += 1
        if self.unusable[kind] == _UNREAD_TO_NAME:
            log.warning("replies of %s are paid for and cannot be used: %s", self.cfg.base_url, defect)

    @property
    def notes(self) -> tuple[str, ...]:
        """Return the kinds of unusable replies that it sent more than once."""
        return tuple(
            f"{self.cfg.base_url}: {num} replies were paid for and cannot be used: {kind}; their text is in `unused`"
            for kind, num in self.unusable.items()
            if num >= _UNREAD_TO_NAME
        )

    def failed(self, now: float, detail: str = "") -> None:
        """Count a failure, with what happened; leave the endpoint out after several in a row."""
        self.failures_in_a_row += 1
        # Requests that were in flight when it was left out fail later; they do not leave it out for longer.
        if self.failures_in_a_row % _FAILURES_IN_A_ROW == 0 and now >= self.resume_at:
            seconds = self._runtime.left_out_s * min(2**self._times_left_out, _LONGEST_LEFT_OUT)
            self._times_left_out += 1
            log.warning(
                "%s failed %d times in a row and gets no requests for %g s%s",
                self.cfg.base_url, self.failures_in_a_row, seconds, f"; the last: {detail}" if detail else "",
            )  # fmt: skip
            self.pause(seconds, now)
            self.limit.restart(now)


def _beginnings_of(key: str) -> re.Pattern[str]:
    """Return a pattern for a key and its beginnings, the longest first."""
    shortest = min(len(key), _MIN_BEGINNING)
    # A pattern takes its first alternative that fits, so the longest beginning must come first.
    return re.compile("|".join(re.escape(key[:length]) for length in range(len(key), shortest - 1, -1)))


@dataclass(slots=True, eq=False)
class Refusals:
    """The endpoints that refused one request as wrong (400, 422), with what they said."""

    said: dict[Endpoint, str] = field(default_factory=dict)
    is_counted: bool = False
    """Whether they count against these endpoints, because another one has accepted the request."""

    def __str__(self) -> str:
        return "; ".join(f"{endpoint.cfg.base_url}: {detail}" for endpoint, detail in self.said.items())


@dataclass(slots=True, eq=False)
class _Waiter:
    """A request that waits for an endpoint."""

    future: asyncio.Future[Endpoint]
    input_tokens: int
    avoid: Endpoint | None
    refused_by: Collection[Endpoint]


class Fleet:
    """Assigns requests to endpoints, first come, first served, within each endpoint's limit and the common budget."""

    def __init__(self, runtime: ChatRuntime, *, model: str, max_tokens: int, keys: BlockKeys) -> None:
        now = time.monotonic()
        self.endpoints = [Endpoint(cfg, runtime, model=model, now=now, keys=keys) for cfg in runtime.endpoints]
        self.budget = Budget(runtime.budget)
        self._max_tokens = max_tokens
        self._waiters: deque[_Waiter] = deque()
        self._refused: list[_Waiter] = []
        """Requests that some endpoint has refused. They wait for another one, and hold up no other request."""
        self._timer: asyncio.TimerHandle | None = None

    @property
    def working(self) -> list[Endpoint]:
        """Return the endpoints that were not given up."""
        return [endpoint for endpoint in self.endpoints if not endpoint.removed_because]

    async def acquire(
        self, input_tokens: int, *, avoid: Endpoint | None = None, refused_by: Collection[Endpoint] = ()
    ) -> Endpoint:
        """Wait for an endpoint and take one of its slots; `release` it afterwards.

        `input_tokens` is the most that the prompt can have. A retry, which names the endpoint to `avoid` if another has
        room, goes before new requests. Endpoints that refused the request do not get it again. Raise OverBudgetError if
        the budget will have no room, RefusedByAllError if no other endpoint is left.
        """
        waiter = _Waiter(asyncio.get_running_loop().create_future(), input_tokens, avoid, refused_by)
        if refused_by:
            self._refused.append(waiter)
        elif avoid is None:
            self._waiters.append(waiter)
        else:
            self._waiters.appendleft(waiter)
        self.dispatch()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            # The slot may have been assigned just before the caller was cancelled: nobody else would return it.
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(waiter.future.result(), input_tokens)
            raise

    def accepted(self, endpoint: Endpoint, refusals: Refusals) -> None:
        """Count that an endpoint accepted a request; give up endpoints that refused it and accept none."""
        endpoint.has_accepted = True
        if refusals.is_counted:
            return
        refusals.is_counted = True
        for other, detail in refusals.said.items():
            if other.has_accepted or other.removed_because:
                continue  # an endpoint that accepts other requests has a reason to refuse this one
            other.num_refused += 1
            if other.num_refused >= _REFUSALS_TO_GIVE_UP:
                self.give_up(other, f"it refuses requests that other endpoints accept ({detail})")
                self.dispatch()  # requests may wait for this endpoint alone

    def give_up(self, endpoint: Endpoint, reason: str) -> None:
        """Send no more requests to an endpoint in this run, and say so if others are left."""
        endpoint.removed_because = reason
        if self.working:
            log.warning("%s was given up: %s", endpoint.cfg.base_url, reason)

    def release(self, endpoint: Endpoint, input_tokens: int) -> None:
        """Give a slot back."""
        endpoint.in_flight -= 1
        self.budget.release(self._most(endpoint, input_tokens))
        self.dispatch()

    def count_tokens(self, endpoint: Endpoint, num_tokens: int) -> None:
        """Count tokens as they arrive, and adapt the endpoint's limit when its window is over."""
        limit = endpoint.limit
        limit.count_tokens(num_tokens)
        now = time.monotonic()
        # Whole replies are too rare for a window of seconds: without a stream it lasts for one round of them.
        has_round = endpoint.can_stream or endpoint.replies_in_window >= limit.value
        if limit.is_window_over(now) and has_round:
            endpoint.replies_in_window = 0
            is_full = endpoint.in_flight >= limit.value and bool(self._waiters or self._refused)
            num_waiting = endpoint.in_flight - endpoint.num_streaming
            # above a limit that was lowered, the window measures the old one
            is_within = endpoint.in_flight <= limit.value
            is_settled = is_within and (not endpoint.can_stream or num_waiting <= max(2, endpoint.in_flight // 10))
            limit.end_window(now, is_full=is_full, is_settled=is_settled)
            self.dispatch()

    def dispatch(self) -> None:
        """Give free slots to the waiting requests, in order."""
        now = time.monotonic()
        self._refused = [waiter for waiter in self._refused if not self._is_served(waiter, now)]
        # Only the first may be served: behind shorter prompts a long one might never fit into the budget.
        while self._waiters and self._is_served(self._waiters[0], now):
            self._waiters.popleft()

    def _is_served(self, waiter: _Waiter, now: float) -> bool:
        """Give a request a slot if there is one; return whether it waits no more."""
        if waiter.future.done():
            return True
        # A request that was refused does not wait for an endpoint that is down since the start of the run.
        if waiter.refused_by and not any(e.may_accept and e not in waiter.refused_by for e in self.endpoints):
            waiter.future.set_exception(RefusedByAllError())
            return True
        # Prices differ: what is too little for one endpoint can be enough for another, always for one that is free.
        most = {e: self._most(e, waiter.input_tokens) for e in self.working if e not in waiter.refused_by}
        if most and all(map(self.budget.will_never_fit, most.values())):
            waiter.future.set_exception(OverBudgetError())
            return True
        # Endpoints without room wait for open requests, which release what they reserved and do not use.
        ready = [e for e in most if e.can_take(now) and self.budget.fits(most[e])]
        if not ready:
            self._wake_when_resumed(now)
            return False
        # The least loaded for its weight; the one to avoid only if no other is ready.
        endpoint = min(ready, key=lambda e: (e is waiter.avoid, (e.in_flight + 1) / e.cfg.weight))
        endpoint.in_flight += 1
        self.budget.reserve(most[endpoint])
        waiter.future.set_result(endpoint)
        return True

    async def close(self) -> None:
        """Close all connections."""
        if self._timer:
            self._timer.cancel()
        for endpoint in self.endpoints:
            await endpoint.client.aclose()

    def _wake_when_resumed(self, now: float) -> None:
        """Dispatch again when the next paused endpoint may be used."""
        # No request ends when a pause does, so nothing else would call `dispatch` then.
        paused = [e.resume_at - now for e in self.working if e.resume_at > now]
        if self._timer:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(min(paused), self.dispatch) if paused else None

    def _most(self, endpoint: Endpoint, input_tokens: int) -> Usage:
        cost = cost_of(endpoint.cfg, input_tokens=input_tokens, output_tokens=self._max_tokens)
        return Usage(input_tokens=input_tokens, output_tokens=self._max_tokens, cost=cost)
