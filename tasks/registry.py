"""Keep the champion in MLflow's model registry: a version for each promotion, and an alias that moves.

Facts are tags of versions, written before the alias moves, so that a process killed anywhere leaves what the next one
completes. Processes of one workspace take turns by a file lock, workspaces of one server by tickets. Nothing is
uploaded: a version refers to the model's artifact.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

from pydantic import ValidationError

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.promote import Champion
from klear_core.errors import ConfigError, ResourceError
from klear_core.pipeline.workspace import workspace_root
from tasks.mlflow_backend import mlflow_client, translated
from tasks.registry_records import Promotion, Rollback, Version
from tasks.registry_turns import TURN_S, Turn, take_turn
from tasks.tracked import Refused, Unreachable, server_name
from tasks.tracking import tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities.model_registry import ModelVersion

log = logging.getLogger(__name__)

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
                self._tag(version.number, {"klear.promoted_at": _now()})
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
            rollback = Rollback(by=by, why=why, at=_now(), to=former.number)
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


def promotion_of(
    *, model: ArtifactRef, evaluation: ArtifactRef, decision: ArtifactRef, run: str, over: Champion | None
) -> Promotion:
    """Return what the registry keeps of a decision."""
    return Promotion(
        model=artifact_name(model),
        model_uri=model.uri,
        evaluation=artifact_name(evaluation),
        evaluation_uri=evaluation.uri,
        decision=artifact_name(decision),
        decision_uri=decision.uri,
        run=run,
        over=over.version if over else None,
    )


def artifact_name(ref: ArtifactRef) -> str:
    """Return an artifact as `kind/fingerprint`."""
    return f"{ref.kind}/{ref.fingerprint}"


def folder_of(uri: str) -> Path:
    """Return the folder of an artifact's address, for stores on a file system."""
    return Path(unquote(urlparse(uri).path))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
