"""A client of Prefect's API that fails fast: one short attempt a request. Prefect's own client retries for minutes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient


@contextmanager
def fail_fast_client(*, timeout_s: float) -> Iterator[SyncPrefectClient]:
    """Yield a client that tries every request once; in the block Prefect's retries are off, for this thread only."""
    from prefect.client.orchestration import get_client
    from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

    with (
        temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}),  # a context variable: other threads keep their retries
        get_client(sync_client=True, httpx_settings={"timeout": timeout_s}) as client,
    ):
        yield client
