"""`klear runs` lists runs from their records: what each is, how far, what it scored and cost, and what may be done with it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path

import pytest
from evaluations import write_scores
from manifests import manifest

from flows.process import reliable_interrupts
from flows.runs import labels_of, lines_of, list_runs
from flows.runs_page import answer
from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.artifacts.run_history import LOCK, LOG, RunHistory, RunRecord, RunScore, RunStage
from klear_core.artifacts.store import LocalStore
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.submit import IdleKill, SubmitConfig
from klear_core.errors import ConfigError, DataError
from klear_core.pipeline.graph import fingerprints_of, stages_of
from klear_core.stopping import LimitReached
from tasks.progress import Attempt, console
from tasks.run_record import RunRecorder, is_idle, new_record, not_defaults
from tasks.tracking import RunInfo

NOW = datetime.now(UTC)
HERE = os.uname().nodename
SMOKE = Path(__file__).parents[2] / "configs" / "smoke"


def record(number: int = 1, **changes: object) -> RunRecord:
    """A finished run on this machine; later numbers began later."""
    fields: dict[str, object] = {
        "run_id": f"{number:08x}-0000",
        "name": f"smoke-seed{number}",
        "profile": "smoke",
        "state": "done",
        "started_at": NOW - timedelta(hours=1) + timedelta(seconds=number),
        "updated_at": NOW - timedelta(minutes=61),
        "host": HERE,
        "pid": 1,
    }
    return RunRecord.model_validate(fields | changes)


def put(root: Path, *records: RunRecord) -> None:
    history = RunHistory.of(root)
    for each in records:
        history.folder(each.run_id).mkdir(parents=True)
        history.write(each)


def states(root: Path, **where: str) -> dict[str, str]:
    return {run.record.name: run.record.state for run in list_runs(root, **where)}


# ---- what a run is ----


def test_runs_are_listed_newest_first(tmp_path: Path):
    put(tmp_path, record(1), record(3), record(2))
    assert [run.record.name for run in list_runs(tmp_path)] == ["smoke-seed3", "smoke-seed2", "smoke-seed1"]


def test_a_run_whose_process_is_gone_is_killed_and_one_that_holds_its_lock_runs(tmp_path: Path):
    put(tmp_path, record(1, state="running"), record(2, state="running"))
    history = RunHistory.of(tmp_path)
    (history.folder(record(1).run_id) / LOCK).write_text("process 1")
    with file_lock(history.folder(record(2).run_id) / LOCK, on_wait=print):
        assert states(tmp_path) == {"smoke-seed1": "killed", "smoke-seed2": "running"}
    assert states(tmp_path)["smoke-seed2"] == "killed"


def test_whoever_looks_at_runs_needs_no_right_to_write_and_may_look_while_others_do(tmp_path: Path):
    put(tmp_path, record(1, state="running"))
    lock = RunHistory.of(tmp_path).folder(record(1).run_id) / LOCK
    lock.write_text("process 1")
    lock.chmod(0o444)
    with lock.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        assert states(tmp_path) == {"smoke-seed1": "killed"}


def test_a_run_of_another_node_is_seen_through_the_store_and_is_silent_without_a_sign_of_life(tmp_path: Path):
    store = (tmp_path / "store").as_uri()
    there = RunHistory.of(tmp_path / "there", store=store)
    now = datetime.now(UTC)  # of this test: the module was imported when the whole suite began
    there.share(record(1, state="running", host="node7", updated_at=now))
    there.share(record(2, state="running", host="node7", updated_at=now - timedelta(minutes=6)))
    there.share(record(3, host="node7"))
    found = states(tmp_path / "here", store=store)
    assert found == {"smoke-seed3": "done", "smoke-seed2": "silent", "smoke-seed1": "running"}
    silent = RunHistory.of(tmp_path / "here", store=store).find("00000002")
    assert silent.is_live  # for a day nobody takes its artifacts
    assert not silent.model_copy(update={"updated_at": NOW - timedelta(days=2)}).is_live


def test_a_run_of_another_node_in_a_shared_folder_is_silent_too(tmp_path: Path):
    """Nobody here can ask whether its process lives."""
    now = datetime.now(UTC)
    put(
        tmp_path,
        record(1, state="running", host="node7", updated_at=now),
        record(2, state="running", host="node7", updated_at=now - timedelta(minutes=6), stage="rl", left_s=9),
    )
    assert states(tmp_path) == {"smoke-seed2": "silent", "smoke-seed1": "running"}
    silent = next(run for run in list_runs(tmp_path) if run.record.state == "silent")
    assert silent.progress.startswith("rl, no sign of life for ")


def test_a_run_whose_process_is_stopped_says_so_in_place_of_the_time_that_is_left(tmp_path: Path):
    stopped = {"stage": "rl", "done": 3, "total": 9, "left_s": 9.0, "state": "running"}
    put(tmp_path, record(1, **stopped, updated_at=datetime.now(UTC) - timedelta(minutes=13)))
    with file_lock(RunHistory.of(tmp_path).folder(record(1).run_id) / LOCK, on_wait=print):
        (run,) = list_runs(tmp_path)
    assert run.record.state == "running"
    assert run.progress.startswith("rl 3 of 9, no sign of life for ")


def test_runs_go_by_the_settings_in_which_they_differ_from_others_of_their_profile():
    runs = [
        record(1, settings={"seed": "1", "sft.max_steps": "20"}),
        record(2, settings={"sft.max_steps": "20"}),
        record(3, settings={"sft.max_steps": "20", "rl.loss.kind": '"clip"'}),
        record(4, profile="laptop", settings={"seed": "9"}),
    ]
    labels = labels_of(runs)
    assert [labels[run.run_id] for run in runs] == ["seed=1", "", 'rl.loss.kind="clip"', ""]


def test_a_long_label_is_cut_and_says_by_how_much():
    many = {f"rl.key{i}": "1" for i in range(6)}
    assert labels_of([record(1, settings=many), record(2)])[record(1).run_id].endswith("rl.key3=1, 2 more")


def test_the_lines_of_a_run_say_how_far_it_is_what_it_scored_and_cost_and_why_it_ended(tmp_path: Path):
    stage = RunStage(name="rl", kind="rl", num_gpus=4, state="made", wall_s=5400)
    score = RunScore(model="rl", benchmark="aime24", num_samples=4, value=0.671, low=0.61, high=0.732)
    running = {"state": "running", "stage": "evaluate_rl", "done": 34, "total": 80, "left_s": 840.0}
    running["updated_at"] = datetime.now(UTC)
    put(tmp_path, record(1, stages=(stage,), scores=(score,), gpu_busy=0.83, price_per_gpu_hour=2.5, **running))
    history = RunHistory.of(tmp_path)
    with file_lock(history.folder(record(1).run_id) / LOCK, on_wait=print):
        text = "\n".join(lines_of(list_runs(tmp_path)[0])).replace("\u00a0", " ")
    assert "evaluate_rl 34 of 80, 14 min 00 s left" in text
    assert "rl aime24 67.1 % (61.0 to 73.2)" in text
    assert "GPUs busy 83 %, 6.0 GPU-h, 15.00" in text


def test_json_has_every_run_with_cost_and_label(klear, tmp_path: Path):
    stage = RunStage(name="rl", kind="rl", num_gpus=2, state="made", wall_s=1800)
    put(tmp_path, record(1, stages=(stage,), price_per_gpu_hour=3.0), record(2, settings={"seed": "2"}))
    ended = klear("runs", "--root", tmp_path, "--json")
    rows = json.loads(ended.out)
    assert [row["name"] for row in rows] == ["smoke-seed2", "smoke-seed1"]
    assert (rows[1]["gpu_hours"], rows[1]["cost"], rows[0]["cost"]) == (1.0, 3.0, None)
    assert rows[0]["differs_by"] == "seed=2"


def test_an_empty_workspace_is_told(klear, tmp_path: Path):
    ended = klear("runs", "--root", tmp_path)
    assert (ended.status, "no run in" in ended.out) == (0, True)


def test_a_record_of_another_version_hides_no_other_run(tmp_path: Path):
    put(tmp_path, record(1), record(2))
    (RunHistory.of(tmp_path).folder(record(1).run_id) / "record.json").write_text('{"run_id": "x", "odd": 1}')
    assert list(states(tmp_path)) == ["smoke-seed2"]


def test_what_is_no_run_in_the_folder_of_runs_hides_none(tmp_path: Path):
    """The report of a run reads all records, so that a stray file would end a run at its last stage."""
    put(tmp_path, record(1))
    history = RunHistory.of(tmp_path)
    (tmp_path / "history" / "nohup.out").write_text("")
    history.pin(record(1).run_id, "paper")
    (tmp_path / "history" / ".pins" / ".DS_Store").write_bytes(b"\xff")
    assert [each.run_id for each in history.records()] == [record(1).run_id]
    assert history.pins() == {record(1).run_id: "paper"}


def test_a_run_of_an_earlier_version_is_listed_by_its_report(tmp_path: Path):
    store = LocalStore(tmp_path / "artifacts")
    with store.create("evaluate", "e1") as slot:
        write_scores(slot.workdir, 0.5)
        slot.publish(manifest("evaluate", "e1", stage="evaluate_rl"))
    config = PipelineConfig(name="laptop", seed=4).model_dump(mode="json")
    with store.create("report", "r1") as slot:
        (slot.workdir / "report.html").write_text("<p>")
        inputs = ({"kind": "evaluate", "fingerprint": "e1", "role": "evaluate_rl"},)
        slot.publish(manifest("report", "r1", config={"config": config}, inputs=inputs))
    for _ in range(2):
        (run,) = list_runs(tmp_path)
        assert (run.record.name, run.record.settings) == ("laptop-seed4", {"name": '"laptop"', "seed": "4"})
        assert [(score.model, score.value) for score in run.record.scores] == [("rl", 0.5)]
        assert Path(run.record.report).is_file()


# ---- what a run says of itself ----


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[RunRecorder]:
    config = load_profile(SMOKE, [f"workspace.root={tmp_path}", "workspace.log_format=json", "seed=7"])
    stages, info = stages_of(config), RunInfo(
        workspace=config.workspace, run_id="run", run_name="smoke-seed7", stage="", started_at=NOW
    )  # fmt: skip
    ids = fingerprints_of(stages, config.workspace)
    made = new_record(info, config, stages, ids, selection={"until": "rl"}, has_worker=False)
    own = RunRecorder(made, RunHistory.of(tmp_path), stages)
    with own.recording(config):
        yield own


def ref(kind: str, folder: Path) -> ArtifactRef:
    return ArtifactRef(kind=kind, fingerprint="f", uri=folder.as_uri(), created_at=NOW)


def test_a_run_names_the_artifacts_that_it_needs_before_it_looks_for_any(recorder: RunRecorder, tmp_path: Path):
    (run,) = list_runs(tmp_path)
    assert run.record.state == "running"
    assert run.record.settings["seed"] == "7"
    assert len({stage.fingerprint for stage in run.record.stages}) == len(run.record.stages) > 8


def test_a_stage_is_followed_to_its_end_and_an_evaluation_to_its_scores(recorder: RunRecorder, tmp_path: Path):
    console().stage_started("rl", attempt=2)
    console().stage_progress("rl", 3, 12, "pass rate 0.62")
    now = recorder.record
    assert (now.stage, now.done, now.total, now.note) == ("rl", 3, 12, "pass rate 0.62")
    console().stage_done("rl", ref("rl", tmp_path), was_reused=False, wall_s=2.0)
    write_scores(tmp_path, 0.75, names=("heldout",))
    console().stage_done("evaluate_rl", ref("evaluate", tmp_path), was_reused=True, wall_s=1.0)
    stages = {stage.name: stage for stage in recorder.record.stages}
    assert (stages["rl"].state, stages["rl"].wall_s) == ("made", 2.0)
    assert (stages["evaluate_rl"].state, stages["evaluate_rl"].wall_s) == ("reused", 0.0)
    assert [(s.model, s.benchmark, s.value) for s in recorder.record.scores] == [("rl", "heldout", 0.75)]


def test_the_gpu_hours_of_a_run_include_those_of_the_stage_that_runs(recorder: RunRecorder, monkeypatch):
    """Or a budget would be known to be spent only after the stage that spends it, which may take days."""
    monkeypatch.setattr("tasks.run_record.gpus_in_reach", lambda: 8)
    began = time.monotonic()
    console().stage_started("rl", attempt=1)
    monkeypatch.setattr(time, "monotonic", lambda: began + 7200)
    recorder.count_running()
    assert recorder.record.gpu_hours == pytest.approx(16, rel=1e-3)


def test_the_gpu_hours_of_a_stage_include_those_of_its_attempts_that_failed(recorder: RunRecorder, monkeypatch):
    monkeypatch.setattr("tasks.run_record.gpus_in_reach", lambda: 8)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    console().stage_started("rl", attempt=1)
    now += 7200
    console().stage_failed("rl", DataError("a GPU was lost"), Attempt(number=1, of=2, next_in_s=5.0))
    console().stage_started("rl", attempt=2)
    now += 3600
    recorder.count_running()
    assert recorder.record.gpu_hours == pytest.approx(24, rel=1e-3)
    console().stage_done("rl", ref("rl", Path("/nowhere")), was_reused=False, wall_s=3600.0)
    assert recorder.record.gpu_hours == pytest.approx(24, rel=1e-3)


@pytest.mark.parametrize("profile", ["smoke", "laptop_opd"])
def test_every_stage_that_trains_or_samples_holds_the_gpus(tmp_path: Path, monkeypatch, profile: str):
    monkeypatch.setattr("tasks.run_record.gpus_in_reach", lambda: 8)
    stages = stages_of(load_profile(SMOKE.parent / profile, [f"workspace.root={tmp_path}"]))
    planned = tuple(RunStage(name=stage.name, kind=stage.kind) for stage in stages)
    own = RunRecorder(record(1, stages=planned), RunHistory.of(tmp_path), stages)
    for stage in planned:
        own.stage_started(stage.name, attempt=1)
        own.count_running()
    holding = {stage.kind for stage in own.record.stages if stage.num_gpus}
    training = {"rl"} if profile == "smoke" else {"opd_rollouts", "opd_scores", "opd"}
    assert holding == {"sft", "evaluate", *training}


def test_a_failure_is_told_with_the_delay_before_the_next_attempt(recorder: RunRecorder):
    console().stage_failed("rl", DataError("row 3: no answer\nmore"), Attempt(number=1, of=3, next_in_s=5.0))
    assert recorder.record.why == "row 3: no answer; next attempt in about 5 s"


def test_the_end_is_written_at_once(recorder: RunRecorder, tmp_path: Path):
    recorder.ended("failed", why="DataError: row 3")
    assert states(tmp_path) == {"smoke-seed7": "failed"}


def test_the_log_has_one_json_object_a_line_with_run_and_stage(recorder: RunRecorder, tmp_path: Path):
    console().stage_started("sft", attempt=1)
    logging.getLogger("tasks.stage").warning("two\nlines of %s", "text")
    lines = (RunHistory.of(tmp_path).folder("run") / LOG).read_text().splitlines()
    line = json.loads(lines[-1])
    assert (line["run"], line["stage"], line["level"]) == ("run", "sft", "WARNING")
    assert line["message"] == "two\nlines of text"


def test_a_workspace_that_cannot_be_written_ends_no_run(tmp_path: Path):
    (tmp_path / "history").write_text("a file in the way")
    config = PipelineConfig(workspace=WorkspaceConfig(root=str(tmp_path)))
    own = RunRecorder(record(1), RunHistory.of(tmp_path), ())
    with own.recording(config):
        console().stage_started("sft", attempt=1)
        own.ended("done")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux's file on a disk without room")
def test_a_log_on_a_full_disk_hides_no_error(tmp_path: Path):
    made = record(1)
    folder = RunHistory.of(tmp_path).folder(made.run_id)
    folder.mkdir(parents=True)
    (folder / LOG).symlink_to("/dev/full")
    failure = DataError("row 3: no answer")
    own = RunRecorder(made, RunHistory.of(tmp_path), ())

    def fail() -> None:
        with own.recording(PipelineConfig()):
            logging.getLogger("tasks.stage").warning("the disk is full")
            raise failure

    with pytest.raises(DataError) as raised:
        fail()
    assert raised.value is failure
    assert raised.value.__context__ is None


def test_a_run_is_idle_if_its_gpus_computed_less_than_the_limit_in_the_whole_time():
    limit = IdleKill.model_validate("10%/2m")  # four looks
    assert is_idle([0.9, 0.0, 0.0, 0.1, 0.2], limit)
    assert not is_idle([0.0, 0.0, 0.0], limit)
    assert not is_idle([0.0, 0.0, 0.0, 0.4], limit)


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        ({"idle_kill": "10%/30s"}, "its GPUs computed less than 10% in 30s: idle_kill"),
        ({"ends_at": "2026-11-28T06:00:00Z"}, "its deadline was 2026-11-28 06:00 UTC; submit it again to go on"),
    ],
)
def test_a_run_that_reaches_a_limit_ends_itself_and_its_record_says_why(tmp_path: Path, monkeypatch, limits, why):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 3\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    own = RunRecorder(record(1), RunHistory.of(tmp_path), (), limits=SubmitConfig.model_validate(limits))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(LimitReached, match=why), reliable_interrupts(), own.recording(PipelineConfig()):
            time.sleep(600)
    finally:
        signal.signal(signal.SIGTERM, handler)
    own.ended("cancelled")
    assert own.record.why == why


@pytest.mark.parametrize("told", ["echo '[N/A]'", "exit 9"])  # of a GPU in parts (MIG); the driver does not answer
def test_a_run_whose_gpus_cannot_be_looked_at_is_not_ended_as_idle_and_says_so(tmp_path, monkeypatch, caplog, told):
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{told}\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    limits = SubmitConfig(idle_kill="10%/30s")
    own = RunRecorder(record(1), RunHistory.of(tmp_path), (), limits=limits)
    with own.recording(PipelineConfig()):
        deadline = time.monotonic() + 60
        while "idle_kill ends nothing" not in caplog.text:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    assert own.record.gpu_busy is None


# ---- one run ----


@pytest.mark.parametrize("command", ["logs", "cancel", "retry", "open", "pin", "unpin"])
def test_a_run_that_is_not_there_is_refused_with_those_that_are(klear, tmp_path: Path, command: str):
    put(tmp_path, record(1))
    ended = klear("runs", "--root", tmp_path, command, "fffff")
    assert ended.status == 2
    assert "no run 'fffff'" in ended.err
    assert "00000001" in ended.err


def test_the_first_digits_of_two_runs_are_refused(tmp_path: Path):
    put(tmp_path, record(1), record(2))
    with pytest.raises(ConfigError, match="begins the ids of 2 runs"):
        RunHistory.of(tmp_path).find("0000000")
    assert RunHistory.of(tmp_path).find("00000002").name == "smoke-seed2"
    assert RunHistory.of(tmp_path).find("smoke-seed1").name == "smoke-seed1"


def test_logs_are_printed(klear, tmp_path: Path):
    put(tmp_path, record(1))
    (RunHistory.of(tmp_path).folder(record(1).run_id) / LOG).write_text("a line\n")
    assert klear("runs", "logs", "00000001", "--root", tmp_path, "--follow").out == "a line\n"


@pytest.mark.parametrize(
    ("command", "changes", "told"),
    [
        ("cancel", {}, "is not running: done"),
        ("cancel", {"state": "running", "has_worker": True, "run_url": "http://p/1", "host": "n"}, "PREFECT_API_URL"),
        ("retry", {"state": "running", "host": "node7"}, "cancel it first"),
        ("retry", {"state": "failed"}, "left no settings here"),
        ("open", {"state": "failed"}, "has no report yet"),
        ("logs", {"host": "node7"}, "it ran on node7"),
    ],
)
def test_what_cannot_be_done_with_a_run_is_refused_with_the_reason(
    klear, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, changes: dict, told: str
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    put(tmp_path, record(1, **changes))
    ended = klear("runs", command, "00000001", "--root", tmp_path)
    assert ended.status == 2
    assert told in ended.err


def test_a_pin_is_shown_and_taken_back(klear, tmp_path: Path):
    put(tmp_path, record(1))
    assert klear("runs", "pin", "00000001", "--tag", "paper", "--root", tmp_path).status == 0
    assert "pinned: paper" in klear("runs", "--root", tmp_path).out
    klear("runs", "unpin", "00000001", "--root", tmp_path)
    assert "pinned" not in klear("runs", "--root", tmp_path).out


# ---- the page ----


def test_the_page_links_reports_and_logs_and_takes_no_markup_from_a_run(tmp_path: Path):
    report = tmp_path / "report.html"
    report.write_text("<p>the report")
    put(tmp_path, record(1, name="<script>", report=str(report), why="<b>broken"))
    status, kind, text = answer("/", tmp_path)
    assert (status, kind) == (HTTPStatus.OK, "text/html")
    assert "<script>" not in text
    assert "&lt;b&gt;broken" in text
    assert answer(f"/report/{record(1).run_id}", tmp_path)[2] == "<p>the report"
    assert answer(f"/log/{record(1).run_id}", tmp_path)[0] == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("path", ["/report/../record", "/log/../../etc/passwd", "/log/", "/x", "/report/00000001"])
def test_the_page_serves_nothing_but_what_a_record_names(tmp_path: Path, path: str):
    put(tmp_path, record(1))
    assert answer(path, tmp_path)[0] == HTTPStatus.NOT_FOUND


def test_a_run_that_ends_between_two_looks_at_it_is_not_taken_for_killed(tmp_path: Path):
    """The record is read, then the run writes its end and gives its lock back, then the lock is looked at."""
    put(tmp_path, record(1))
    history = RunHistory.of(tmp_path)
    (history.folder(record(1).run_id) / LOCK).write_text("process 1")
    assert history._now(record(1, state="running")).state == "done"


def test_of_a_section_that_is_off_by_default_only_what_the_user_set_names_a_run(tmp_path: Path):
    config = load_profile(SMOKE, ["promote.margin=9"]).model_dump(mode="json")
    promote = {key: value for key, value in not_defaults(config).items() if key.startswith("promote")}
    assert promote == {"promote.margin": "9.0"}
