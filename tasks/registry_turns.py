"""Take turns with the processes of other workspaces and machines that use one MLflow server.

MLflow has neither locks nor a conditional write. But it numbers the versions of a registered model one by one and never
gives a number twice, not even after the version was deleted. So a version of a model made for this is a ticket, the
lowest number has the turn, and its holder deletes it at the end (Lamport's bakery algorithm, with the server in place
of the clerk). Since numbers are never reused, ending the turn of a dead process cannot end another one's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from klear_core.errors import ResourceError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger(__name__)

TURN_S = 120.0
"""Longest turn, as others watch it; it is a dozen requests, of which each may take 10 s on a slow server."""
_POLL_S = 0.2
_HOLDER = "klear.holder"
_ABOUT = "Klear's lock for the champion: a version exists only while a process changes it (docs/promotion.md)."


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A ticket whose turn it is."""

    client: MlflowClient
    name: str
    """Registered model whose versions are the tickets."""
    number: int

    def check(self) -> None:
        """Return if it is still this ticket's turn; ResourceError if others have ended it as too long."""
        first = _first(self.client, self.name)
        if first is None or int(first.version) != self.number:
            raise ResourceError(
                f"this process took longer than {TURN_S:.0f} s to change the champion, so other processes "
                "continued without it; run it again"
            )


@contextmanager
def take_turn(client: MlflowClient, name: str, *, holder: str, turn_s: float) -> Iterator[Turn]:
    """Wait for the turn and end it at the exit. Errors of MLflow are not translated.

    `holder` names the caller, who must make sure that no other living process goes by that name: an older ticket of
    the same holder was left by a killed process, and is deleted. Others' turns are ended after `turn_s` of watching,
    so that machines need not agree on the time.
    """
    number = _draw(client, name, holder)
    turn = Turn(client=client, name=name, number=number)
    try:
        _wait(turn, holder=holder, turn_s=turn_s)
        yield turn
    finally:
        _end(client, name, number)


def _draw(client: MlflowClient, name: str, holder: str) -> int:
    """Return the number of a new ticket."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name, description=_ABOUT)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = client.create_model_version(name, source="klear:/turn", tags={_HOLDER: holder})
    return int(made.version)


def _wait(turn: Turn, *, holder: str, turn_s: float) -> None:
    # Each ticket before this one may take `turn_s`, counted from when it is first seen to have the turn.
    watched, since = 0, time.monotonic()
    while True:
        first = _first(turn.client, turn.name)
        if first is None or int(first.version) >= turn.number:
            return  # our turn, or others ended it while this process was stopped, which the next check finds
        number, other = int(first.version), first.tags.get(_HOLDER, "?")
        if number != watched:
            log.info("waiting for the registry: %s changes the champion", other)
            watched, since = number, time.monotonic()
        is_late = time.monotonic() - since > turn_s
        if is_late:
            log.warning("%s did not finish changing the champion within %.0f s: going on without it", other, turn_s)
        if is_late or other == holder:
            _end(turn.client, turn.name, number)
            continue
        time.sleep(_POLL_S)


def _first(client: MlflowClient, name: str) -> ModelVersion | None:
    """Return the ticket whose turn it is; None if there is none."""
    tickets = client.search_model_versions(f"name = '{name}'")
    return min(tickets, key=lambda ticket: int(ticket.version), default=None)


def _end(client: MlflowClient, name: str, number: int) -> None:
    """Delete a ticket, unless another process has."""
    from mlflow.exceptions import MlflowException

    try:
        client.delete_model_version(name, str(number))
    except MlflowException as e:
        if e.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
