"""Tell somebody what happened to a run, by a webhook and by Prefect's notification blocks. It never ends a run."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.artifacts.run_history import RunRecord
from klear_core.config.pipeline import NotifyConfig, NotifyEvent
from klear_core.config.stage import PromoteJob, Stage
from klear_core.errors import ConfigError, KlearError, is_interrupt, reporting
from klear_core.scores import percent, range_text

if TYPE_CHECKING:
    from prefect.blocks.abstract import NotificationBlock

    from tasks.tracking import RunInfo

log = logging.getLogger(__name__)

_TRIES, _FIRST_PAUSE_S, _TIMEOUT_S = 3, 1.0, 10.0
_TITLES: dict[NotifyEvent, str] = {
    "failed": "failed",
    "waiting": "waits for a person",
    "promoted": "has a new champion",
    "refused": "promotes nothing",
    "disk": "is about to fill the disk",
    "budget": "has spent its budget",
    "score_fell": "scored worse",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """One thing to tell."""

    event: NotifyEvent
    run_id: str
    run_name: str
    line: str
    """The line that matters."""
    link: str
    """A page of Prefect, or the path of a report; empty if there is neither."""
    has_log: bool = True
    """False for a run that was refused before it began."""

    @property
    def title(self) -> str:
        """The subject: which run, and what."""
        return f"{self.run_name} {_TITLES[self.event]}"

    @property
    def text(self) -> str:
        """The message."""
        logs = f"klear runs logs {self.run_id[:8]}" if self.has_log else ""
        return "\n".join(filter(None, (self.line, self.link, logs)))


class Notifier:
    """Sends news to all receivers of a run."""

    def __init__(self, cfg: NotifyConfig, *, webhook: str = "", blocks: Sequence[NotificationBlock] = ()) -> None:
        """Without receivers it tells nobody."""
        self._cfg, self._webhook, self._blocks = cfg, webhook, blocks

    def tell(self, news: News) -> None:
        """Send, and try again twice; what cannot be sent is a warning, without the receiver's address."""
        if news.event not in self._cfg.events:
            return
        if self._webhook:
            self._try("the webhook", lambda: self._post(news))
        for block in self._blocks:
            self._try(f"the block {block.get_block_type_slug()}", partial(block.notify, news.text, news.title))

    @contextmanager
    def telling_refusals(self, of_run: Callable[[], RunInfo]) -> Iterator[None]:
        """Tell that an error of ours in the block refuses the run; a schedule has nobody at its terminal."""
        try:
            yield
        except KlearError as e:
            with reporting("nobody could be told that this run was refused"):
                run = of_run()
                for event, line in end_news((), {}, (), run.started_at, e, made=()):
                    told = {"run_id": run.run_id, "run_name": run.run_name, "link": run.run_url}
                    self.tell(News(event=event, line=line, has_log=False, **told))
            raise

    def _try(self, receiver: str, send: Callable[[], object]) -> None:
        for attempt in range(_TRIES):
            try:
                send()
            except Exception as e:  # noqa: BLE001  telling is no part of the run; a message may hold the address
                trouble = type(e).__name__
                time.sleep(_FIRST_PAUSE_S * 2**attempt if attempt + 1 < _TRIES else 0)
            else:
                return
        log.warning("%s could not be told in %d tries: %s", receiver, _TRIES, trouble)

    def _post(self, news: News) -> None:
        import httpx

        # `text` is what Slack, Mattermost and the bridges of Discord (at `/slack`) and Teams show.
        body = {
            "text": f"{news.title}\n{news.text}",
            "event": news.event,
            "run": news.run_id,
            "name": news.run_name,
            "line": news.line,
            "link": news.link,
        }
        httpx.post(self._webhook, json=body, timeout=_TIMEOUT_S).raise_for_status()


def open_notifier(cfg: NotifyConfig) -> Notifier:
    """Return the notifier of a run. ConfigError, before the first stage, if a receiver is not there."""
    webhook = ""
    if cfg.webhook_env:
        webhook = os.environ.get(cfg.webhook_env, "")
        if not webhook.startswith(("http://", "https://")):
            found = "holds no http address" if webhook else "is not set"
            raise ConfigError(f"workspace.notify.webhook_env = {cfg.webhook_env!r}: that variable {found}")
    return Notifier(cfg, webhook=webhook, blocks=[_block(name) for name in cfg.blocks])


