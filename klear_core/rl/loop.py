"""Run RL with verifiable rewards: sample groups of answers, select, learn, hand the weights over, log.

GPPO (arXiv 2508.07629) is GRPO with another gradient where PPO clips. As in GRPO, an answer's advantage A is its reward
minus the mean of its group's, over their standard deviation, and all of its tokens share it. With r the ratio of new to
old probability, the policy term's gradient is the token mean of

    -F * A * grad(logp),    F = 1 - eps_low   where r < 1 - eps_low and A < 0
                                1 + eps_high  where r > 1 + eps_high and A > 0
                                r             everywhere else

GRPO has F = 0 in the first two cases: it forgets the tokens that moved furthest, and GPPO keeps a bounded gradient of
them. GPPO adds a language-model term on positive samples (`lm_coef`) and a wider upper bound (`eps_high`). It leaves
out GRPO's KL term and frozen reference model (`kl_coef`), the entropy bonus, and groups whose rewards are all equal.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from klear_core import stopping
from klear_core.artifacts.manifest import ReasonCounts, StageSummary, check_yield
from klear_core.artifacts.records import read_shards, write_shard
from klear_core.artifacts.shared import send_work
from klear_core.config.rl import RlConfig, RolloutConfig
from klear_core.config.settings import YieldLimits
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError
from klear_core.generate.engine import SleepingEngine, TrainableEngine, engine_stats
from klear_core.metrics import METRICS_FILE, SILENT, Telemetry
from klear_core.prompts import load_tokenizer
from klear_core.rl.continuous import ContinuousRollouts
from klear_core.rl.groups import choose_problems, to_samples
from klear_core.rl.interfaces import LearnerHandle, LearnerLost, LocalWorkers, RlSetup, Workers
from klear_core.rl.rewards import UserRewards
from klear_core.rl.rollout import Collector, Lookahead, RolloutClient, StepRollouts, no_rewards
from klear_core.rl.state import (
    CollapseGuard,
    InlineEval,
    InlineEvals,
    OpenInlineEval,
    RlState,
    no_inline_eval,
    ratios_one_note,
)
from klear_core.rl.step_metrics import ShownRollout, describe_answers, describe_groups, last_shown, save_shown
from klear_core.rl.stream import Curriculum, PromptStream
from klear_core.scores import SHOWN_FILE, read_pass_rates
from klear_core.stopping import StoppedEarly, checkpoint_first
from klear_core.train.base_model import engine_window, model_folder
from klear_core.types import Judge, PassRate, Problem, RewardFunction, TeacherLogps
from klear_core.waits import TRACE_FILE, loop_watched, now, span, traced, waiting

log = logging.getLogger(__name__)

_CHECK_FROM_STEP = 20  # steps after which a run whose groups give no gradient is stopped
_NUM_SHOWN = 20  # most steps, spread over the run, whose first answers are saved for the report, beside the last
OpenTeacher = Callable[[], AbstractAsyncContextManager[TeacherLogps | None]]
"""Starts a teacher that reads the answers of each step, or none."""
no_teacher: OpenTeacher = nullcontext


@dataclass(frozen=True, slots=True, kw_only=True)
class RlOptions:
    """Optional parts of a run, beside learner, engines and judge."""

    custom_rewards: RewardFunction = no_rewards
    inline_eval: InlineEval | None = None
    pass_rates: Mapping[str, PassRate] | None = None
    """Tags of the problems, for the curriculum."""
    open_teacher: OpenTeacher = no_teacher


def train_rl(
    setup: RlSetup,
    verify: VerifyConfig,
    *,
    problems: Path,
    telemetry: Telemetry = SILENT,
    workers: Workers | None = None,
    open_inline_eval: OpenInlineEval = no_inline_eval,
    open_teacher: OpenTeacher = no_teacher,
) -> StageSummary:
    """Train the model on problems of the configured domain; write `model` and `sample_rollouts.parquet` to the workdir.

    A rerun with the same `workdir` continues from the last checkpoint. Without `workers`, learner and engine are in
    this process. `open_inline_eval` opens the evaluator that scores the model during training (`runtime.curve`),
    `open_teacher` what `distill` learns from.

    Raise ConfigError for `distill` without a teacher, DataError if the domain has no problems or almost no group is
    trained on, CollapseError if most answers become useless, TrainingError if sampling makes no progress, too many
    updates are skipped or too many workers are lost.
    """
    cfg, workdir = setup.cfg, setup.workdir
    if (cfg.distill is None) != (open_teacher is no_teacher):
        raise ConfigError("rl.distill and a teacher need each other: give both or none")
    for loophole in cfg.reward.loopholes:
        log.warning("%s", loophole)
    workers = workers or LocalWorkers()
    chosen, choice = choose_problems(problems, cfg.domain, cfg.prompts)
    with workers.judges(verify) as judges, open_inline_eval(model_folder(setup.model)) as inline_eval:
        notes = judges.prepare(chosen)
        rewards = UserRewards(cfg.reward.custom, judges)
        with traced(workdir / TRACE_FILE), checkpoint_first():
            rates = read_pass_rates(problems) if cfg.curriculum else None
            options = RlOptions(
                custom_rewards=rewards, inline_eval=inline_eval, pass_rates=rates, open_teacher=open_teacher
            )
            state = asyncio.run(run_rl(setup, chosen, judges.judge_async, telemetry, workers, options))
    shown = _shown_folder(setup)
    # Again at the end: a short run ends before the first check in the loop.
    warnings = check_trained_share(state, cfg.runtime.informative, shown=shown)
    write_shard(workdir / SHOWN_FILE, list(read_shards(shown, ShownRollout)))  # in step order
    summary = state.summary(choice, minibatches_per_step=cfg.minibatches_per_step, seed=setup.seed)
    return summary.model_copy(update={"notes": (*cfg.reward.loopholes, *warnings, *summary.notes, *notes)})


async def run_rl(
    setup: RlSetup,
    problems: list[Problem],
    judge: Judge,
    telemetry: Telemetry,
    workers: Workers,
    options: RlOptions | None = None,
) -> RlState:
    """Run all remaining steps; after the loss of the learner, repeat the steps since its last checkpoint."""
    options = options or RlOptions()
    guard = CollapseGuard(setup.cfg, telemetry, setup.workdir / METRICS_FILE)
    try:
        async with options.open_teacher() as teacher:
            # Both spend seconds on imports, so they run concurrently.
            (learner, engine), tokenizer = await asyncio.gather(
                workers.start(setup), asyncio.to_thread(load_tokenizer, model_folder(setup.model))
            )
            while True:
                try:
                    state = RlState.of(await learner.restore())
                    learner_notes = await learner.notes()
                    # Stream and collector are rebuilt after a loss: prompts continue where the checkpoint left off.
                    stream = stream_of(setup, problems, options.pass_rates, state)
                    client = RolloutClient(
                        engine,
                        judge,
                        tokenizer,
                        setup.cfg,
                        seed=setup.seed,
                        engine_status=workers.status,
                        custom_rewards=options.custom_rewards,
                        window=engine_window(setup.model, setup.cfg.rollout.engine),
                    )
                    rollouts = rollouts_of(setup.cfg, client, stream, state)
                    step_log = StepLog(setup.cfg, state, guard, shown=_shown_folder(setup))
                    async with InlineEvals(options.inline_eval, guard, setup.cfg, workdir=setup.workdir) as evals:
                        with loop_watched("engines, ranks and judges wait for it"):
                            await run_steps(setup.cfg, learner, engine, rollouts, step_log, evals, teacher)
                    # Again for a run that was stopped in its last step, and has none left to take.
                    step_log.check()
                    state.notes = (*learner_notes, *guard.notes())
                    if not (setup.workdir / "model").exists():  # else the run was killed after its export
                        await learner.export(setup.workdir / "model")
                except LearnerLost as lost:
                    log.warning("%s; going on from its last checkpoint", lost)
                else:
                    return state
    finally:
        await workers.close()


async def run_steps(
    cfg: RlConfig,
    learner: LearnerHandle,
    engine: TrainableEngine,
    rollouts: Lookahead | ContinuousRollouts,
    step_log: StepLog,
    evals: InlineEvals,
    teacher: TeacherLogps | None = None,
) -> None:
    """Run the training loop; with `max_staleness` above 0, later groups are sampled while the learner updates, except
    in mode `delayed`."""
    state, sleeper = step_log.state, _sleeper(engine, cfg.rollout)
    # After a restore the learner has the checkpoint's weights; the engines still have those from before.
    await sync_weights(learner, engine, sleeper, version=state.step)
    evals.resume(engine, step=state.step)
    async with rollouts:
        for step in range(state.step, cfg.num_steps):
            phase = Phases()
            with phase("sample"):
                collected = await rollouts.next()
            with phase("select"):
                # The weights before this step have version `step`, because versions count the finished steps.
                oldest = step - cfg.max_staleness
                selection = to_samples(collected.kept, cfg, oldest_allowed=oldest)
                samples = selection.samples if teacher is None else await teacher(selection.samples)
                # No rollout is running now: the config refuses sleeping engines that sample while the learner works,
                # and in mode `delayed` `Lookahead.next` has waited for all batches.
                if sleeper is not None:
                    await evals.finish()
                    await sleeper.sleep()
            with phase("learn"):
                update = await learner.step(samples)
            with phase("hand over"):
                if (load := await engine_stats(engine)) is not None:
                    update |= load.metrics("rl")
                await evals.finish()  # its answers are of the weights before this step
                await sync_weights(learner, engine, sleeper, version=step + 1)
                evals.start(engine, step=step + 1)
            # The engines have the new weights now, so that more groups stay within `max_staleness` versions.
            rollouts.advance()
            step_log.log(collected, selection.reasons, update, phase.seconds)
            # After `log`, so that the checkpoint includes this step's counts.
            is_last = state.step == cfg.num_steps or stopping.is_asked()
            if state.step % cfg.runtime.checkpoint.every_steps == 0 or is_last:
                # For a node that goes on after this one, if there is a shared store.
                await asyncio.to_thread(send_work, step_log.shown_folder)
                await learner.save(state.counters())
            if is_last and state.step < cfg.num_steps:
                await learner.finish_save()
                raise StoppedEarly(f"RL was asked to stop after step {state.step}")
            step_log.check()
        await evals.finish()


class Phases:
    """Seconds that each phase of a step took, by the event loop's clock."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as the phase `name`."""
        started, began = now(), time.monotonic()
        yield
        self.seconds[name] = now() - started
        span("driver", name, began, time.monotonic())


