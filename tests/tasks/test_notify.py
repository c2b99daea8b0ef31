"""Somebody is told of a run: what, with the line that matters and a link, at a receiver on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, get_args

import pytest
from prefect.blocks.notifications import CustomWebhookNotificationBlock
from stored_evaluations import RIGHT, WRONG, evaluation, made_model, sample
from webhook import Receiver, receiving

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.artifacts.run_history import RunRecord, RunStage
from klear_core.config.load import load_profile
from klear_core.config.pipeline import NotifyConfig, NotifyEvent, PromoteConfig
from klear_core.errors import ConfigError, DataError, DiskFullError, ResourceError
from klear_core.evaluate.compare.promotion import DECISION_FILE, Contender, Decision
from klear_core.pipeline.graph import stages_of
from tasks.notify import News, Notifier, RunWatch, disk_news, end_news, losses, open_notifier

SMOKE = Path(__file__).parents[2] / "configs" / "smoke"
SECRET = "hook-secret-123"
NEWS = News(event="failed", run_id="3f2a91bc-1", run_name="laptop-seed1", line="rl: lost", link="http://p/runs/1")
NOW = datetime.now(UTC)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(SECRET) as running:
        yield running


def test_a_webhook_gets_the_line_that_matters_and_a_link(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPS_HOOK", receiver.url)
    open_notifier(NotifyConfig(webhook_env="OPS_HOOK")).tell(NEWS)
    (got,) = receiver.got
    assert (got["event"], got["run"], got["name"]) == ("failed", "3f2a91bc-1", "laptop-seed1")
    assert (got["line"], got["link"]) == ("rl: lost", "http://p/runs/1")
    assert got["text"] == "laptop-seed1 failed\nrl: lost\nhttp://p/runs/1\nklear runs logs 3f2a91bc"


def test_a_notification_block_of_prefect_is_notified(receiver: Receiver) -> None:
    block = CustomWebhookNotificationBlock(
        name="ops", url=receiver.url, json_data={"s": "{{subject}}", "b": "{{body}}"}, allow_private_urls=True
    )
    Notifier(NotifyConfig(), blocks=[block]).tell(NEWS)
    assert receiver.got == [{"s": "laptop-seed1 failed", "b": "rl: lost\nhttp://p/runs/1\nklear runs logs 3f2a91bc"}]


@pytest.mark.parametrize("event", get_args(NotifyEvent))
def test_every_event_reaches_a_receiver_under_a_title_of_its_own(receiver: Receiver, event: NotifyEvent) -> None:
    Notifier(NotifyConfig(), webhook=receiver.url).tell(replace(NEWS, event=event))
    assert [(got["event"], got["line"]) for got in receiver.got] == [(event, "rl: lost")]
    titles = {replace(NEWS, event=each).title for each in get_args(NotifyEvent)}
    assert len(titles) == len(get_args(NotifyEvent)) == 7


def test_only_the_events_that_were_asked_for_are_told(receiver: Receiver) -> None:
    Notifier(NotifyConfig(events=("promoted",)), webhook=receiver.url).tell(NEWS)
    assert receiver.got == []


def test_a_receiver_that_is_busy_is_told_at_the_second_try(receiver: Receiver) -> None:
    receiver.num_refused = 1
    Notifier(NotifyConfig(), webhook=receiver.url).tell(NEWS)
    assert len(receiver.got) == 1


def test_one_that_cannot_be_told_is_a_warning_without_its_address(
    receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.num_refused = 3
    Notifier(NotifyConfig(), webhook=receiver.url).tell(NEWS)
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line == "the webhook could not be told in 3 tries: HTTPStatusError"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(("value", "told"), [(None, "is not set"), ("s3cret", "holds no http address")])
def test_a_receiver_that_is_not_there_is_refused_before_the_first_stage(
    monkeypatch: pytest.MonkeyPatch, value: str | None, told: str
) -> None:
    monkeypatch.delenv("OPS_HOOK", raising=False)
    if value:
        monkeypatch.setenv("OPS_HOOK", value)
    with pytest.raises(ConfigError, match=rf"webhook_env = 'OPS_HOOK': that variable {told}") as raised:
        open_notifier(NotifyConfig(webhook_env="OPS_HOOK"))
    assert "s3cret" not in str(raised.value)


# ---- events ----


def ends(error: BaseException | None, *, made: tuple[str, ...] = (), **artifacts: ArtifactRef) -> list[tuple[str, str]]:
    stages = stages_of(load_profile(SMOKE, ['promote={first="any"}']))
    chosen = [stage.name for stage in stages]
    return list(end_news(stages, artifacts, chosen, NOW - timedelta(hours=1), error, made=made))


@pytest.mark.parametrize(
    ("error", "event"),
    [
        (ResourceError("a GPU was lost"), "failed"),
        (RuntimeError("x"), "failed"),
        (DataError("row 3"), "waiting"),
        (DiskFullError("full"), "waiting"),
    ],
)
def test_an_error_that_only_a_person_can_mend_waits_for_one(error: Exception, event: str) -> None:
    ((found, line),) = ends(error)
    assert found == event
    assert line.endswith(f"{type(error).__name__}: {error}")
    assert line.startswith("benchmarks: ") or line.startswith("curate: ")  # the stage that is missing


def test_nobody_is_told_of_a_run_that_ended_well_or_was_cancelled() -> None:
    assert ends(None) == []
    assert ends(KeyboardInterrupt()) == []


@pytest.mark.parametrize(("is_passed", "event"), [(True, "promoted"), (False, "refused")])
def test_a_decision_is_told_once_by_the_run_that_made_it(is_passed: bool, event: str, tmp_path: Path) -> None:
    decision = Decision(
        is_passed=is_passed, sentence="rl b is decided", rival=None, rival_is="nobody", rule=PromoteConfig(),
        candidate=Contender(model="rl/b", evaluation="evaluate/b", run="r1"), checks=(), comparisons=(), shared=(),
    )  # fmt: skip
    (tmp_path / DECISION_FILE).write_text(decision.model_dump_json())
    fields = {"kind": "promote", "fingerprint": "f" * 20, "uri": tmp_path.as_uri(), "counts": {}}
    fresh = ArtifactRef(**fields, created_at=NOW)
    old = ArtifactRef(**fields, created_at=NOW - timedelta(days=1))
    assert ends(None, promote=fresh) == [(event, "rl b is decided")]
    assert ends(None, promote=old) == []
    assert ends(None, promote=old, made=("promote",)) == [(event, "rl b is decided")]  # a clock that was set back


def scores(root: Path, seed: int, verdicts: list[Any]) -> ArtifactRef:
    samples = [sample(number, 0, "x", verdict) for number, verdict in enumerate(verdicts)]
    return evaluation(root, samples, model="rl", made=made_model(root, seed=seed), seed=seed)


def test_a_score_fell_only_if_the_interval_of_the_difference_says_so(tmp_path: Path) -> None:
    good, bad, less = ([RIGHT] * 40, [WRONG] * 40, [RIGHT] * 39 + [WRONG])
    first, worse, same = (scores(tmp_path, n, verdicts).path for n, verdicts in enumerate((good, bad, less)))
    (line,) = losses(("sft", first), ("rl", worse))
    assert line.replace("\u00a0", " ").startswith("toy: 100.0 % of sft -> 0.0 % of rl (")
    assert list(losses(("sft", first), ("rl", same))) == []
    assert list(losses(("rl", worse), ("rl_code", first))) == []


def record(wall_s: float) -> RunRecord:
    stage = RunStage(name="rl", kind="rl", num_gpus=8, state="made", wall_s=wall_s)
    fields = {"started_at": NOW, "updated_at": NOW, "host": "n", "pid": 1, "stages": (stage,)}
    return RunRecord.model_validate({"run_id": "r", "name": "n", "profile": "p"} | fields)


def test_a_spent_budget_is_told_once(receiver: Receiver, tmp_path: Path) -> None:
    cfg = NotifyConfig(max_gpu_hours=10, disk_above=0.999999)
    watch = RunWatch(Notifier(cfg, webhook=receiver.url), cfg, tmp_path)
    for wall_s in (4000, 5000, 6000):  # 8 GPUs: 8.9, 11.1 and 13.3 GPU-hours
        watch.look(record(wall_s))
    assert [(got["event"], got["line"]) for got in receiver.got] == [("budget", "11.1 GPU-hours, the limit is 10")]


def test_a_disk_that_is_fuller_than_the_limit_is_told_once_with_the_remedy(receiver: Receiver, tmp_path: Path) -> None:
    assert "klear gc" in disk_news(tmp_path, 1e-9)
    assert disk_news(tmp_path, 1 - 1e-9) == ""
    cfg = NotifyConfig(disk_above=1e-9)
    watch = RunWatch(Notifier(cfg, webhook=receiver.url), cfg, tmp_path)
    for _ in range(2):
        watch.look(record(1))
    assert [(got["event"], "klear gc" in got["line"]) for got in receiver.got] == [("disk", True)]
