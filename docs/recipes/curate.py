"""Curate files: python curate.py OUT EXAM.jsonl FILE...

Files are JSONL, JSON or Parquet in a published schema, or rows of `question` and `reference`. OUT gets `problems` and
`dropped`, both in Parquet, and the page `leaks.html`. Questions of EXAM, which will measure the model, are kept out.
"""

import sys
from pathlib import Path

import klear_core as klear


def main(out: Path, exam: Path, *files: Path) -> None:
    """Remove repeats, near-repeats and questions of the exam, and print what each step dropped and why."""
    cfg = klear.CurateConfig(
        sources=[str(file) for file in files],
        dedup={"near": {"threshold": 0.7}},  # share of common shingles; different numbers make another problem
        decontaminate={"also": [klear.FileSource(path=str(exam))]},
    )
    summary = klear.curate(cfg, workdir=out)
    for step in summary.ledger:
        reasons = ", ".join(f"{count} {reason}" for reason, count in step.dropped.items())
        print(f"{step.step}: {step.num_in} -> {step.num_out} {step.unit}s {reasons}")
    for note in summary.notes:
        print(note)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
