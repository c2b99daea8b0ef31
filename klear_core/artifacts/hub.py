"""List and fetch the files of a repository on the Hugging Face Hub, or find them in the Hub's cache on disk."""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from klear_core.artifacts.files import hash_all, says_disk_full
from klear_core.config.data import NEWEST, HubRuntime
from klear_core.config.settings import expanded
from klear_core.errors import ConfigError, DataError, ResourceError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import BlobLfsInfo

_TIMEOUT_S = 15
"""Seconds to wait for the list of a repository's files."""
_SHA256_DIGITS = 64

Progress = Callable[[int, int], None]
"""Called with the number of bytes that are there and the number of all bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository, as the Hub or its cache describes it."""

    name: str
    size: int | None
    sha256: str
    """Empty if unknown: the Hub keeps it for large files alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFiles:
    """A repository at one commit, and where its files are kept and fetched from."""

    type: Literal["dataset", "model"]
    repo: str
    revision: str
    runtime: HubRuntime

    def __str__(self) -> str:
        return f"{self.repo} at revision {self.revision}"

    @property
    def folder(self) -> Path:
        """Return the folder of the pinned revision in the cache, where its files are or will be.

        The cache holds `models--<owner>--<name>/snapshots/<revision>`; a copy of it from another machine serves as
        well.
        """
        from huggingface_hub import constants

        cache = expanded(self.runtime.cache_dir or constants.HF_HUB_CACHE)
        return cache / f"{self.type}s--{self.repo.replace('/', '--')}" / "snapshots" / self.revision


def cached_names(repo: HubFiles) -> list[str]:
    """Return the names of the repository's files that the cache knows; empty if it does not have the revision.

    The cache keeps a list of all files. A copy of the cache may lack that list; then these are the downloaded files.
    """
    listed = _listed_in_cache(repo)
    if listed is not None:
        return [file.name for file in listed]
    return [file.relative_to(repo.folder).as_posix() for file in repo.folder.rglob("*") if file.is_file()]


def published_files(repo: HubFiles) -> list[HubFile]:
    """Return the repository's files at the pinned revision, from the Hub.

    Raise ConfigError if the Hub cannot be reached, or knows no such repository or revision.
    """
    from huggingface_hub import HfApi

    with _hub_errors(repo, if_unreachable=ConfigError):
        api = HfApi(endpoint=repo.runtime.endpoint or None)
        ask = api.dataset_info if repo.type == "dataset" else api.model_info
        info = ask(repo.repo, revision=repo.revision, timeout=_TIMEOUT_S, files_metadata=True)
    return [HubFile(name=file.rfilename, size=file.size, sha256=_sha256_in(file.lfs)) for file in info.siblings or ()]


def commit_of(repo: str, revision: str, *, repo_type: Literal["dataset", "model"] = "model", endpoint: str = "") -> str:
    """Return the commit that a branch or tag of a repository names now; ConfigError as `published_files`."""
    from huggingface_hub import HfApi

    runtime = HubRuntime(endpoint=endpoint)
    named = HubFiles(type=repo_type, repo=repo, revision=revision, runtime=runtime)
    with _hub_errors(named, if_unreachable=ConfigError):
        info = HfApi(endpoint=endpoint or None).repo_info(
            repo, repo_type=repo_type, revision=revision, timeout=_TIMEOUT_S
        )
    assert info.sha is not None, repo
    return info.sha


def licence_of(repo: HubFiles) -> str:
    """Return the licence that a repository's card states; empty if none. ConfigError as `published_files`."""
    from huggingface_hub import HfApi

    with _hub_errors(repo, if_unreachable=ConfigError):
        api = HfApi(endpoint=repo.runtime.endpoint or None)
        info = api.repo_info(repo.repo, repo_type=repo.type, revision=repo.revision, timeout=_TIMEOUT_S)
    tags: Sequence[str] = getattr(info, "tags", None) or ()
    stated = [tag.partition(":")[2] for tag in tags if tag.startswith("license:")]
    return ", ".join(stated)


