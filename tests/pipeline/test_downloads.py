"""Repositories of the Hub that a profile names without a commit get one, once; what a run fetches is said beforehand."""

from pathlib import Path

import pytest
from hub_server import REVISION, hub

from klear_core.config.data import DatasetsSource, HubSource
from klear_core.config.load import apply_override, load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.data.datafiles import data_files
from klear_core.errors import ConfigError
from klear_core.pipeline.downloads import REVISIONS_FILE, download_lines, downloads_of, hub_repos, pinned

CONFIGS = Path(__file__).parents[2] / "configs"
ROWS = b'{"problem": "What is 1+1?", "answer": "2"}\n'
FILES = {"README.md": b"---\nlicense: apache-2.0\n---\n", "train-00000-of-00001.jsonl": ROWS, "notes.txt": b"n"}


def config(tmp_path: Path, endpoint: str, revision: str = "newest") -> PipelineConfig:
    runtime = {"endpoint": endpoint, "cache_dir": str(tmp_path / "cache")}
    source = {"kind": "hub", "repo": "owner/sums", "revision": revision, "runtime": runtime}
    return PipelineConfig.model_validate(
        {"curate": {"sources": [source]}, "workspace": {"root": str(tmp_path / "runs")}}
    )


def source_of(config: PipelineConfig) -> HubSource:
    (source,) = config.curate.sources
    assert isinstance(source, HubSource)
    return source


def test_the_newest_commit_is_looked_up_once_and_recorded(tmp_path: Path) -> None:
    with hub("owner/sums", FILES) as (endpoint, _):
        found = pinned(config(tmp_path, endpoint))
    assert source_of(found).revision == REVISION
    assert (tmp_path / "runs" / REVISIONS_FILE).read_text() == f'{{\n "dataset:owner/sums": "{REVISION}"\n}}\n'

    def never(_repo: object) -> str:
        raise AssertionError("it is recorded")

    assert pinned(config(tmp_path, "http://127.0.0.1:9"), never) == pinned(found, never).model_copy(
        update={"curate": pinned(config(tmp_path, "http://127.0.0.1:9"), never).curate}
    )
    assert source_of(pinned(config(tmp_path, "http://127.0.0.1:9"), never)).revision == REVISION


def test_a_later_commit_changes_nothing_in_this_workspace(tmp_path: Path) -> None:
    first = pinned(config(tmp_path, ""), lambda _repo: "a" * 40)
    later = pinned(config(tmp_path, ""), lambda _repo: "b" * 40)
    assert source_of(first).revision == source_of(later).revision == "a" * 40
    other = tmp_path / "elsewhere"
    assert source_of(pinned(config(other, ""), lambda _repo: "b" * 40)).revision == "b" * 40


def test_a_repository_that_the_library_datasets_loads_is_pinned_and_a_folder_has_no_commit(tmp_path: Path) -> None:
    repo = {"kind": "datasets", "repo": "owner/sums", "revision": "newest"}
    folder = {"kind": "datasets", "path": "data/sums", "name": "folder"}
    asked = {
        "curate": {"sources": [repo, folder]},
        "given": {"distill": [repo]},
        "workspace": {"root": str(tmp_path / "runs")},
    }
    found = pinned(PipelineConfig.model_validate(asked), lambda _repo: "a" * 40)
    sources = [*found.curate.sources, *(found.given.distill or ())]
    assert [source.revision for source in sources if isinstance(source, DatasetsSource)] == ["a" * 40, "", "a" * 40]
    assert downloads_of([found]) == []  # the library fetches them


@pytest.mark.parametrize(
    "content", ["", '{"dataset:owner/sums": ', '["x"]', '{"dataset:owner/sums": 3}', '{"dataset:owner/sums": "main"}']
)
def test_a_record_of_commits_that_is_none_is_named_and_not_replaced(tmp_path: Path, content: str) -> None:
    record = tmp_path / "runs" / REVISIONS_FILE
    record.parent.mkdir()
    record.write_text(content)
    with pytest.raises(ConfigError, match=rf"{REVISIONS_FILE}: not the record of a workspace's commits.*delete it"):
        pinned(config(tmp_path, ""), lambda _repo: REVISION)
    assert record.read_text() == content


