"""`klear gc` takes what nothing reaches, to a trash; a run that needs it meanwhile or later loses nothing."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from manifests import manifest
from opened import Opened
from test_runs import put, record

from flows.disk import Rules, collect_garbage, plan_collection
from klear_core.artifacts.bucket import Bucket
from klear_core.artifacts.files import file_lock
from klear_core.artifacts.garbage import STAMP, Ages, reached
from klear_core.artifacts.index import catalog
from klear_core.artifacts.manifest import InputRecord
from klear_core.artifacts.object_cache import object_key
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.run_history import LOCK, RunHistory, RunStage
from klear_core.artifacts.shared_garbage import collect, unreached_seals, unreferenced_objects
from klear_core.artifacts.store import LocalStore
from klear_core.errors import ConfigError

OLD = datetime.now(UTC) - timedelta(days=40)
CHAIN = ("curate", "sft", "rl", "evaluate")


def make_chain(store: LocalStore, number: int, *, made_at: datetime = OLD) -> list[str]:
    """Artifacts of which each is made from the one before, as those of a run; returns their names."""
    names: list[str] = []
    for kind in CHAIN:
        before = [InputRecord(kind=n.split("/")[0], fingerprint=n.split("/")[1], role="in") for n in names[-1:]]
        with store.create(kind, f"f{number}") as slot:
            (slot.workdir / "file").write_text(f"{kind} {number}")
            slot.publish(manifest(kind, f"f{number}", inputs=tuple(before), created_at=made_at))
        names.append(f"{kind}/f{number}")
    return names


def stages(*names: str) -> tuple[RunStage, ...]:
    return tuple(RunStage(name=n, kind=n.split("/")[0], fingerprint=n.split("/")[1], state="made") for n in names)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Four runs; the fourth is the newest. Each has artifacts of its own."""
    store = LocalStore(tmp_path / "artifacts")
    for number in range(1, 5):
        names = make_chain(store, number)
        put(tmp_path, record(number, stages=stages(*names[1:])))  # what it was made from is reached by the manifests
    return tmp_path


def going(root: Path, *, last: int = 1) -> set[str]:
    return {item.name for item in plan_collection(root, Rules(last=last)).items}


def names_of(*numbers: int) -> set[str]:
    return {f"{kind}/f{number}" for number in numbers for kind in CHAIN}


def test_the_last_runs_keep_all_that_they_were_made_from(root: Path):
    assert going(root, last=1) == names_of(1, 2, 3)
    assert going(root, last=3) == names_of(1)
    assert going(root, last=4) == set()


def test_a_pinned_run_and_one_that_lives_keep_theirs(root: Path):
    history = RunHistory.of(root)
    history.pin(record(1).run_id, "paper")
    history.write(record(2, state="running", stages=stages("evaluate/f2")))
    with file_lock(history.folder(record(2).run_id) / LOCK, on_wait=print):
        assert going(root) == names_of(3)
    assert going(root) == names_of(2, 3)  # it was killed


def test_what_two_runs_share_stays_while_one_of_them_is_kept(root: Path):
    shared = record(3, stages=stages("evaluate/f3", "sft/f4"))
    RunHistory.of(root).write(shared)
    assert going(root) == names_of(1, 2, 3)
    RunHistory.of(root).pin(shared.run_id, "x")
    assert going(root, last=0) == names_of(1, 2) | {"rl/f4", "evaluate/f4"}


def test_a_run_that_ended_just_now_keeps_its_artifacts_while_its_command_shows_the_result(root: Path):
    RunHistory.of(root).write(record(2, stages=stages("evaluate/f2"), updated_at=datetime.now(UTC)))
    assert going(root, last=0) == names_of(1, 3, 4)


