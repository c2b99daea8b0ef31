"""Request teacher samples from OpenAI-compatible chat endpoints: DeepSeek's API, or R1 served by vLLM or SGLang."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from random import Random

import httpx

from klear_core.config.distill import HttpTeacherConfig, TeacherEndpoint
from klear_core.distill.fleet import Fleet, OverBudgetError, Refusals, RefusedByAllError
from klear_core.distill.http_attempt import FATAL_STATUSES, Attempt, FailedTry, rejection
from klear_core.distill.keys import NO_KEYS, BlockKeys, request_headers
from klear_core.distill.teacher import (
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
        """Return which endpoints were given up in this run, and why."""
        gone = [endpoint for endpoint in self._fleet.endpoints if endpoint.removed_because]
        return tuple(f"{e.cfg.base_url} was given up: {e.removed_because}" for e in gone)

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
        ids = (problem.problem_id, sample_idx)
        body = self._body(problem, seed_for(seed, "distill/teacher", *ids))
        # Waits of their own, so that samples that failed together do not come back together.
        jitter = Random(seed_for(seed, "distill/backoff", *ids))  # noqa: S311
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
                failure = TeacherFailure(reason=OVER_BUDGET, detail="distill.teacher.runtime.budget is spent")
                return TeacherSample(result=failure, usage=usage)
            usage += attempt.usage
            if isinstance(outcome, TeacherReply):
                return TeacherSample(result=outcome, usage=usage)
            # A full server that answers other requests is no failure of this sample, which waits as long as it takes.
            num_counted += outcome.counts and not (outcome.is_refusal and attempt.others_succeeded)
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
                f"the teacher {self.name!r} at {urls} cannot be reached after {num_tries} tries ({last.detail}); "
                "check that the server runs, distill.teacher.base_url and the network, then run again: "
                "all replies so far are kept"
            )
        refused = f"; refused by {refusals}" if refusals.said else ""
        return TeacherFailure(reason=last.reason, detail=f"{last.detail}, {num_tries} tries{refused}")

    def _body(self, problem: Problem, seed: int) -> dict[str, object]:
        body: dict[str, object] = {
            "messages": [{"role": "user", "content": question_of(problem, self.cfg)}],
            "temperature": self.cfg.temperature,
            "top_p": self.cfg.top_p,
            "max_tokens": self.cfg.max_tokens,
            "stream": True,
        }
        if self.cfg.send_seed:
            body["seed"] = seed % 2**_SEED_BITS
        return body


def check_endpoints(cfg: HttpTeacherConfig, keys: BlockKeys = NO_KEYS) -> None:
    """Request the list of models of every endpoint once; log a warning for one that does not answer beside others.

    Raise TeacherError if no response comes from any within seconds, TeacherRejectsError if an API key is rejected. Any
    other response passes, because not every endpoint has such a list.
    """
    silent = []
    for endpoint in cfg.runtime.endpoints:
        try:
            _check_endpoint(endpoint, keys)
        except TeacherRejectsError:
            raise
        except TeacherError as e:
            silent.append(e)
    num_all = len(cfg.runtime.endpoints)
    if len(silent) == num_all > 1:
        raise TeacherError(f"no server answers at any of its {num_all} endpoints; the last: {silent[-1]}")
    if len(silent) == num_all:
        raise silent[0]
    for error in silent:
        log.warning("distill: %s; the other endpoints get its requests until it answers", error)


def _check_endpoint(endpoint: TeacherEndpoint, keys: BlockKeys) -> None:
    url = endpoint.base_url.rstrip("/") + "/models"
    try:
        # The body, which may be anything and have no end, is not read.
        with httpx.stream("GET", url, headers=request_headers(endpoint, keys), timeout=_CHECK_TIMEOUT_S) as response:
            status = response.status_code
    except (httpx.TransportError, httpx.InvalidURL) as e:
        raise TeacherError(
            f"no server answers at distill.teacher.base_url = {endpoint.base_url!r}: "
            f"tried GET {url} for {_CHECK_TIMEOUT_S:g} s ({type(e).__name__}: {e}); "
            "start the teacher, or correct its address"
        ) from e
    if status in (401, 403):
        raise TeacherRejectsError(f"GET {url}: HTTP {status}: {FATAL_STATUSES[status]}")
