"""Keep the champion in MLflow's model registry: a version for each promotion, and an alias that moves.

Facts are tags of versions, written before the alias moves, so that a process killed anywhere leaves what the next one
completes. Processes of one workspace take turns by a file lock, workspaces of one server by tickets. Nothing is
uploaded: a version refers to the model's artifact.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from pydantic import ValidationError

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import Champion, WorkspaceConfig
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError, ResourceError
from klear_core.pipeline.graph import workspace_root
from tasks.mlflow_backend import Refused, Unreachable, mlflow_client, server_name, translated
from tasks.tracking import tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

# ---- records ----


class Promotion(Settings):
    """A decision that a model becomes champion, as the registry keeps it."""

    model: str
    """Artifact of the model, `kind/fingerprint`."""
    model_uri: str
    evaluation: str
    evaluation_uri: str
    decision: str
    """Artifact of the decision, `kind/fingerprint`."""
    decision_uri: str
    run: str
    """Flow run that decided."""
    over: int | None
    """Version that was champion; None for the first champion."""


class Rollback(Settings):
    """Record of a rollback: who took the alias away from a version, when, and why."""

    by: str
    why: str
    to: int
    """Version that became champion again."""
    at: str
    """Time in UTC, ISO 8601. It is written last: with it the record is complete."""

    @property
    def sentence(self) -> str:
        """The facts in words."""
        return f"rolled back to version {self.to} by {self.by} at {self.at}: {self.why}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A version of the registered model that Klear made."""

    number: int
    promotion: Promotion
    promoted_at: str
    """Time at which the alias moved here, in UTC; empty if it never did."""
    rollback: Rollback | None

    def as_champion(self) -> Champion:
        """Return what a decision needs to know of it."""
        return Champion(
            version=self.number,
            model=self.promotion.model,
            model_uri=self.promotion.model_uri,
            evaluation=self.promotion.evaluation,
            evaluation_uri=self.promotion.evaluation_uri,
            run=self.promotion.run,
        )


# ---- turns of workspaces and machines that use one MLflow server ----
# MLflow has neither locks nor a conditional write. But it numbers the versions of a registered model one by one and
# never gives a number twice, not even after the version was deleted. So a version of a model made for this is a ticket,
# the lowest number has the turn, and its holder deletes it at the end (Lamport's bakery algorithm, with the server in
# place of the clerk). Since numbers are never reused, ending the turn of a dead process cannot end another one's.


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
    seen, since = 0, time.monotonic()
    while True:
        first = _first(turn.client, turn.name)
        if first is None or int(first.version) >= turn.number:
            return  # our turn, or others ended it while this process was stopped, which the next check finds
        number, other = int(first.version), first.tags.get(_HOLDER, "?")
        if number != seen:
            log.info("waiting for the registry: %s changes the champion", other)
            seen, since = number, time.monotonic()
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


# ---- registry ----


ALIAS = "champion"
_ABSENT = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE")
"""MLflow's codes for a registered model, and for an alias, that does not exist."""
_EXISTS = "RESOURCE_ALREADY_EXISTS"


