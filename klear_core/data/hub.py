"""List and fetch the files of a dataset repository on the Hugging Face Hub, or find them in the Hub's cache on disk."""

from __future__ import annotations

import glob
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from klear_core.config.data import HubSource
from klear_core.errors import ConfigError

_TIMEOUT_S = 15
"""Wait for the list of a repository's files."""


def folder_of(source: HubSource) -> Path:
    """Return the folder of the pinned revision in the cache, where its files are or will be.

    The cache holds `datasets--<owner>--<name>/snapshots/<revision>`; a copy of it from another machine serves as well.
    """
    from huggingface_hub import constants

    cache = Path(source.runtime.cache_dir or constants.HF_HUB_CACHE).expanduser()
    return cache / f"datasets--{source.repo.replace('/', '--')}" / "snapshots" / source.revision


def cached_names(source: HubSource) -> list[str]:
    """Return the names of the repository's files as far as the cache tells; empty if it does not know the revision.

    The cache keeps the list of the files beside those that were downloaded. A copy may lack that list: then these are
    the files that are there.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(
            source.repo,
            repo_type="dataset",
            revision=source.revision,
            cache_dir=source.runtime.cache_dir or None,
        )
    except CachedRepoTreeNotFoundError:
        folder = folder_of(source)
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]
    return [file.path for file in tree]


def published_names(source: HubSource) -> list[str]:
    """Return the names of the repository's files at the pinned revision, from the Hub.

    Raise ConfigError if the Hub cannot be reached, or knows no such repository or revision.
    """
    from huggingface_hub import HfApi

    with _hub_errors(source):
        api = HfApi(endpoint=source.runtime.endpoint or None)
        info = api.dataset_info(source.repo, revision=source.revision, timeout=_TIMEOUT_S)
        return [file.rfilename for file in info.siblings or ()]


def fetch(source: HubSource, names: Sequence[str]) -> None:
    """Download these files into the cache, but for those that are there; ConfigError as `published_names`."""
    from huggingface_hub import snapshot_download

    with _hub_errors(source):
        snapshot_download(
            source.repo,
            repo_type="dataset",
            revision=source.revision,
            cache_dir=source.runtime.cache_dir or None,
            endpoint=source.runtime.endpoint or None,
            allow_patterns=[glob.escape(name) for name in names],
        )


@contextmanager
def _hub_errors(source: HubSource) -> Iterator[None]:
    """Turn the Hub's errors into a ConfigError that says what to do."""
    from huggingface_hub import errors

    # huggingface_hub's own HTTP errors derive from those of its HTTP library, which changes with its version.
    http_error = errors.HfHubHTTPError.__bases__[0]
    assert issubclass(http_error, Exception), http_error
    at = f"{source.repo} at revision {source.revision}"
    try:
        yield
    except errors.GatedRepoError as e:
        raise ConfigError(f"{at}: accept its terms on the Hub and set HF_TOKEN ({_first_line(e)})") from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as e:
        raise ConfigError(f"{at}: the Hub has no such dataset or commit, or shows it to members only") from e
    except (OSError, http_error) as e:
        raise ConfigError(
            f"{at}: is not in the cache {folder_of(source)} and the Hub cannot be reached ({_first_line(e)}); fetch it "
            f"where there is a network (hf download {source.repo} --repo-type dataset --revision "
            f"{source.revision}) and "
            "copy the cache folder here, or name a local copy with kind = 'file'"
        ) from e


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