def _block(name: str) -> NotificationBlock:
    from prefect.blocks import notifications  # noqa: F401  registers Prefect's own kinds
    from prefect.blocks.abstract import NotificationBlock
    from prefect.blocks.core import Block

    try:
        block = Block.load(name)
    except (ValueError, RuntimeError) as e:
        # the text of the error may show what is in the block
        raise ConfigError(f"workspace.notify.blocks: no Prefect block {name} ({type(e).__name__})") from None
    if not isinstance(block, NotificationBlock):
        raise ConfigError(f"workspace.notify.blocks: {name} is no notification block")
    return block


class RunWatch:
    """Tells once in a run that the disk fills up, and once that its GPU-hours are spent."""

    def __init__(self, notifier: Notifier, cfg: NotifyConfig, root: Path) -> None:
        self._notifier, self._cfg, self._root = notifier, cfg, root
        self._told: set[NotifyEvent] = set()

    def look(self, record: RunRecord) -> None:
        """Look at the disk and at what the run has spent."""
        self._once("disk", disk_news(self._root, self._cfg.disk_above), record)
        limit = self._cfg.max_gpu_hours
        if limit is not None and record.gpu_hours > limit:
            self._once("budget", f"{record.gpu_hours:.1f} GPU-hours, the limit is {limit:g}", record)

    def _once(self, event: NotifyEvent, line: str, record: RunRecord) -> None:
        if line and event not in self._told:
            self._told.add(event)
            self._notifier.tell(
                News(event=event, run_id=record.run_id, run_name=record.name, line=line, link=record.run_url)
            )


def disk_news(root: Path, above: float) -> str:
    """Return how full the disk of a workspace is, if it is fuller than `above`; else an empty text."""
    usage = shutil.disk_usage(root)
    share = 1 - usage.free / usage.total
    if share <= above:
        return ""
    return (
        f"the disk of {root} is {share:.0%} full, {usage.free / 1e9:.1f} GB are free: "
        f"`klear disk --root {root}` shows what takes space, `klear gc` what may go"
    )


# ---- what there is to tell at the end ----


def end_news(
    stages: Sequence[Stage],
    artifacts: Mapping[str, ArtifactRef],
    chosen: Collection[str],
    started_at: datetime,
    error: BaseException | None,
    *,
    made: Collection[str],
) -> Iterator[tuple[NotifyEvent, str]]:
    """Yield what somebody is told of a run that ends, with the line that matters; a person who cancels it knows.

    `made` are the stages that this attempt made; those of an earlier one, which was killed, are known by their age.
    """
    from klear_core.evaluate.compare.promotion import read_decision

    if isinstance(error, Exception) and not is_interrupt(error):
        is_permanent = isinstance(error, KlearError) and error.is_permanent
        unfinished = [stage.name for stage in stages if stage.name in chosen and stage.name not in artifacts]
        where = f"{unfinished[0]}: " if unfinished else ""
        yield "waiting" if is_permanent else "failed", f"{where}{type(error).__name__}: {error}"
    scored: list[tuple[str, Path]] = []
    for stage in stages:
        ref = artifacts.get(stage.name)
        if ref is None:
            continue
        is_new = stage.name in made or ref.created_at >= started_at
        if stage.kind == PromoteJob.kind and is_new:
            decision = read_decision(ref.path)
            yield "promoted" if decision.is_passed else "refused", decision.sentence
        if stage.job.scores_model:
            scored.append((stage.scored_model_stage, ref.path))
            if is_new and len(scored) > 1:
                yield from (("score_fell", line) for line in losses(scored[-2], scored[-1]))


def losses(before: tuple[str, Path], after: tuple[str, Path]) -> Iterator[str]:
    """Yield a line for each benchmark on which the later model is worse, by the paired interval over other problems.

    Models are given by the stage that made them and the folder of their evaluation.
    """
    from klear_core.evaluate.compare.paired import compare_pairs

    for found in compare_pairs([(before[1], after[1])])[0]:
        if found.decoding == "sampled" and found.new_problems.high < 0:
            yield (
                f"{found.benchmark}: {percent(found.before)} of {before[0]} -> {percent(found.after)} of {after[0]} "
                f"({range_text(found.new_problems)} points)"
            )