def test_a_run_keeps_a_model_of_this_workspace_that_it_was_given_by_its_folder(root: Path):
    """`klear evaluate sft` makes an artifact that only points to the model of an older run."""
    store = LocalStore(root / "artifacts")
    with store.create("given_model", "g") as slot:
        pointer = {"path": str(store.folder("sft", "f1") / "model")}
        (slot.workdir / "model.json").write_text(json.dumps(pointer))
        slot.publish(manifest("given_model", "g", created_at=OLD))
    put(root, record(5, stages=stages("given_model/g")))
    assert going(root, last=1) == names_of(1, 2, 3, 4) - {"sft/f1", "curate/f1"}


def test_young_artifacts_stay_though_no_run_names_them(root: Path):
    make_chain(LocalStore(root / "artifacts"), 9, made_at=datetime.now(UTC) - timedelta(hours=23))
    make_chain(LocalStore(root / "artifacts"), 8, made_at=datetime.now(UTC) - timedelta(hours=25))
    assert going(root, last=4) == names_of(8)


def test_a_champion_and_the_one_before_stay_with_the_evidence(
    root: Path, mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    import shutil

    from klear_core.config.pipeline import WorkspaceConfig
    from tasks.model_registry import Promotion, open_registry

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    shutil.copytree(mlflow_folder, root / "mlflow")
    registry = open_registry(WorkspaceConfig(root=str(root)), "klear")
    store = LocalStore(root / "artifacts")
    for number, over in ((1, None), (2, 1), (3, 2)):
        with store.create("promote", f"f{number}") as slot:
            config = {"promote": {"registered_model": "klear"}}
            slot.publish(
                manifest("promote", f"f{number}", result_config=config, counts={"promoted": 1}, created_at=OLD)
            )
        facts = {"model": f"rl/f{number}", "evaluation": f"evaluate/f{number}", "decision": f"promote/f{number}"}
        uris = {f"{name}_uri": f"file:///{value}" for name, value in facts.items()}
        assert registry.promote(Promotion(**facts, **uris, run="r", over=over))
    assert going(root, last=1) == names_of(1) | {"promote/f1"}


def test_nothing_is_collected_while_the_champion_is_not_known(root: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    with LocalStore(root / "artifacts").create("promote", "p") as slot:
        config = {"promote": {"registered_model": "klear"}}
        slot.publish(manifest("promote", "p", result_config=config, counts={"promoted": 1}, created_at=OLD))
    with pytest.raises(Exception, match=r"registry .*does not answer"):
        collect_garbage(root, Rules(last=0), is_dry_run=False)
    assert (root / "artifacts" / "rl" / "f1").is_dir()


def test_nothing_is_collected_while_a_run_cannot_be_read(root: Path):
    (RunHistory.of(root).folder(record(1).run_id) / "record.json").write_text('{"of": "another version"}')
    with pytest.raises(ConfigError, match="recorded by another version"):
        plan_collection(root, Rules())


def test_a_dry_run_changes_nothing_and_is_the_default(klear, root: Path):
    before = sorted(str(path) for path in (root / "artifacts").rglob("*") if "index" not in path.name)
    ended = klear("gc", "--root", root, "--last", 1)
    assert (ended.status, "12 artifact" in ended.out, "nothing was changed" in ended.out) == (0, True, True)
    assert sorted(str(path) for path in (root / "artifacts").rglob("*") if "index" not in path.name) == before


def test_what_was_collected_is_used_again_by_whoever_looks_for_it(root: Path):
    collect_garbage(root, Rules(last=1), is_dry_run=False)
    store = LocalStore(root / "artifacts")
    assert not store.folder("sft", "f1").is_dir()
    assert store.exists("sft", "f1")
    ref = store.find("sft", "f1")
    assert ref is not None
    store.verify(ref)
    with store.create("rl", "f1") as slot:
        assert slot.ref is not None  # nothing is built


def test_a_stage_that_is_to_be_made_again_is_not_taken_back_from_the_trash(root: Path):
    collect_garbage(root, Rules(last=1), is_dry_run=False)
    store = LocalStore(root / "artifacts")
    assert store.set_aside("sft", "f1", why="rerun") is not None
    assert store.find("sft", "f1") is None


def test_restore_puts_things_back(klear, root: Path):
    klear("gc", "--root", root, "--last", 1, "--yes")
    assert "sft/f1" in klear("gc", "--root", root, "--restore", "sft/f1").out
    assert (root / "artifacts" / "sft" / "f1").is_dir()
    assert not (root / "artifacts" / "sft" / "f2").exists()
    klear("gc", "--root", root, "--restore", "all")
    assert (root / "artifacts" / "sft" / "f2").is_dir()
    refused = klear("gc", "--root", root, "--restore", "sft/f77")
    assert (refused.status, "not in the trash" in refused.err) == (2, True)


def test_the_trash_is_deleted_after_a_week(root: Path):
    collect_garbage(root, Rules(last=1), is_dry_run=False)
    (stamp,) = (root / "artifacts" / ".trash").iterdir()
    collect_garbage(root, Rules(last=1), is_dry_run=False)
    assert stamp.is_dir()
    stamp.rename(stamp.with_name((datetime.now(UTC) - timedelta(days=8)).strftime(STAMP)))
    collect_garbage(root, Rules(last=1), is_dry_run=False)
    assert not list((root / "artifacts" / ".trash").iterdir())
    assert LocalStore(root / "artifacts").find("sft", "f1") is None


def test_an_artifact_that_a_process_is_about_to_use_stays(root: Path):
    with LocalStore(root / "artifacts").create("sft", "f1") as slot:
        collect_garbage(root, Rules(last=1), is_dry_run=False)
        assert slot.ref is not None
        assert slot.ref.path.is_dir()


def test_a_run_that_begins_during_a_collection_waits_and_then_finds_all_that_it_needs(root: Path):
    from threading import Thread

    from klear_core.artifacts.run_history import collection_lock

    began: list[float] = []
    history, late = RunHistory.of(root), record(7, state="running", stages=stages("evaluate/f1"))

    def begin() -> None:
        with history.begun(late, "{}"):
            began.append(time.monotonic())
            assert going(root) == names_of(2, 3, 4)

    with collection_lock(root):
        thread = Thread(target=begin)
        thread.start()
        time.sleep(0.3)
        assert not began
        ended = time.monotonic()
    thread.join()
    assert began[0] >= ended


def old(path: Path, days: float) -> Path:
    path.mkdir(parents=True)
    (path / "file").write_text("x" * 10)
    for each in (path / "file", path):
        os.utime(each, (time.time() - days * 86400,) * 2)
    return path


def test_leftovers_go_by_age_and_by_need(root: Path):
    building = root / "artifacts" / ".building"
    goes = [
        old(building / "sft-f1", 0),  # its artifact is complete
        old(building / "rl-given_up", 8),
        old(root / "artifacts" / ".aside" / "corrupt-sft-f1-1", 8),
        old(root / "failed" / "of an old run", 8),
    ]
    old(building / "rl-new", 6)
    old(building / "rl-needed", 30)
    old(root / "failed" / record(4).run_id, 30)
    old(root / "failed" / "new", 1)
    RunHistory.of(root).write(record(4, state="killed", stages=stages("evaluate/f4", "rl/needed")))
    found = {item.path for item in plan_collection(root, Rules(last=1)).items if item.what != "artifact"}
    assert found == set(goes)


def test_a_damaged_artifact_is_not_taken(root: Path):
    (root / "artifacts" / "sft" / "f1" / "manifest.json").write_text("{}")
    assert "sft/f1" not in going(root)


def test_commands_that_look_open_no_manifest_for_each_artifact(klear, tmp_path: Path):
    for number in range(40):
        names = make_chain(LocalStore(tmp_path / "artifacts"), number)
        put(tmp_path, record(number, stages=stages(*names)))
    klear("runs", "--root", tmp_path)  # the first command makes the index
    opened = Opened("manifest.json")
    smoke = Path(__file__).parents[2] / "configs" / "smoke"
    for command, most in (
        (("runs", "--root", tmp_path), 0),
        (("gc", "--root", tmp_path), 0),
        (("disk", "--root", tmp_path), 0),
        (("show", "rl", "--root", tmp_path), 2),
        (
            ("plan", smoke, "--set", f"workspace.root={tmp_path}"),
            2 * 20 * 3,
        ),  # why each stage runs, and whether by newer code alone
    ):
        with opened.counted():
            assert klear(*command).status == 0
        assert opened.num <= most, command


def test_reachability_ends_at_artifacts_that_are_gone():
    assert reached({}, {"sft/f1": "why"}) == {"sft/f1": "why"}


# ---- a shared store ----

AT_ONCE = Ages(artifact=timedelta(0), work=timedelta(0))


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket((tmp_path / "store").as_uri())


def collected(bucket: Bucket, keep: str) -> list[str]:
    """Collect all that `keep` does not reach; returns the keys."""
    entries = catalog(bucket)
    items = list(unreached_seals(entries, reached(entries, {keep: "kept"}), AT_ONCE))
    items += unreferenced_objects(bucket, entries, AT_ONCE)
    collect(bucket, items, now=datetime.now(UTC))
    return [item.key for item in items]


def test_of_a_store_seals_go_first_and_any_node_takes_them_back(tmp_path: Path, bucket: Bucket):
    store = ObjectStore(tmp_path / "node1", bucket.url)
    make_chain(store, 1)
    make_chain(store, 2)
    assert collected(bucket, "evaluate/f2") == sorted(f"artifacts/{kind}/f1" for kind in CHAIN)
    assert collected(bucket, "evaluate/f2") == []  # objects of what is in the trash stay
    other = ObjectStore(tmp_path / "node2", bucket.url)
    assert other.exists("rl", "f1")
    ref = other.find("rl", "f1")
    assert ref is not None
    other.verify(ref)
    assert bucket.read("artifacts/rl/f1") is not None


def test_objects_go_once_their_seals_have_left_the_trash(tmp_path: Path, bucket: Bucket):
    store = ObjectStore(tmp_path / "node", bucket.url)
    make_chain(store, 1)
    make_chain(store, 2)
    collected(bucket, "evaluate/f2")
    for key in bucket.keys("trash/artifacts/"):
        bucket.delete(key)
    num = len(bucket.keys("objects/"))
    assert len(collected(bucket, "evaluate/f2")) == num / 2
    assert len(bucket.keys("objects/")) == num / 2
    assert ObjectStore(tmp_path / "other", bucket.url).find("evaluate", "f2") is not None


def test_a_writer_that_relied_on_an_object_sends_it_again(tmp_path: Path, bucket: Bucket):
    """The object is there when the writer looks, and is collected before its seal."""
    store = ObjectStore(tmp_path / "node", bucket.url)
    make_chain(store, 1)
    (gone,) = [sha for entry in catalog(bucket).values() if entry.name == "sft/f1" for sha in entry.files[1:]]

    class Collecting(Bucket):
        def create(self, key: str, content: bytes) -> bool:
            bucket.delete(object_key(gone))
            return super().create(key, content)

    writer = ObjectStore(tmp_path / "writer", bucket.url)
    with writer.create("sft", "copy") as slot:
        (slot.workdir / "file").write_text("sft 1")
        writer.bucket = Collecting(bucket.url)
        slot.publish(manifest("sft", "copy"))
    assert bucket.read(object_key(gone)) == b"sft 1"


def test_champions_of_other_nodes_stay_in_the_store(
    tmp_path: Path, bucket: Bucket, mlflow_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of the same MLflow, which says what is champion, and of another one, which cannot be asked."""
    import shutil

    from klear_core.config.pipeline import WorkspaceConfig
    from tasks.model_registry import Promotion, open_registry

    shutil.copytree(mlflow_folder, tmp_path / "mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow/mlflow.db")
    theirs, ours = ObjectStore(tmp_path / "a" / "artifacts", bucket.url), tmp_path / "b"
    for number in (1, 2):
        made = [name.split("/") for name in make_chain(theirs, number)]
        made_from = tuple(InputRecord(kind=kind, fingerprint=own, role=kind) for kind, own in made[2:])
        config = {"promote": {"registered_model": "klear"}}
        facts = {"result_config": config, "counts": {"promoted": 1}, "inputs": made_from, "created_at": OLD}
        with theirs.create("promote", f"f{number}") as slot:
            slot.publish(manifest("promote", f"f{number}", **facts))
    names = {"model": "rl/f2", "evaluation": "evaluate/f2", "decision": "promote/f2"}
    uris = {f"{name}_uri": f"file:///{value}" for name, value in names.items()}
    registry = open_registry(WorkspaceConfig(root=str(ours)), "klear")
    assert registry.promote(Promotion(**names, **uris, run="r", over=None))
    make_chain(ObjectStore(ours / "artifacts", bucket.url), 3)
    goes = {item.key for item in plan_collection(ours, Rules()).shared}
    assert goes == {f"artifacts/{kind}/f3" for kind in CHAIN}


def test_an_object_that_a_new_seal_names_is_taken_back(tmp_path: Path, bucket: Bucket):
    store = ObjectStore(tmp_path / "node", bucket.url)
    make_chain(store, 1)
    entries = catalog(bucket)
    orphans = list(unreferenced_objects(bucket, {}, AT_ONCE)) or []
    assert orphans == []  # seals that are not listed are not known, so no object is
    (item,) = [i for i in unreferenced_objects_without(bucket, entries, "sft/f1") if i.size == len("sft 1")]
    assert collect(bucket, [item], now=datetime.now(UTC)) == 1
    assert bucket.read(item.key) == b"sft 1"


def test_a_collection_ends_what_one_that_was_killed_has_begun(tmp_path: Path, bucket: Bucket):
    """It had moved objects, and neither deleted them nor taken back those that a new seal names."""

    class Killed(Bucket):
        def keys(self, prefix: str) -> list[str]:
            if prefix == "artifacts/":
                raise KeyboardInterrupt
            return super().keys(prefix)

    make_chain(ObjectStore(tmp_path / "node", bucket.url), 1)
    bucket.write("objects/ab/abc", b"nobody's")
    found = unreferenced_objects_without(bucket, catalog(bucket), "sft/f1")
    orphans = [item for item in found if item.size in (len("sft 1"), len("nobody's"))]
    with pytest.raises(KeyboardInterrupt):
        collect(Killed(bucket.url), orphans, now=datetime.now(UTC))
    assert len(bucket.keys("trash/objects/")) == 2
    assert collect(bucket, [], now=datetime.now(UTC)) == 1
    assert bucket.keys("trash/objects/") == []
    assert bucket.read("objects/ab/abc") is None
    assert ObjectStore(tmp_path / "other", bucket.url).find("sft", "f1") is not None


def unreferenced_objects_without(bucket: Bucket, entries: dict, name: str) -> list:
    """Those that a collector lists that has not seen this artifact's seal yet."""
    seal = bucket.read(f"artifacts/{name}")
    assert seal is not None
    bucket.delete(f"artifacts/{name}")
    found = list(unreferenced_objects(bucket, {k: v for k, v in entries.items() if k != name}, AT_ONCE))
    bucket.write(f"artifacts/{name}", seal)
    return found


def test_no_object_is_collected_while_a_seal_cannot_be_read(
    tmp_path: Path, bucket: Bucket, caplog: pytest.LogCaptureFixture
):
    store = ObjectStore(tmp_path / "node", bucket.url)
    make_chain(store, 1)
    bucket.write("artifacts/sft/of_a_later_version", b"0" * 64)
    bucket.write("objects/ab/abc", b"x")
    assert list(unreferenced_objects(bucket, catalog(bucket), AT_ONCE)) == []
    assert "cannot be read" in caplog.text