class StepLog:
    """Count, describe and log the steps of a run."""

    def __init__(self, cfg: RlConfig, state: RlState, guard: CollapseGuard, *, shown: Path) -> None:
        """`shown` is the folder for a few steps' answers."""
        self.state, self.shown_folder = state, shown
        self._cfg = cfg
        self._guard = guard

    def log(
        self, collected: StepRollouts, reasons: ReasonCounts, update: dict[str, float], seconds: Mapping[str, float]
    ) -> None:
        """Log a finished step; `reasons` are of its selection, `update` the learner's metrics."""
        cfg, state = self._cfg, self.state
        # Before everything that reads the counts.
        collected.reasons.add(reasons)
        metrics = (
            update | describe_groups(collected.groups, collected.reasons) | describe_answers(collected.groups, cfg)
        )
        metrics |= speed(collected, update, seconds)
        count_step(state, metrics, collected, minibatches_per_step=cfg.minibatches_per_step)
        self._guard.log(metrics, step=state.step)
        self._guard.progress(state.step, cfg.num_steps, f"pass rate {state.pass_rate:.2f}")
        is_last = state.step == cfg.num_steps
        if is_last or (state.step - 1) % math.ceil(cfg.num_steps / _NUM_SHOWN) == 0:
            save_shown(self.shown_folder, collected.groups, cfg, step=state.step)

    def check(self) -> None:
        """Raise CollapseError if answers degenerate, DataError if hardly any group was trained on, once there are
        enough steps to tell."""
        self._guard.check(self.state.step)
        if self.state.step >= _CHECK_FROM_STEP:
            check_trained_share(self.state, self._cfg.runtime.informative, shown=self.shown_folder)


