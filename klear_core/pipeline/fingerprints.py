"""Compute the names of the stages' artifacts, before anything has run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from klear_core.artifacts.manifest import ArtifactId, InputRecord, file_ref, fingerprint, read_manifest
from klear_core.config.pipeline import WorkspaceConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import Job, Stage
from klear_core.errors import ArtifactError
from klear_core.pipeline.workspace import open_store, workspace_root


def fingerprints_of(stages: Sequence[Stage], workspace: WorkspaceConfig) -> dict[str, ArtifactId]:
    """Return the name of each stage's artifact, by stage name, before anything has run.

    `stages` must be in order and complete: each comes after all of its inputs. The artifact of a stage that asks the
    registry is the newest one that was made from these inputs. ConfigError if a local file is missing.
    """
    ids: dict[str, ArtifactId] = {}
    for stage in stages:
        made_from = {role: ids[name] for role, name in stage.inputs.items()}
        own = artifact_id(stage.job, made_from, workspace)
        newest = _newest_made_from(stage.job, made_from, workspace) if stage.job.asks_registry else None
        ids[stage.name] = newest or own
    return ids


def _newest_made_from(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> ArtifactId | None:
    """Return the newest artifact with the job's settings and these inputs, whatever the registry added to them."""
    wanted = {(role, own.kind, own.fingerprint) for role, own in inputs.items()}
    # Settings that are filled in from the registry when the stage runs are empty here, and not compared.
    settings = {key: value for key, value in result_settings(job).items() if value}
    found = []
    for folder in open_store(workspace).folders(job.kind):
        try:
            manifest = read_manifest(folder)
        except ArtifactError:
            continue  # damaged: a run makes it again
        made_from = {(record.role, record.kind, record.fingerprint) for record in manifest.inputs}
        is_same = all(manifest.result_config.get(key) == value for key, value in settings.items())
        # A subset, and not equality: the run may have added the champion's scores to the inputs.
        if is_same and wanted <= made_from and manifest.code_version == job.code_version:
            found.append((manifest.created_at, manifest.fingerprint))
    return ArtifactId(kind=job.kind, fingerprint=max(found)[1]) if found else None


def artifact_id(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> ArtifactId:
    """Return the name of the artifact of this job on these inputs."""
    records = input_records(job, inputs, workspace)
    return ArtifactId(kind=job.kind, fingerprint=fingerprint(job.kind, job.code_version, job, records))


def input_records(job: Job, inputs: Mapping[str, ArtifactId], workspace: WorkspaceConfig) -> tuple[InputRecord, ...]:
    """Return all inputs by role: the artifacts, sorted by role, then the local files and Hub repositories that the job
    names."""
    cache = workspace_root(workspace) / "file_hashes.json"
    # The order of inputs is part of a fingerprint, and their roles are not: sorted, it follows from the roles alone.
    artifacts = [InputRecord(kind=i.kind, fingerprint=i.fingerprint, role=role) for role, i in sorted(inputs.items())]
    files = [InputRecord(role=path, **file_ref(path, cache=cache).model_dump()) for path in job.files()]
    repos = [InputRecord(kind="hub", fingerprint=use.revision, role=use.repo) for use in job.repos()]
    return (*artifacts, *files, *repos)
