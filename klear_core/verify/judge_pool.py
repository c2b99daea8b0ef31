"""Judge a response to a problem, from any thread or event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Self, assert_never

from klear_core.config.rewards import CustomReward
from klear_core.config.verify import VerifyConfig, source_digest
from klear_core.errors import ConfigError, JudgeError
from klear_core.prompts import NoAnswer, find_answer_text
from klear_core.types import (
    AnswerToJudge,
    CodeReference,
    CustomReference,
    JudgedAnswer,
    MathReference,
    Outcome,
    Problem,
    UnverifiableReference,
    Verdict,
)
from klear_core.verify.blame import (
    PASSED,
    TRIAL_RESPONSE,
    JudgeHealth,
    code_task,
    code_trial,
    digest_of,
    math_trial,
    unusable_tests,
)
from klear_core.verify.client import CheckSandbox, CodeTask, CodeTrial, JudgeBackend, MathTask, Task, UserTask
from klear_core.verify.code.program import check_size, find_program
from klear_core.verify.judge_calls import JudgeCalls, done_verdict, pass_on
from klear_core.verify.math.answer_text import boxed_texts, find_answer, quoted
from klear_core.verify.math.rules import compared_texts, decide, unboxed_verdict, usable_references
from klear_core.verify.sandbox.jail_command import has_numpy, python_for

_LOG = logging.getLogger(__name__)
_TRIALS_AT_A_TIME = 256
"""Trials of references in flight, so that the tests of all of them are not in memory at once."""
_SHOWN_FAULTS = 3


class JudgePool:
    """Judges answers. Thread-safe; worker processes start with the first answer that needs one and end at `close`."""

    def __init__(self, cfg: VerifyConfig, backend: JudgeBackend | None = None) -> None:
        """Hash the sources of the user's judges. Raise ConfigError if one is missing.

        `backend` computes the verdicts: by default a process of its own on this machine, which always calls the user's
        functions.
        """
        self.cfg = cfg
        self._judges = {judge.name: (judge, source_digest(judge.module)) for judge in cfg.all_judges}
        self.health = JudgeHealth(max_failed_frac=cfg.max_failed_frac, min_failed_count=cfg.min_failed_count)
        self._calls = JudgeCalls(cfg, backend)
        self._trials_lock = threading.Lock()
        self._trials: dict[MathReference | bytes, Verdict | Future[Verdict]] = {}
        """Trials of references; those in which the judge or the machine failed are not kept."""
        self._has_programs = False
        """Whether a program was to be judged."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all judging processes."""
        self._calls.close()

    @property
    def notes(self) -> tuple[str, ...]:
        """Return warnings about the judging of programs, to be stored with the stage's artifact."""
        notes = []
        if self.cfg.sandbox == "rlimits-only":
            notes.append('untrusted programs ran with limits only, without isolation (verify.sandbox = "rlimits-only")')
        if self._has_programs and self.cfg.code.packages and not has_numpy(python_for(self.cfg.limits)):
            notes.append(
                f"{python_for(self.cfg.limits)} has no numpy, as LiveCodeBench's harness has: programs that import it "
                "are wrong (sh infra/firejail/setup.sh installs it)"
            )
        return tuple(notes)

    def check_sandbox(self) -> str:
        """Check that the sandbox isolates programs and return its name. Call this before spending compute.

        Raise SandboxError, which says what is missing.
        """
        return self._calls.submit(CheckSandbox()).result().detail

    def prepare(self, problems: Iterable[Problem]) -> tuple[str, ...]:
        """Check the sandbox, if there is a code problem, and try all references, before compute is spent.

        Return `notes`, and one more on the references that cannot be used. Raise SandboxError, which says what is
        missing, and ConfigError for a reference whose judge is unknown.
        """
        has_code = False
        problems = list(problems)
        for problem in problems:
            if isinstance(problem.reference, CustomReference) and problem.reference.judge not in self._judges:
                raise ConfigError(
                    f"problem {problem.problem_id} of {problem.source}: {self._unknown(problem.reference)}"
                )
            has_code |= isinstance(problem.reference, CodeReference)
        if has_code:
            self.check_sandbox()
            self._has_programs = True
        return (self.notes if has_code else ()) + self.notes_on_trials(problems)

    def judge(self, problem: Problem, response: str) -> Verdict:
        """Return the verdict on a complete model output, think tags included.

        Raise JudgeError or SandboxError only, which are failures of the judge or sandbox.
        """
        verdict = self.submit(problem, response).result()
        self.health.record(verdict)
        return verdict

    async def judge_async(self, problem: Problem, response: str) -> Verdict:
        """Return the verdict as `judge` does, without blocking the event loop."""
        future = self.submit(problem, response)
        # Many math answers are decided by text, at once: they need no turn of the event loop.
        verdict = future.result() if future.done() else await asyncio.wrap_future(future)
        self.health.record(verdict)
        return verdict

    def submit(self, problem: Problem, response: str) -> Future[Verdict]:
        """Return a future of the verdict, which is not yet counted in `health`."""
        if isinstance(problem.reference, UnverifiableReference):
            detail = f"problem {problem.problem_id}: {problem.reference.why}"
            return done_verdict(Verdict(outcome=Outcome.UNVERIFIABLE, score=0.0, detail=detail))
        answer_text = find_answer_text(response, self.cfg)  # the part of the response in which an answer may be
        if isinstance(answer_text, NoAnswer):
            # The reference first, as for any answer: otherwise answers without tags would be the only ones that count.
            missing = _no_answer_verdict(answer_text)
            return self._after(self.try_reference(problem), lambda _: missing)
        reference = problem.reference
        match reference:
            case MathReference():
                trial = self._trial(problem.problem_id, reference)
                return self._after(trial, lambda _: self._prepare_math(reference, answer_text))
            case CodeReference():
                program = find_program(answer_text, self.cfg.code)
                return self._submit_code(problem.problem_id, reference, program)
            case CustomReference():
                return self._submit_custom(problem, reference, response, answer_text)
            case _:
                assert_never(reference)

    def submit_program(self, problem_id: str, reference: CodeReference, program: str) -> Future[Verdict]:
        """Return a future of the verdict on a program that is already extracted from its response."""
        return self._submit_code(problem_id, reference, check_size(program, self.cfg.code))

    def try_reference(self, problem: Problem, *, run_tests: bool = True) -> Future[Verdict]:
        """Return a future of the verdict on a problem's reference alone: SCORED if answers can be judged by it.

        Without `run_tests` a reference's own programs are not run, so that no sandbox is needed.
        """
        reference = problem.reference
        match reference:
            case MathReference():
                return self._trial(problem.problem_id, reference)
            case CodeReference():
                trial = code_trial(problem.problem_id, reference, self.cfg)
                if isinstance(trial, Verdict) or not run_tests:
                    return done_verdict(trial if isinstance(trial, Verdict) else PASSED)
                return self._trial(problem.problem_id, reference)
            case CustomReference():
                return self._judge_trial(problem, reference)
            case UnverifiableReference():
                return self.submit(problem, TRIAL_RESPONSE)
            case _:
                assert_never(reference)

    def submit_reward(self, reward: CustomReward, digest: str, answer: JudgedAnswer) -> Future[Verdict]:
        """Return a future of the value of a user's reward: the score of a verdict, SCORED unless the function failed.

        The value is FAILED_ON_ANSWER if it failed on this answer, and works on a trivial one to the same problem.
        `digest` is the `source_digest` that its module must have.
        """
        return self._calls.submit(UserTask(function=reward, digest=digest, answer=answer))

    def _trial(self, problem_id: str, reference: MathReference | CodeReference) -> Future[Verdict]:
        """Return a future of the trial of a reference; it is made once and remembered, unless the machine failed."""
        if isinstance(reference, MathReference):
            return self._once(reference, lambda: self._calls.submit(self._math_trial(reference)))
        prepared = code_trial(problem_id, reference, self.cfg)
        if isinstance(prepared, Verdict):
            return done_verdict(prepared)
        # The key is not the reference itself: its tests may be large.
        return self._once(digest_of(prepared), lambda: self._calls.submit(prepared))

    def _judge_trial(self, problem: Problem, reference: CustomReference) -> Future[Verdict]:
        """Return a future of the trial of a user's judge on a problem, remembered as that of our own references."""
        task = self._user_task(problem, reference, TRIAL_RESPONSE, TRIAL_RESPONSE)
        if isinstance(task, Verdict):
            return done_verdict(task)
        return self._once(digest_of(task), lambda: self._calls.probe(task))

    def _once(self, key: MathReference | bytes, start: Callable[[], Future[Verdict]]) -> Future[Verdict]:
        with self._trials_lock:
            known = self._trials.get(key)
            trial: Future[Verdict] = Future()
            if known is None:
                trial.set_running_or_notify_cancel()
                self._trials[key] = trial
        if known is not None:
            return done_verdict(known) if isinstance(known, Verdict) else known
        start().add_done_callback(lambda done: self._remember(key, trial, done))
        return trial

    def _math_trial(self, reference: MathReference) -> Verdict | Task:
        try:
            return math_trial(reference, self.cfg.math)
        except Exception as e:  # noqa: BLE001  whoever waits for this trial must get its result
            detail = f"text rules raised on the reference: {type(e).__name__}: {e}"
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)

    def _remember(self, key: MathReference | bytes, trial: Future[Verdict], done: Future[Verdict]) -> None:
        """Resolve a trial; keep its verdict unless the judge or the machine failed."""
        verdict = None if done.exception() is not None else done.result()
        with self._trials_lock:
            if isinstance(verdict, CodeTrial) and verdict.unusable:
                self._trials[key] = verdict
            elif verdict is not None and verdict.outcome is Outcome.SCORED:
                self._trials[key] = PASSED  # one object for all
            elif verdict is not None and verdict.outcome is Outcome.BAD_REFERENCE:
                self._trials[key] = verdict
            else:
                del self._trials[key]
        pass_on(trial, done)

    def _after(self, trial: Future[Verdict], prepare: Callable[[Verdict], Verdict | Task]) -> Future[Verdict]:
        """Return a future of the verdict on an answer once the trial has passed, else of the trial's own verdict.

        `prepare` gets the verdict of the trial.
        """

        def follow(done: Future[Verdict]) -> Future[Verdict]:
            if done.exception() is not None or not done.result().outcome.counts_for_model:
                return done
            return self._calls.submit(prepare(done.result()))

        if trial.done():
            return follow(trial)
        verdict: Future[Verdict] = Future()
        verdict.set_running_or_notify_cancel()  # as in `JudgeCalls.submit`

        def go_on(done: Future[Verdict]) -> None:
            try:
                follow(done).add_done_callback(lambda last: pass_on(verdict, last))
            except Exception as e:  # noqa: BLE001  a future swallows what its callbacks raise, and ours would never end
                verdict.set_exception(e)

        trial.add_done_callback(go_on)
        return verdict

    def notes_on_trials(self, problems: Sequence[Problem]) -> tuple[str, ...]:
        """Try all math and code references; return notes on those that cannot be used as a whole or in part."""
        ours = [p for p in problems if isinstance(p.reference, MathReference | CodeReference)]
        faults: list[str] = []
        partial: list[str] = []
        counts = Counter[str]()
        for start in range(0, len(ours), _TRIALS_AT_A_TIME):
            batch = ours[start : start + _TRIALS_AT_A_TIME]
            for problem, trial in [(problem, self.try_reference(problem)) for problem in batch]:
                verdict = trial.result()
                if not verdict.outcome.counts_for_model:
                    counts[verdict.outcome] += 1
                    faults.append(f"problem {problem.problem_id}: {verdict.detail}")
                partial += unusable_tests(problem, verdict)
        notes = []
        if faults:
            lost = ", ".join(f"{num} {outcome}" for outcome, num in counts.items())
            whose = f"{len(faults)} of {len(ours)} references cannot be used ({lost}), their answers get no score"
            notes.append(f"{whose}: {'; '.join(faults[:_SHOWN_FAULTS])}")
        if partial:
            whose = f"{len(partial)} of {len(ours)} references have tests that cannot be used, which are left out"
            notes.append(f"{whose}: {'; '.join(partial[:_SHOWN_FAULTS])}")
        return tuple(notes)

    def _prepare_math(self, reference: MathReference, answer_text: str) -> Verdict | MathTask:
        cfg = self.cfg.math
        golds = usable_references(reference.answers, cfg)
        answer = find_answer(answer_text, cfg)
        if isinstance(answer, NoAnswer):
            return _no_answer_verdict(answer)
        shown = quoted(compared_texts(golds[0], answer, cfg))
        try:
            decision = unboxed_verdict(golds, answer, cfg) if answer.is_unboxed else decide(golds, answer, cfg)
        except Exception as e:  # noqa: BLE001  the reference passed the same rules: this is about the answer
            _LOG.warning("text rules raised on the answer %s: %r", shown, e)
            detail = f"answer {shown} is wrong: text rules raised {type(e).__name__}"
            return Verdict(outcome=Outcome.SCORED, score=0.0, detail=detail)
        if decision is None:  # text rules do not decide, so a worker must parse the unboxed text
            return MathTask(golds=golds, comparison=None, unboxed=answer.texts[0], answer=shown, cfg=cfg)
        if isinstance(decision, bool):
            relation = "matches" if decision else "does not match"
            detail = f"answer {shown} {relation} the reference, by text rules"
            return Verdict(outcome=Outcome.SCORED, score=float(decision), detail=detail)
        return MathTask(golds=golds, comparison=decision, unboxed="", answer=shown, cfg=cfg)

    def _submit_code(self, problem_id: str, reference: CodeReference, program: str | NoAnswer) -> Future[Verdict]:
        self._has_programs = True

        def prepare(trial: Verdict) -> Verdict | CodeTask:
            if isinstance(program, NoAnswer):
                return _no_answer_verdict(program)
            # surrogatepass: a model can write half of a surrogate pair, which UTF-8 refuses.
            task = code_task(problem_id, reference, program.encode("utf-8", "surrogatepass"), self.cfg)
            if not isinstance(trial, CodeTrial):
                return task
            return dataclasses.replace(task, left_out=tuple(number for number, _ in trial.unusable))

        # Before the program is looked at: a reference that cannot be used is no fault of a model without a program.
        return self._after(self._trial(problem_id, reference), prepare)

    def _submit_custom(
        self, problem: Problem, reference: CustomReference, response: str, answer_text: str
    ) -> Future[Verdict]:
        trial = self._judge_trial(problem, reference)
        return self._after(trial, lambda _: self._user_task(problem, reference, response, answer_text))

    def _user_task(
        self, problem: Problem, reference: CustomReference, response: str, answer_text: str
    ) -> Verdict | UserTask:
        if reference.judge not in self._judges:
            detail = f"problem {problem.problem_id}: {self._unknown(reference)}"
            return Verdict(outcome=Outcome.BAD_REFERENCE, score=0.0, detail=detail)
        judge, digest = self._judges[reference.judge]
        boxes = boxed_texts(answer_text)
        answer = AnswerToJudge(
            problem_id=problem.problem_id,
            source=problem.source,
            question=problem.question,
            reference=json.loads(reference.value_json),
            answer=answer_text,
            box=boxes[-1] if boxes else None,
            response=response,
        )
        return UserTask(function=judge, digest=digest, answer=answer)

    def _unknown(self, reference: CustomReference) -> str:
        return f"verify.judges has no judge {reference.judge!r}; it has {', '.join(self._judges) or 'none'}"


def _no_answer_verdict(missing: NoAnswer) -> Verdict:
    return Verdict(outcome=Outcome.NO_ANSWER, score=0.0, detail=missing.reason)


# ---- faulty references ----


def faulty_references(
    problems: Iterable[Problem], judges: JudgePool, *, run_tests: bool
) -> list[tuple[Problem, Verdict]]:
    """Return the problems whose answers cannot be judged, each with a verdict that says why.

    These include problems on which a judge of the user's own fails. `run_tests` also tries the references' own
    programs, in the sandbox, which must isolate. Raise JudgeError if the judge itself fails.
    """
    tried = [(problem, judges.try_reference(problem, run_tests=run_tests)) for problem in problems]
    faults: list[tuple[Problem, Verdict]] = []
    for problem, future in tried:
        verdict = future.result()
        is_ours = not isinstance(problem.reference, CustomReference)
        if is_ours and verdict.outcome in (Outcome.JUDGE_FAILED, Outcome.SANDBOX_FAILED, Outcome.TIMED_OUT):
            raise JudgeError(f"problem {problem.problem_id}: {verdict.outcome}: {verdict.detail}")
        if not verdict.outcome.counts_for_model:
            faults.append((problem, verdict))
    return faults
