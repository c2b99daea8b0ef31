"""Score a model while it trains, on a small fixed set of problems."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from klear_core.config.pipeline import InlineEvalJob
from klear_core.config.settings import Settings
from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import load_benchmark
from klear_core.errors import ResourceError
from klear_core.evaluate.counts import AnswerCounts, tally
from klear_core.evaluate.sample import EngineAnswerer, PlannedAnswer, in_prompt, judge_response, sampling_params
from klear_core.generate.engine import InferenceEngine
from klear_core.generate.factory import EngineSpec, StartSampler, running, start_here
from klear_core.prompts import load_tokenizer, opening_of, render_prompt
from klear_core.seeding import seed_for
from klear_core.stopping import die_with_parent
from klear_core.types import EvalSample, Judge, Problem
from klear_core.verify import JudgePool


def fixed_set(job: InlineEvalJob, *, seed: int) -> tuple[Problem, ...]:
    """Return the problems of the fixed set: the same for every stage and step of a run.

    They are the first in an order by a hash of seed and problem id, so that a larger set contains a smaller one. Raise
    DataError as `load_benchmark` does.
    """
    problems = load_benchmark(job.source, seed=seed)
    drawn = sorted(problems, key=lambda problem: seed_for(seed, "evaluate/curve", problem.problem_id))
    return tuple(drawn[: job.curve.num_problems])


@contextmanager
def open_inline_eval(
    job: InlineEvalJob, judges: Callable[[VerifyConfig], JudgePool], folder: Path, *, seed: int
) -> Iterator[CheckpointInlineEval]:
    """Yield the evaluation of models with the tokenizer in `folder`. Its judges are its own, and end with the context.

    Raise DataError or SandboxError, before training begins, if the problems cannot be read or judged.
    """
    problems = fixed_set(job, seed=seed)
    tokenizer = load_tokenizer(folder)
    with judges(job.verify) as pool:
        pool.prepare(problems)
        yield CheckpointInlineEval(
            job=job,
            problems=problems,
            render=partial(render_prompt, tokenizer),
            judge=pool.judge_async,
            opening=opening_of(tokenizer),
            seed=seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInlineEval:
    """Answers and judges the fixed set with whatever weights an engine has."""

    job: InlineEvalJob
    problems: Sequence[Problem]
    render: Callable[[str], tuple[int, ...]]
    """Turns a question into prompt token ids."""
    judge: Judge
    opening: str
    """Start of every response that is part of the prompt (`<think>`); see `opening_of`."""
    seed: int

    async def __call__(self, engine: InferenceEngine) -> dict[str, float]:
        """Return the score with its intervals and what stands beside it, by the last part of the metric's name.

        All answers have the same seeds at every step, so unchanged weights give an unchanged score. Answers that could
        not be judged count only in their share; if no answer was judged, there is no score.
        """
        planned: list[PlannedAnswer] = []
        for problem in self.problems:
            for i in range(self.job.curve.num_samples):
                planned.append(
                    PlannedAnswer(benchmark=self.job.source.name, problem=problem, decoding="sampled", sample_idx=i)
                )
        answerer = EngineAnswerer(engine=engine, render=self.render, opening=self.opening)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(answerer, answer)) for answer in planned]
        except ExceptionGroup as errors:
            # The first ended the others. Callers retry and report by an error's type and message, which a group hides.
            raise errors.exceptions[0] from None
        counts = tally([task.result() for task in tasks], self.problems)["sampled"]
        return scores_of(counts, confidence=self.job.confidence)

    async def _answer(self, answerer: EngineAnswerer, planned: PlannedAnswer) -> EvalSample:
        params = sampling_params(self.job.sampling, planned, seed=self.seed)
        question = in_prompt(planned.problem.question, self.job.source.prompt, planned.problem.domain)
        response = await answerer.answer(planned, question, params)
        return await judge_response(planned, question, response, self.judge)


async def score_with(
    inline_eval: CheckpointInlineEval, start_sampler: StartSampler, spec: EngineSpec
) -> dict[str, float]:
    """Start an engine as `spec` says, score its model, and stop the engine; return the scores."""
    async with running(start_sampler, spec) as sampler:
        return await inline_eval(sampler.engine)


def spec_of(job: InlineEvalJob, model: Path, *, seed: int) -> EngineSpec:
    """Return the engine that scores the model in a Hugging Face folder."""
    assert job.scorer is not None, "the engines of the stage answer"
    return EngineSpec(
        cfg=job.scorer.engine,
        model_folder=model,
        num_threads=job.scorer.num_threads,
        seed=seed_for(seed, "evaluate/curve/engine"),
        answer_tokens=job.sampling.max_new_tokens,
    )


def scores_of(counts: AnswerCounts, *, confidence: float) -> dict[str, float]:
    """Return the scores by the last part of each metric's name."""
    scores = {
        "truncated_frac": counts.truncated_frac,
        "unscored_frac": counts.unscored.total() / counts.num_answers,
        "tokens_mean": counts.num_tokens / counts.num_answers,
    }
    score = counts.score(confidence=confidence)
    if score is None:
        return scores
    scores |= {"avg": score.value, "avg_low": score.new_problems.low, "avg_high": score.new_problems.high}
    if score.rerun is not None:
        scores |= {"avg_rerun_low": score.rerun.low, "avg_rerun_high": score.rerun.high}
    return scores


