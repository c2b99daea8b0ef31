"""Sample from Llama, Qwen2 and Qwen3 models: requests share one running batch in a worker thread until they end.

A completion depends on the weights, the prompt, `params.seed` and the sample's index, and on nothing else in the batch.
In float32 on CPU this was seen to hold to the last bit; elsewhere a token can differ where two are within rounding of a
tie.
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch

from klear_core.config.evaluate import MAX_BATCH_SIZE, TorchEngineConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.decoder.batch import Batch, BatchRow, EndedRow
from klear_core.generate.decoder.decode import NativeStep
from klear_core.generate.decoder.decoder import Decoder
from klear_core.generate.decoder.shape import read_shape
from klear_core.generate.engine import OnTokens, SamplingParams, WeightSource, check_room, scored
from klear_core.hf_config import FolderTokenizer
from klear_core.seeding import seed_for
from klear_core.types import Completion

T = TypeVar("T")


@dataclass(eq=False, slots=True, kw_only=True)
class _Request:
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    on_tokens: OnTokens | None = None
    reply: Future[list[Completion]] = field(default_factory=Future)
    completions: dict[int, Completion] = field(default_factory=dict)
    is_cancelled: bool = False


@dataclass(eq=False, slots=True, kw_only=True)
class _Load:
    weights: WeightSource
    version: int
    reply: Future[None] = field(default_factory=Future)


_Command = _Request | _Load | None  # None wakes the worker: drop what was cancelled, or stop


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sample:
    request: _Request
    index: int


class TorchEngine:
    """An `InferenceEngine` and `TrainableEngine` that needs only torch; may be used from any event loop."""

    def __init__(
        self,
        model_folder: Path,
        cfg: TorchEngineConfig,
        *,
        num_threads: int,
        version: int = 0,
        window: int | None = None,
    ) -> None:
        """Load the model. Raise ConfigError if it is of another family, or not a plain one.

        `num_threads` is set for all of torch in this process; `window` raises the positions of the folder's config.
        """
        shape = read_shape(model_folder, window=window)
        device = torch.device(device_name(cfg))
        self.version = version
        self._model = Decoder(shape, dtype=getattr(torch, cfg.dtype), device=device)
        self._model.load(model_folder)
        self._tokenizer = FolderTokenizer(model_folder)
        self._batch: Batch[_Sample] = Batch(
            self._model,
            NativeStep.of(self._model),
            stop_ids=self._tokenizer.stop_ids,
            max_rows=cfg.runtime.max_batch_size or MAX_BATCH_SIZE[device.type],
            version=version,
        )
        self._waiting: deque[BatchRow[_Sample]] = deque()
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._has_listener = False
        """Whether a request ever wanted to know tokens; without one, no step looks for them."""
        self._lock = threading.Lock()
        self._unanswered: set[Future[list[Completion]] | Future[None]] = set()
        self._why_closed: BaseException | None = None
        # a daemon thread: an engine that was never closed must not keep the process from exiting
        self._worker = threading.Thread(target=self._work, args=(num_threads,), name="torch-engine", daemon=True)
        self._worker.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[Completion]:
        """Return `params.num_samples` completions, in sample order.

        Raise ValueError if the prompt is empty, too long, or has ids outside the vocabulary.
        """
        return await self.stream(prompt_ids, params, None)

    async def stream(
        self, prompt_ids: Sequence[int], params: SamplingParams, on_tokens: OnTokens | None
    ) -> list[Completion]:
        """Return what `generate` does; call `on_tokens` after each step with the tokens of each unfinished sample."""
        self._check_prompt(prompt_ids, params)
        request = _Request(prompt_ids=tuple(prompt_ids), params=params, on_tokens=on_tokens)
        self._submit(request)
        try:
            return await asyncio.wrap_future(request.reply)
        except asyncio.CancelledError:
            # the worker drops these rows when it next reads the queue
            request.is_cancelled = True
            with self._lock:
                self._unanswered.discard(request.reply)
            self._commands.put(None)
            raise

    async def load_weights(self, weights: WeightSource, *, version: int) -> None:
        """Overwrite the weights in place. Running samples continue with the new ones, on a recomputed KV cache."""
        load = _Load(weights=weights, version=version)
        self._submit(load)
        await asyncio.wrap_future(load.reply)

    async def close(self) -> None:
        """Stop the worker after its current step. Unanswered requests fail with ResourceError."""
        with self._lock:
            self._why_closed = self._why_closed or ResourceError("the torch engine was closed")
        self._commands.put(None)  # wakes a worker that has nothing to do
        await asyncio.to_thread(self._worker.join)

    def _submit(self, command: _Request | _Load) -> None:
        with self._lock:
            # under the lock: a request is refused here or, once it is listed, failed by `_fail_unanswered`
            if self._why_closed is not None:
                raise ResourceError("the torch engine has stopped") from self._why_closed
            # a running future cannot be cancelled, so the worker can always set its result
            command.reply.set_running_or_notify_cancel()
            self._unanswered.add(command.reply)
        self._commands.put(command)

    def _fail_unanswered(self, failure: BaseException | None) -> None:
        with self._lock:
            self._why_closed = failure or self._why_closed
            for reply in self._unanswered:
                error = ResourceError("the torch engine stopped before it answered")
                error.__cause__ = self._why_closed
                reply.set_exception(error)
            self._unanswered.clear()

    def _check_prompt(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        shape = self._model.shape
        # what is scored needs no room for another token
        check_room(len(prompt_ids), params, shape.max_len + bool(params.scored_ids))
        lowest, highest = min(*prompt_ids, *params.scored_ids, 0), max(*prompt_ids, *params.scored_ids, 0)
        if lowest < 0 or highest >= shape.vocab_size:
            raise ValueError(
                f"prompt token ids reach from {lowest} to {highest}, the vocabulary from 0 to {shape.vocab_size - 1}"
            )

    # The methods below run in the worker thread only.

    def _work(self, num_threads: int) -> None:
        torch.set_num_threads(num_threads)
        try:
            self._serve()
        finally:
            self._fail_unanswered(sys.exception())

    def _serve(self) -> None:
        # inference mode is set per thread
        with torch.inference_mode():
            while self._handle_commands():
                self._admit()
                if self._batch.num_running:
                    for ended in self._batch.step():
                        self._deliver(ended)
                    if self._has_listener:
                        self._tell()

    def _handle_commands(self) -> bool:
        """Handle all commands in the queue, and wait for one if there is nothing else to do. False ends the worker."""
        is_idle = not self._waiting and not self._batch.num_running
        while self._why_closed is None:
            try:
                command = self._commands.get(block=is_idle)
            except queue.Empty:
                return True
            is_idle = False  # only the first `get` may block
            match command:
                case _Request():
                    if command.params.scored_ids:
                        self._score(command)
                        continue
                    self._has_listener |= command.on_tokens is not None
                    self._waiting += self._rows(command)
                case _Load():
                    self._load(command)
                case None:
                    self._waiting = deque(row for row in self._waiting if not row.owner.request.is_cancelled)
                    # active rows leave between steps; the last ones move into their places
                    self._batch.drop(lambda sample: sample.request.is_cancelled)
        return False

    def _rows(self, request: _Request) -> list[BatchRow[_Sample]]:
        return [
            BatchRow(
                owner=_Sample(request=request, index=i),
                prompt_ids=request.prompt_ids,
                key=seed_for(request.params.seed, "generate/sample", i),  # independent of the batch
                params=request.params,
                # prompt included, and never past the model's window
                end=min(len(request.prompt_ids) + request.params.max_new_tokens, self._model.shape.max_len),
            )
            for i in range(request.params.num_samples)
        ]

    def _score(self, request: _Request) -> None:
        """Answer a request to score tokens, between two steps of the running batch."""
        if request.is_cancelled:
            return
        params = request.params
        tokens_T = torch.tensor([*request.prompt_ids, *params.scored_ids], device=self._model.device)
        logp_N, top_id_NK, top_logp_NK = self._model.logps(
            tokens_T, len(request.prompt_ids), temperature=params.temperature or 1.0, num_top=params.num_top
        )
        answer = scored(
            params,
            logp_N.tolist(),
            version=self.version,
            top_ids=top_id_NK.flatten().tolist(),
            top_logps=top_logp_NK.flatten().tolist(),
        )
        self._answer(request.reply, [answer])

    def _admit(self) -> None:
        """Fill the batch, by at least an eighth of it at a time unless fewer rows wait.

        A prefill for each row that ends would cost more than it gains.
        """
        free = self._batch.max_rows - self._batch.num_running
        if self._waiting and free >= min(len(self._waiting), max(1, self._batch.max_rows // 8)):
            self._batch.add([self._waiting.popleft() for _ in range(min(free, len(self._waiting)))])

    def _tell(self) -> None:
        """Tell the tokens so far of samples whose request wants to know them."""
        for owner, token_ids in self._batch.unfinished(lambda sample: sample.request.on_tokens is not None):
            assert owner.request.on_tokens is not None
            owner.request.on_tokens(owner.index, token_ids)

    def _deliver(self, ended: EndedRow[_Sample]) -> None:
        request = ended.row.owner.request
        request.completions[ended.row.owner.index] = Completion(
            text=self._tokenizer.decode(ended.token_ids, ended.finish_reason),
            token_ids=ended.token_ids,
            logps=ended.logps,
            finish_reason=ended.finish_reason,
            policy_versions=ended.versions,
        )
        # samples end in any order and are returned by index
        if len(request.completions) == request.params.num_samples:
            self._answer(request.reply, [request.completions[i] for i in range(request.params.num_samples)])

    def _load(self, load: _Load) -> None:
        try:
            self._model.load(load.weights)
        except ConfigError as error:  # the weights do not fit; the engine continues with the old ones
            with self._lock:
                self._unanswered.discard(load.reply)
            load.reply.set_exception(error)
            return
        # any other error ends the worker, because it may come when some weights are new
        self.version = load.version
        # the cached keys and values come from the old weights
        self._batch.recompute_cache(load.version)
        self._answer(load.reply, None)

    def _answer(self, reply: Future[T], value: T) -> None:
        with self._lock:
            self._unanswered.discard(reply)
        reply.set_result(value)


def device_name(cfg: TorchEngineConfig) -> str:
    """Return the device that these settings mean in this process."""
    if cfg.runtime.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return cfg.runtime.device