def count_step(
    state: RlState, metrics: dict[str, float], collected: StepRollouts, *, minibatches_per_step: int
) -> None:
    """Add a finished step to `state`; warn after the first update if every ratio was 1."""
    steps_without_update = state.steps_without_update
    state.add_step(
        metrics,
        collected.reasons,
        position=collected.position,
        sampled_tokens=collected.sampled_tokens,
        unfinished=collected.unfinished,
        curriculum=collected.curriculum,
    )
    has_update = state.steps_without_update == steps_without_update
    is_first_update = has_update and state.step == steps_without_update + 1
    if is_first_update and state.are_ratios_one():
        log.warning("step %d: %s", state.step, ratios_one_note(minibatches_per_step))


def check_trained_share(state: RlState, floor: YieldLimits, *, shown: Path) -> tuple[str, ...]:
    """Return a warning if many groups were not trained on; raise DataError if nearly all were not.

    `shown` is the folder of saved answers, of which the newest is the error's example.
    """
    what = f"prompts were trained on in {state.step} steps (last pass rate {state.pass_rate:.2f})"
    remedy = "Give it problems of another difficulty, a better model to start from, or more samples_per_group"
    return check_yield(
        state.trained(), what, floor, key="rl.runtime.informative", remedy=remedy, example=last_shown(shown)
    )


