"""Judge answers: python judge.py ANSWERS.jsonl VERDICTS.jsonl

A row of ANSWERS has `id`, `response` and `reference`, such as {"kind": "math", "answers": ["1/2"]} or the tests of a
program, which run in a sandbox. A row of VERDICTS has `id`, `outcome`, `score` and `detail`.
"""

import sys
from pathlib import Path

import klear_core as klear


def main(answers: Path, verdicts: Path) -> None:
    """Judge each row, and print how many answers are right and what happened to the others."""
    # By default an answer must close its thinking with </think>; tags="none" looks for it in the whole text.
    summary = klear.judge_file(answers, klear.VerifyConfig(tags="none"), out=verdicts)
    print(f"{summary.num_full_score} of {summary.num_rows} right")
    # "timed_out" or "judge_failed" are faults of the judge: such an answer has no score, and is not counted as wrong.
    for outcome, count in summary.outcomes.items():
        print(f"  {outcome}: {count}")
    for row in summary.bad_rows:
        print(f"  line {row.line} was not judged: {row.reason}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
