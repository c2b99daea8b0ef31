"""Pin the Hub's repositories that a profile names without a commit, and say beforehand what a run downloads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import JsonValue, StringConstraints, TypeAdapter, ValidationError

from klear_core.artifacts import model_files
from klear_core.artifacts.hub import HubFiles, commit_of, licence_of
from klear_core.config.data import NEWEST, DatasetsSource, HubSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings
from klear_core.config.stage import Job
from klear_core.config.train import GivenRepo, HubModelConfig
from klear_core.data import datafiles
from klear_core.errors import ConfigError
from klear_core.pipeline.plan import PendingWork

log = logging.getLogger(__name__)

REVISIONS_FILE = "hub_revisions.json"
"""File of a workspace with the commits that `newest` named when it was first used, by kind and repository."""
_COMMITS = TypeAdapter(dict[str, Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{40}$")]])
_MB_PER_S = 100.0
"""Speed of the network that a download's time is told for."""

Resolve = Callable[[HubFiles], str]


def _newest(repo: HubFiles) -> str:
    """Return the newest commit: by the Hub or, without a network, the one that was downloaded into its cache."""
    try:
        return commit_of(repo.repo, "main", repo_type=repo.type, endpoint=repo.runtime.endpoint)
    except ConfigError:
        downloaded = repo.folder.parent.parent / "refs" / "main"
        if not downloaded.is_file():
            raise
        return downloaded.read_text().strip()


def pinned(config: PipelineConfig, resolve: Resolve = _newest) -> PipelineConfig:
    """Return the config with a commit in the place of every revision `newest`.

    The commit is that of the first use in this workspace, which is recorded there: a later commit changes nothing. A
    repository that the Hub does not tell of stays as it is; the checks before a run say why.
    """
    named = [repo for repo in hub_repos(config) if repo.revision == NEWEST]
    if not named:
        return config
    path = Path(config.workspace.root) / REVISIONS_FILE
    recorded = _recorded(path)
    known = dict(recorded)
    for repo in named:
        if _key(repo) not in known:
            try:
                known[_key(repo)] = resolve(repo)
            except ConfigError as e:
                log.debug("%s", e)
    if known != recorded:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".tmp")
        beside.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")
        beside.replace(path)
    commits = {repo.repo: known[_key(repo)] for repo in named if _key(repo) in known}
    return PipelineConfig.model_validate(_with_commits(config.model_dump(), commits))


def _recorded(path: Path) -> dict[str, str]:
    """Return the commits that a workspace has recorded, by repository."""
    try:
        return _COMMITS.validate_json(path.read_bytes()) if path.is_file() else {}
    except ValidationError as e:
        raise ConfigError(
            f"{path}: not the record of a workspace's commits ({e.errors()[0]['msg']}); restore or delete it: a run "
            "then takes today's commits, and makes again what was made from others"
        ) from e


def _key(repo: HubFiles) -> str:
    return f"{repo.type}:{repo.repo}"


def _with_commits(value: Any, commits: dict[str, str]) -> Any:
    """Return nested settings with these commits in the place of `newest`."""
    if isinstance(value, dict):
        inner: dict[str, JsonValue] = {key: _with_commits(item, commits) for key, item in value.items()}
        if inner.get("revision") == NEWEST and inner.get("repo") in commits:
            inner["revision"] = commits[str(inner["repo"])]
        return inner
    if isinstance(value, list | tuple):
        return [_with_commits(item, commits) for item in value]
    return value


def hub_repos(config: PipelineConfig) -> list[HubFiles]:
    """Return every repository of the Hub that a config names, once."""
    found = {_key(repo): repo for _, repo in _named(config)}
    return list(found.values())


Named = HubSource | DatasetsSource | HubModelConfig
"""Settings that name a repository of the Hub."""


def _named(value: object) -> Iterator[tuple[Named, HubFiles]]:
    """Yield the settings of every repository in nested settings, and the repository."""
    match value:
        case HubSource():
            yield value, datafiles.repo_of(value)
        case DatasetsSource():
            if value.repo:  # else a folder
                yield value, datafiles.repo_of(value)
        case HubModelConfig():
            yield value, model_files.repo_of(value)
        case GivenRepo():
            model = value.as_model()
            assert isinstance(model, HubModelConfig), model
            yield model, model_files.repo_of(model)
        case Settings():
            for name in type(value).model_fields:
                yield from _named(getattr(value, name))
        case dict():
            for item in value.values():
                yield from _named(item)
        case list() | tuple():
            for item in value:
                yield from _named(item)


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A repository that is not here yet."""

    repo: HubFiles
    gigabytes: float | None
    """None: the Hub does not say."""
    licence: str
    """Licence as its card states it; empty if it states none."""


def pending_jobs(config: PipelineConfig, chosen: Collection[str] | None, again: Collection[str] = ()) -> list[Job]:
    """Return the jobs of the chosen stages (None: all) that would run."""
    return [stage.job for stage in PendingWork.of(config, chosen, again).stages]


def downloads_of(settings: Iterable[Settings]) -> list[Download]:
    """Return what a run with these settings, or stages with these jobs, would fetch, as far as the Hub can be asked."""
    repos: dict[tuple[str, str], tuple[HubFiles, str]] = {}
    files: dict[tuple[str, str], dict[str, int | None]] = {}
    for named, repo in _named(list(settings)):
        key = _key(repo), repo.revision
        try:
            # Two benchmarks, such as two windows of LiveCodeBench, may be files of one repository.
            files.setdefault(key, {}).update(_files_to_fetch(named))
            if files[key] and key not in repos:
                repos[key] = repo, licence_of(repo)
        except ConfigError:
            continue  # the checks before a run say why it cannot be fetched
    return [
        Download(repo=repo, gigabytes=model_files.gigabytes_of(files[key]), licence=licence)
        for key, (repo, licence) in repos.items()
    ]


def _files_to_fetch(settings: Named) -> dict[str, int | None]:
    match settings:
        case DatasetsSource():
            return {}  # the library `datasets` chooses them, and keeps them in a cache of its own
        case HubSource():
            return datafiles.files_to_fetch(settings)
        case HubModelConfig():
            return model_files.files_to_fetch(settings)


def download_lines(downloads: list[Download]) -> Iterator[str]:
    """Yield a line for each download, and one for all."""
    for one in downloads:
        size = "a size that the Hub does not tell" if one.gigabytes is None else f"{one.gigabytes:.3g} GB"
        yield f"{one.repo.repo} at {one.repo.revision[:12]}: {size}, licence: {one.licence or 'its card states none'}"
    total = sum(one.gigabytes or 0.0 for one in downloads)
    if downloads:
        minutes = total * 1e3 / _MB_PER_S / 60
        yield f"{total:.3g} GB in all, about {max(1, round(minutes))} min at {_MB_PER_S:.0f} MB/s"