# ---- model process ----
# Score models on the fixed set, each in a process of its own beside the training.
#
# Scoring therefore cannot affect the training process: not its threads, nor its random numbers, nor by an engine's
# crash.


class ScoreRequest(Settings):
    """The input of the process, as JSON."""

    job: InlineEvalJob
    model: Path
    """Hugging Face folder."""
    seed: int


class ProcessScorer:
    """Starts a process for each model; see `ModelScorer`."""

    def __init__(self, job: InlineEvalJob, *, seed: int, hides_gpus: bool = False) -> None:
        """`hides_gpus` keeps the engine off GPUs, all of which have other work."""
        self._job = job
        self._seed = seed
        self._hides_gpus = hides_gpus
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def score(self, model: Path) -> dict[str, float]:
        """Return the scores of a model. Raise ResourceError if the process fails, with the last line that it wrote."""
        request = ScoreRequest(job=self._job, model=model, seed=self._seed)
        process = self._start()
        # Thread and process end together: the kernel kills the process if this thread is gone; see `main`.
        written, complaints = process.communicate(request.model_dump_json().encode())
        with self._lock:
            self._process = None
        if process.returncode != 0:
            last = complaints.decode(errors="replace").strip().rpartition("\n")[2]
            raise ResourceError(f"the scoring process ended with exit status {process.returncode}: {last}")
        # Libraries may print before.
        scores: dict[str, float] = json.loads(written.decode().strip().rpartition("\n")[2])
        return scores

    def stop(self) -> None:
        """Kill the process that runs, with those of its engine, and start no more."""
        with self._lock:
            self._is_stopped = True
            if self._process is not None and self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    def _start(self) -> subprocess.Popen[bytes]:
        hidden = {"CUDA_VISIBLE_DEVICES": ""} if self._hides_gpus else {}
        with self._lock:
            if self._is_stopped:
                raise ResourceError("the scorer was stopped")
            self._process = subprocess.Popen(
                [sys.executable, "-m", "klear_core.evaluate.inline_eval"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,  # Ctrl-C is for the run, which then stops the scorer
                env=os.environ | hidden,
            )
            return self._process


@contextmanager
def process_scorer(job: InlineEvalJob, folder: Path, *, seed: int, hides_gpus: bool = False) -> Iterator[ProcessScorer]:
    """Yield a scorer of models with the tokenizer of `folder`; raise what `open_inline_eval` raises, before spending.

    Judges are on this machine, in the scorer's processes.
    """
    # Opened and closed again only to raise now what every scoring process would raise after training has begun.
    with open_inline_eval(job, JudgePool, folder, seed=seed):
        pass
    yield ProcessScorer(job, seed=seed, hides_gpus=hides_gpus)


def main() -> None:
    """Read a request from standard input, and write the scores as the last line of standard output."""
    # A run that is killed cannot end this process itself.
    die_with_parent()
    request = ScoreRequest.model_validate_json(sys.stdin.buffer.read())
    job, seed = request.job, request.seed
    with open_inline_eval(job, JudgePool, request.model, seed=seed) as inline_eval:
        scores = asyncio.run(score_with(inline_eval, start_here, spec_of(job, request.model, seed=seed)))
    sys.stdout.write(json.dumps(scores, allow_nan=False) + "\n")


if __name__ == "__main__":
    main()