def test_without_a_network_the_downloaded_commit_serves_or_the_name_stays(tmp_path: Path) -> None:
    asked = config(tmp_path, "http://127.0.0.1:9")
    assert source_of(pinned(asked)).revision == "newest"
    assert not (tmp_path / "runs" / REVISIONS_FILE).exists()
    refs = tmp_path / "cache" / "datasets--owner--sums" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text(REVISION)
    assert source_of(pinned(asked)).revision == REVISION


def test_what_is_to_be_fetched_is_said_with_licence_size_and_time_and_then_is_there(tmp_path: Path) -> None:
    with hub("owner/sums", FILES, licence="apache-2.0") as (endpoint, _):
        found = pinned(config(tmp_path, endpoint))
        (download,) = downloads_of([found])
        assert (download.repo.repo, download.licence) == ("owner/sums", "apache-2.0")
        assert download.gigabytes == len(ROWS) / 1e9  # the data files alone
        line, total = download_lines([download])
        assert line == f"owner/sums at {REVISION[:12]}: {len(ROWS) / 1e9:.3g} GB, licence: apache-2.0"
        assert total.endswith("GB in all, about 1 min at 100 MB/s")
        (file,) = data_files(source_of(found))
        assert file.path.read_bytes() == ROWS
        assert downloads_of([found]) == []


def test_files_of_one_repository_that_two_sources_name_are_counted_once_each(tmp_path: Path) -> None:
    files = {name: ROWS * 2**i for i, name in enumerate(("one.jsonl", "two.jsonl", "three.jsonl"))}
    with hub("owner/sums", files) as (endpoint, _):
        runtime = {"endpoint": endpoint, "cache_dir": str(tmp_path / "cache")}
        source = {"kind": "hub", "repo": "owner/sums", "revision": REVISION, "runtime": runtime}
        named = [source | {"name": "first", "files": "t*.jsonl"}, source | {"name": "second", "files": "*.jsonl"}]
        asked = PipelineConfig.model_validate({"curate": {"sources": named}, "workspace": {"root": str(tmp_path)}})
        (download,) = downloads_of([asked])
    assert download.gigabytes == 7 * len(ROWS) / 1e9


def test_a_branch_is_still_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'main' is no commit.*'newest' records today's"):
        config(tmp_path, "", "main")


@pytest.mark.parametrize("name", ["klear_8b", "single_gpu", "node_8", "klear_8b_64k"])
def test_profiles_for_gpus_name_repositories_and_no_files(name: str) -> None:
    profile = load_profile(CONFIGS / name)
    assert not [path for path in _paths(profile.model_dump()) if path]
    assert {repo.type for repo in hub_repos(profile)} == {"model", "dataset"}


def _paths(value: object) -> list[object]:
    if isinstance(value, dict):
        return [value.get("path")] + [p for item in value.values() for p in _paths(item)]
    return [p for item in value for p in _paths(item)] if isinstance(value, list | tuple) else []


def test_files_take_the_place_of_a_repository_by_one_setting() -> None:
    hub_model = {"model": {"kind": "hub", "repo": "o/n", "revision": REVISION, "max_position_embeddings": 64}}
    assert apply_override(hub_model, "model.path=here") == {
        "model": {"kind": "hf", "path": "here", "max_position_embeddings": 64}
    }
    back = apply_override(apply_override(hub_model, "model.path=here"), "model.repo=o/n")
    assert back["model"] == {"kind": "hub", "repo": "o/n", "max_position_embeddings": 64}
    tagged = {"tag": {"model": {"repo": "o/n", "revision": REVISION}}}
    assert apply_override(tagged, "tag.model.path=here") == {"tag": {"model": {"path": "here"}}}


def test_a_repository_that_nobody_knows_stops_a_run_with_its_name(tmp_path: Path) -> None:
    with hub("owner/other", FILES) as (endpoint, _), pytest.raises(ConfigError, match=r"owner/sums.*no such dataset"):
        data_files(source_of(pinned(config(tmp_path, endpoint))))