async def sync_weights(
    learner: LearnerHandle, engine: TrainableEngine, sleeper: SleepingEngine | None, *, version: int
) -> None:
    """Load the learner's weights into the engines as `version`; engines that are asleep wake first."""
    with waiting("the learner", f"give its weights, version {version}"):
        weights = await learner.weights()
    # Wake after `weights`, when the learner has freed the GPU memory that the engines need. They may be awake (first
    # call) or asleep since a learner died in the middle of a step; `wake` is right for both.
    if sleeper is not None:
        await sleeper.wake()
    with waiting("the engines", f"load the weights of version {version}"):
        await engine.load_weights(weights, version=version)


def _sleeper(engine: TrainableEngine, cfg: RolloutConfig) -> SleepingEngine | None:
    """Return the engine if it sleeps while the learner updates, else None."""
    if not cfg.sleeps_between_rollouts:
        return None
    assert isinstance(engine, SleepingEngine), type(engine)
    return engine


def speed(collected: StepRollouts, update: Mapping[str, float], seconds: Mapping[str, float]) -> dict[str, float]:
    """Return seconds by phase and tokens per second; `wait_s` is below `rollout_s` if sampling overlaps training."""
    return {
        "rl/time/rollout_s": collected.seconds,
        "rl/time/wait_s": seconds["sample"] + seconds["select"],
        "rl/time/train_s": seconds["learn"],
        "rl/time/sync_s": seconds["hand over"],
        # The floors only avoid a division by zero; a step without an applied update has no `rl/batch/tokens`.
        "rl/speed/sampled_tokens_per_s": collected.sampled_tokens / max(collected.seconds, 1e-9),
        "rl/speed/trained_tokens_per_s": update.get("rl/batch/tokens", 0.0) / max(seconds["learn"], 1e-9),
    }


def _shown_folder(setup: RlSetup) -> Path:
    """Return the folder of the answers that are saved for the report while training goes on."""
    return setup.workdir / "scratch" / "shown"


def stream_of(
    setup: RlSetup, problems: Sequence[Problem], pass_rates: Mapping[str, PassRate] | None, state: RlState
) -> PromptStream:
    """Return the stream of prompts where `state` left it."""
    curriculum = None
    if setup.cfg.curriculum is not None:
        curriculum = Curriculum(
            problems,
            setup.cfg.curriculum,
            seed=setup.seed,
            samples_per_group=setup.cfg.rollout.samples_per_group,
            pass_rates=pass_rates or {},
            step=state.step,
            state=state.curriculum,
        )
    return PromptStream(problems, seed=setup.seed, position=state.position, curriculum=curriculum)


def rollouts_of(
    cfg: RlConfig, client: RolloutClient, stream: PromptStream, state: RlState
) -> Lookahead | ContinuousRollouts:
    """Return the groups of all remaining steps, in rounds, delayed or continuously."""
    if cfg.rollout.mode == "continuous":
        return ContinuousRollouts(client, stream, cfg, step=state.step, again=state.unfinished)
    collector = Collector(client, stream, cfg)
    # Version v permits the batch of step v + depth. So no answer is more than `max_staleness` versions old.
    return Lookahead(
        collector.collect,
        depth=cfg.max_staleness,
        num_batches=cfg.num_steps - state.step,
        waits_for_all=cfg.rollout.mode == "delayed",
    )