def fetch(repo: HubFiles, names: Sequence[str], progress: Progress | None = None) -> None:
    """Download these files into the cache, except those that are there; resume an interrupted download.

    Raise ConfigError as `published_files` does, ResourceError if the Hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    with _hub_errors(repo, if_unreachable=ResourceError):
        snapshot_download(
            repo.repo,
            repo_type=repo.type,
            revision=repo.revision,
            cache_dir=repo.runtime.cache_dir or None,
            endpoint=repo.runtime.endpoint or None,
            # These are patterns for huggingface_hub, and a name may have a `[` in it.
            allow_patterns=[glob.escape(name) for name in names],
            tqdm_class=_bar_for(progress),
        )


def require_token(repo: str) -> None:
    """Raise ConfigError if there is no token to upload with, so that nothing is prepared in vain."""
    from huggingface_hub import get_token

    if not get_token():
        raise ConfigError(f"{repo}: no token of the Hub is here; set HF_TOKEN, or run `hf auth login`")


def upload(
    folder: Path,
    repo: str,
    *,
    is_private: bool,
    message: str,
    endpoint: str = "",
    repo_type: Literal["model", "dataset"] = "model",
) -> str:
    """Upload a folder to the Hub, creating the repository if there is none; return the commit's address.

    The token is that of huggingface_hub (HF_TOKEN, or `hf auth login`). Raise ConfigError if it is missing or has no
    right to write, ResourceError if the Hub cannot be reached.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi(endpoint=endpoint or None)
    http_error = errors.HfHubHTTPError.__bases__[0]
    assert issubclass(http_error, Exception), http_error
    try:
        api.create_repo(repo, repo_type=repo_type, private=is_private, exist_ok=True)
        commit = api.upload_folder(repo_id=repo, repo_type=repo_type, folder_path=folder, commit_message=message)
    except errors.LocalTokenNotFoundError as e:
        raise ConfigError(f"{repo}: no token of the Hub is here; set HF_TOKEN, or run `hf auth login`") from e
    except errors.HfHubHTTPError as e:
        status = e.response.status_code if e.response is not None else 0
        if status in (401, 403):
            raise ConfigError(f"{repo}: the Hub's token may not write there ({_first_line(e)}); set HF_TOKEN") from e
        raise ResourceError(f"{repo}: the Hub refused the upload ({_first_line(e)})") from e
    except (OSError, http_error) as e:
        raise ResourceError(f"{repo}: the Hub cannot be reached ({_first_line(e)}); {folder} is complete") from e
    return str(commit.commit_url)


def check_content(repo: HubFiles, names: Sequence[str]) -> dict[str, str]:
    """Return the SHA-256 of these files in the cache; raise DataError for one that is not what the Hub published.

    Small files are not compared: the Hub states no SHA-256 of them.
    """
    listed = {file.name: file.sha256 for file in _listed_in_cache(repo) or ()}
    found = dict(zip(names, hash_all([repo.folder / name for name in names]), strict=True))
    for name, sha256 in found.items():
        # The cache stores a large file under its SHA-256, and a link to it under its name.
        stored = (repo.folder / name).resolve()
        by_name = stored.name if len(stored.name) == _SHA256_DIGITS else ""
        expected = listed.get(name) or by_name
        if expected and sha256 != expected:
            raise DataError(
                f"{repo}: {stored} is damaged: its SHA-256 is {sha256}, published is {expected}; delete it and run "
                "again, which downloads it anew"
            )
    return found


def _listed_in_cache(repo: HubFiles) -> list[HubFile] | None:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(
            repo.repo, repo_type=repo.type, revision=repo.revision, cache_dir=repo.runtime.cache_dir or None
        )
    except CachedRepoTreeNotFoundError:
        return None
    return [HubFile(name=file.path, size=file.size, sha256=_sha256_in(file.lfs)) for file in tree]


def _sha256_in(large_file: BlobLfsInfo | None) -> str:
    """Return the SHA-256 that the Hub states of a large file; empty for a small one."""
    return large_file.sha256 if large_file else ""


def _bar_for(progress: Progress | None) -> type[Any]:
    """Return a progress bar for huggingface_hub that prints nothing and reports its bytes.

    There may be two bars of bytes, for the network and for the disk: the larger number counts.
    """
    num_told = 0
    tqdm: Any = import_module("tqdm").tqdm  # untyped; huggingface_hub's own may be switched off

    class _Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)  # huggingface_hub's own argument
            self.counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs | {"file": io.StringIO()})

        def update(self, n: float = 1) -> None:
            nonlocal num_told
            super().update(n)
            if progress and self.counts_bytes and self.total and self.n > num_told:
                num_told = int(self.n)
                progress(num_told, int(self.total))

    return _Bar


@contextmanager
def _hub_errors(repo: HubFiles, *, if_unreachable: type[ConfigError | ResourceError]) -> Iterator[None]:
    """Turn the Hub's errors into a ConfigError, or `if_unreachable`, that says what to do."""
    from huggingface_hub import errors

    # huggingface_hub's own HTTP errors derive from those of its HTTP library, which changes with its version.
    http_error = errors.HfHubHTTPError.__bases__[0]
    assert issubclass(http_error, Exception), http_error
    is_dataset = repo.type == "dataset"
    try:
        yield
    except errors.GatedRepoError as e:
        raise ConfigError(f"{repo}: accept its terms on the Hub and set HF_TOKEN ({_first_line(e)})") from e
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as e:
        raise ConfigError(f"{repo}: the Hub has no such {repo.type} or commit, or shows it to members only") from e
    except (OSError, http_error) as e:
        if says_disk_full(e):
            raise  # the stage says what to do
        revision = "" if repo.revision == NEWEST else f" --revision {repo.revision}"
        command = f"hf download {repo.repo}{' --repo-type dataset' if is_dataset else ''}{revision}"
        by_path = "kind = 'file'" if is_dataset else "its path"
        raise if_unreachable(
            f"{repo}: is not in the cache {repo.folder} and the Hub cannot be reached ({_first_line(e)}); fetch it "
            f"where there is a network ({command}) and copy the cache folder here, or name a local copy with {by_path}"
        ) from e


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
