"""Judge the published solutions of programming problems once, to find tests that a right program does not pass."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from klear_core.artifacts.manifest import LedgerStep
from klear_core.artifacts.records import shard_name, write_shard
from klear_core.config.verify import VerifyConfig
from klear_core.data.benchmarks import listed
from klear_core.data.candidates import Candidate
from klear_core.data.curation.write import State, candidates_of
from klear_core.errors import SandboxError
from klear_core.metrics import Telemetry
from klear_core.types import CodeReference, Outcome, Verdict
from klear_core.verify.judge_pool import JudgePool

FAILING = "failing_solutions"
"""Table of the problems whose published solution fails, and ledger step of the check."""
OpenJudges = Callable[[], AbstractContextManager[Callable[[VerifyConfig], JudgePool]]]
"""Opens what builds the judges, such as those of all nodes of a cluster; called only if there is something to judge."""
_PROBLEMS_PER_FILE = 256
"""Problems that are judged between two files: a killed curation repeats at most so many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FailingSolution:
    """A problem whose published solution does not pass its tests. It is kept: the solution may be what is wrong."""

    problem_id: str
    source: str
    row: str
    outcome: str
    """`scored` if tests were failed; else why there is no verdict."""
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionCheck:
    """The ledger step of the check, and what to tell the reader; nothing if no problem has a solution."""

    ledger: tuple[LedgerStep, ...] = ()
    notes: tuple[str, ...] = ()


def judges_here() -> AbstractContextManager[Callable[[VerifyConfig], JudgePool]]:
    """Open the judges of this machine."""
    return nullcontext(JudgePool)


def check_solutions(
    state: State, workdir: Path, verify: VerifyConfig, telemetry: Telemetry, open_judges: OpenJudges = judges_here
) -> SolutionCheck:
    """Judge the published solution of every kept problem that has one, by all of its tests, in the sandbox.

    Write those that fail to `failing_solutions/*.parquet`. What was judged before a kill is not judged again. Without a
    sandbox nothing is run, and a note says so.
    """
    if not state.segments.num_candidates:
        return SolutionCheck()
    kept = state.merged.kept
    solved = np.array(kept[state.segments.column("is_solved")[kept]])
    if not len(solved):
        return SolutionCheck()
    parts = [solved[i : i + _PROBLEMS_PER_FILE] for i in range(0, len(solved), _PROBLEMS_PER_FILE)]
    files = [state.folder / "solutions" / f"{number:05d}.json" for number in range(len(parts))]
    verify = verify.model_copy(update={"code": verify.code.model_copy(update={"max_tests": 0})})
    with open_judges() as build_judges, build_judges(verify) as judges:
        try:
            judges.check_sandbox()
        except SandboxError as e:
            return SolutionCheck(notes=(f"the published solutions of {len(solved):,} problems were not run: {e}",))
        for number, (part, file) in enumerate(zip(parts, files, strict=True)):
            telemetry.progress(number, len(parts), "solutions")
            if not file.exists():
                _write(file, list(_judged(candidates_of(state, part), judges)))
        notes = judges.notes
    failing = [FailingSolution(**row) for file in files for row in json.loads(file.read_text())]
    write_shard(workdir / FAILING / shard_name(0, 1), failing)
    noted = Counter("fails_its_tests" if one.outcome == Outcome.SCORED else one.outcome for one in failing)
    step = LedgerStep.of(FAILING, "problem", num_in=len(solved), dropped={}, noted=dict(sorted(noted.items())))
    if failing:
        shown = listed([f"problem {one.problem_id} ({one.row}): {one.detail}" for one in failing])
        notes += (f"{len(failing):,} of {len(solved):,} published solutions do not pass the tests: {shown}",)
    return SolutionCheck(ledger=(step,), notes=notes)


def _judged(candidates: Sequence[Candidate], judges: JudgePool) -> Iterator[FailingSolution]:
    """Yield the candidates whose solutions fail."""
    verdicts = []
    for candidate in candidates:
        assert isinstance(candidate.reference, CodeReference), candidate.row
        verdicts.append(judges.submit_program(candidate.problem_id, candidate.reference, candidate.solution))
    for candidate, judged in zip(candidates, verdicts, strict=True):
        verdict: Verdict = judged.result()
        if verdict.outcome is not Outcome.SCORED or verdict.score < 1:
            yield FailingSolution(
                problem_id=candidate.problem_id,
                source=candidate.source,
                row=candidate.row,
                outcome=verdict.outcome,
                detail=verdict.detail,
            )


def _write(file: Path, failing: Sequence[FailingSolution]) -> None:
    file.parent.mkdir(exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(one) for one in failing]))
    temporary.replace(file)