class Registry:
    """The champions of one registered model."""

    def __init__(self, client: MlflowClient, name: str, *, lock: Path, server: str, turn_s: float = TURN_S) -> None:
        self._client = client
        self._name = name
        self._lock = lock
        self._server = server
        self._turn_s = turn_s

    def champion(self) -> Version | None:
        """Return the version that has the alias; None if none has it."""
        from mlflow.exceptions import MlflowException

        with self._errors():
            try:
                found = self._client.get_model_version_by_alias(self._name, ALIAS)
            except MlflowException as e:
                if e.error_code in _ABSENT:
                    return None
                raise
        return self._read(found)

    def versions(self) -> list[Version]:
        """Return all versions that Klear made, oldest first."""
        with self._errors():
            found = list(self._client.search_model_versions(f"name = '{self._name}'"))
        ours = [version for version in found if "klear.model" in version.tags]
        return sorted(map(self._read, ours), key=lambda version: version.number)

    def rival_of(self, model: str) -> Version | None:
        """Return the champion to compare a model with; for the champion itself, the one that it replaced.

        So a stage that is run again after its model became champion has the same rival and makes the same decision.
        """
        champion = self.champion()
        if champion is None or champion.promotion.model != model:
            return champion
        over = champion.promotion.over
        return next((version for version in self.versions() if version.number == over), None)

    def withdrawn(self, model: str) -> str:
        """Return why a model was rolled back; empty if it was not."""
        found = [v.rollback.sentence for v in self.versions() if v.promotion.model == model and v.rollback]
        return found[-1] if found else ""

    def promote(self, promotion: Promotion) -> bool:
        """Make a model champion, unless another one has become so since the decision; return whether it is champion.

        Repeating the call changes nothing.
        """
        with self._turn() as turn:
            if not self._may_follow(promotion):
                return False
            version = self._version_of(promotion)
            # A person can move the alias in MLflow at any time, so look again right before it moves.
            if not self._may_follow(promotion):
                return False
            self._move_alias(version.number, turn)
            if not version.promoted_at:
                self._tag(version.number, {"klear.promoted_at": datetime.now(UTC).isoformat(timespec="seconds")})
        return True

    def roll_back(self, *, by: str, why: str) -> tuple[Version, Version]:
        """Give the alias back to the former champion; return the version that lost it and the one that has it.

        ConfigError if there is no champion, or no former one, or if the champion changes while this waits its turn.
        """
        champion = self.champion()
        if champion is None:
            raise ConfigError(f"{self._name!r} has no champion, so there is nothing to roll back")
        with self._turn() as turn:
            # The caller means the champion that it saw, not one that replaced it while this process waited.
            self._refuse_another(champion)
            former = self._former(champion)
            now = datetime.now(UTC).isoformat(timespec="seconds")
            rollback = Rollback(by=by, why=why, at=now, to=former.number)
            # The tags come first: if this process is killed between, the model is not promoted again.
            self._tag(champion.number, {f"klear.rolled_back_{name}": str(value) for name, value in rollback})
            self._move_alias(former.number, turn)
        return champion, former

    def _former(self, champion: Version) -> Version:
        """Return the newest version before the champion that nobody rolled back; ConfigError if there is none.

        A version keeps the alias if its rollback is killed before the alias moves, so that others may follow it.
        """
        versions = {version.number: version for version in self.versions()}
        over = champion.promotion.over
        while over is not None and over in versions and versions[over].rollback:
            over = versions[over].promotion.over
        if over is None or over not in versions:
            raise ConfigError(
                f"version {champion.number} of {self._name!r} has no former champion to go back to: "
                + ("it was the first" if over is None else f"version {over} is gone from the registry")
            )
        return versions[over]

    def _refuse_another(self, expected: Version) -> None:
        """Raise ConfigError if another version has the alias."""
        found = self.champion()
        if found is None or found.number != expected.number:
            now = f"version {found.number} ({found.promotion.model})" if found else "none"
            raise ConfigError(
                f"the champion of {self._name!r} changed meanwhile, from version {expected.number} to {now}, so "
                "nothing was rolled back; `klear champion` shows the new one: repeat the command to roll that one back"
            )

    def _may_follow(self, promotion: Promotion) -> bool:
        """Return whether the champion is the one that the decision was about, or already the new model.

        False, too, if the new model was rolled back since.
        """
        if self.withdrawn(promotion.model):
            return False
        champion = self.champion()
        if champion is not None and champion.promotion.model == promotion.model:
            return True
        return (champion.number if champion else None) == promotion.over

    def _version_of(self, promotion: Promotion) -> Version:
        """Return the version of this decision, or of the champion that is this model; create it if it is missing."""
        champion = self.champion()
        if champion is not None and champion.promotion.model == promotion.model:
            return champion
        for version in self.versions():
            if (version.promotion.model, version.promotion.decision) == (promotion.model, promotion.decision):
                return version
        from mlflow.exceptions import MlflowException

        tags = {f"klear.{name}": str(value) for name, value in promotion if value is not None}
        with self._errors():
            try:
                self._client.create_registered_model(self._name)
            except MlflowException as e:
                if e.error_code != _EXISTS:
                    raise
            # A server refuses a source that is a local folder of its clients, so the source names the artifact.
            created = self._client.create_model_version(self._name, source=f"klear:/{promotion.model}", tags=tags)
        return self._read(created)

    def _move_alias(self, number: int, turn: Turn) -> None:
        with self._errors():
            turn.check()
            self._client.set_registered_model_alias(self._name, ALIAS, str(number))
            turn.check()  # again: if the request took too long, another process may have moved the alias meanwhile

    def _tag(self, number: int, tags: Mapping[str, str]) -> None:
        with self._errors():
            for key, value in tags.items():
                self._client.set_model_version_tag(self._name, str(number), key, value)

    def _read(self, found: ModelVersion) -> Version:
        tags: dict[str, str] = found.tags
        facts = {name: tags.get(f"klear.{name}") for name in Promotion.model_fields}
        try:
            promotion = Promotion.model_validate(facts)
        except ValidationError as e:
            raise ConfigError(
                f"version {found.version} of {self._name!r} in MLflow's registry is {ALIAS!r}, but Klear did not "
                "promote it (it lacks tags klear.*); remove the alias, or choose another promote.registered_model"
            ) from e
        rollback = None
        if "klear.rolled_back_at" in tags:
            rollback = Rollback.model_validate(
                {name: tags.get(f"klear.rolled_back_{name}", "0") for name in Rollback.model_fields}
            )
        return Version(
            number=int(found.version),
            promotion=promotion,
            promoted_at=tags.get("klear.promoted_at", ""),
            rollback=rollback,
        )

    @contextmanager
    def _turn(self) -> Iterator[Turn]:
        """Keep all other processes from changing the champion."""
        # Whoever has the file lock is the only living process with this name.
        holder = f"{os.uname().nodename}:{self._lock}"
        with (
            file_lock(self._lock, on_wait=lambda who: log.info("waiting for the registry: %s", who)),
            self._errors(),
            take_turn(self._client, f"{self._name}.lock", holder=holder, turn_s=self._turn_s) as turn,
        ):
            yield turn

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of MLflow to ours: ResourceError for an outage, ConfigError for a refusal."""
        try:
            with translated():
                yield
        except Unreachable as e:
            raise ResourceError(
                f"the model registry of MLflow at {self._server} does not answer: {e}; the champion is not known "
                "without it, so run this again when it does"
            ) from e
        except Refused as e:
            raise ConfigError(f"the model registry of MLflow at {self._server} refuses: {e}") from e


def open_registry(workspace: WorkspaceConfig, name: str) -> Registry:
    """Return the champions of a registered model, in the MLflow that tracks the runs of a workspace."""
    uri, root = tracking_uri(workspace), workspace_root(workspace)
    return Registry(mlflow_client(uri), name, lock=root / "mlflow" / ".champion.lock", server=server_name(uri))


def artifact_name(ref: ArtifactRef) -> str:
    """Return an artifact as `kind/fingerprint`."""
    return f"{ref.kind}/{ref.fingerprint}"


def folder_of(uri: str) -> Path:
    """Return the folder of an artifact's address, for stores on a file system."""
    return Path(unquote(urlparse(uri).path))
