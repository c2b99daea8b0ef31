"""Create a process group of the learner and one engine, apart from torch's own, and wait for its operations.

Timeouts are enforced here, by polling on the CPU. NCCL's `wait` only makes the GPU wait, and its timeout ends the
process; gloo cannot abort a pending operation at once.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from klear_core.generate.engine import WeightOffer

POLL_S = 0.002  # between two looks at work that is pending
_NCCL_ENV = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""Environment in which NCCL's watchdog reports the errors of a new group, but leaves the process alive."""
_ENV_LOCK = threading.Lock()


class Group:
    """The process group of an engine and the learner.

    Holds the only reference to torch's group, because dropping the last one waits for the group's threads.
    """

    def __init__(self, backend: Any) -> None:
        self._backend = [backend]  # a list, so that `close` and `abort` can take the only reference out

    def broadcast(self, data: Tensor) -> Any:
        """Start a broadcast of the learner's bytes; returns the pending work."""
        return self._backend[0].broadcast(data, 0)

    def barrier(self, device: torch.device) -> Any:
        """Start a barrier, so that no process leaves before all have everything; returns the pending work."""
        # a reduction is a barrier: its result needs a number from everyone
        return self._backend[0].allreduce([torch.ones(1, device=device)])

    def close(self) -> None:
        """Close the group; nothing may be pending."""
        self._backend.pop().shutdown()

    def abort(self) -> None:
        """Abort the group in a background thread, because gloo's abort waits for a stuck peer until gloo's timeout."""
        threading.Thread(target=lambda: self._backend.pop().abort(), daemon=True).start()


def start_joining_group(store: Store, offer: WeightOffer, *, rank: int) -> Future[Group]:
    """Join the group in a daemon thread, because no backend reliably times out.

    A join that takes too long is abandoned with its thread.
    """
    device, future = device_of(offer), Future[Group]()

    def join() -> None:
        try:
            future.set_result(Group(_new_backend(store, offer, rank, device)))
        except BaseException as error:  # noqa: BLE001  # raised again where the group is waited for
            future.set_exception(error)

    threading.Thread(target=join, daemon=True).start()
    return future


def wait_for_group(joining: Future[Group], deadline: float) -> Group:
    """Return the group once this process has joined it. Raise RuntimeError if it has not by the deadline."""
    try:
        return joining.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise RuntimeError("the peer did not join the process group within the timeout") from None


def wait_for_work(work: Any, deadline: float) -> None:
    """Wait until torch has done the work. Raise RuntimeError if it failed, or if the deadline passes."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("the peer did not complete the operation within the timeout")
        time.sleep(POLL_S)
    work.wait()  # returns at once; raises the error that the work ended with


def _new_backend(store: Store, offer: WeightOffer, rank: int, device: torch.device) -> Any:
    """Return a process group that is not registered with torch.distributed, so it is unaffected by other groups.

    The type is Any, because torch's stubs lack the collectives. The group's own timeout is longer than the deadlines
    kept here; it only cleans up.
    """
    rendezvous = PrefixStore(f"{offer.key}/{offer.engine}", store)
    timeout = timedelta(seconds=2 * offer.timeout_s)
    if offer.backend == "gloo":
        from torch.distributed.distributed_c10d import ProcessGroupGloo

        return ProcessGroupGloo(rendezvous, rank, 1 + offer.num_ranks, timeout)
    # Imported here, because a CPU build of torch has none.
    from torch.distributed.distributed_c10d import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout
    with nccl_env():
        group: Any = ProcessGroupNCCL(rendezvous, rank, 1 + offer.num_ranks, options)
    # otherwise the first broadcast would connect, without a deadline
    group.eager_connect_single_device(device)
    return group


@contextmanager
def nccl_env() -> Iterator[None]:
    """Set the variables under which new NCCL groups never end the process; torch reads them once per group."""
    with _ENV_LOCK:  # the environment belongs to all threads
        before = {name: os.environ.get(name) for name in _NCCL_ENV}
        os.environ.update(_NCCL_ENV)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def device_of(offer: WeightOffer) -> torch.device:
    """Return the device that the tensors of a transfer are on in this process."""
    return torch.device("cuda", torch.cuda.current_device()) if offer.backend == "nccl" else torch.device("cpu")
