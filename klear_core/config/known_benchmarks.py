"""List the published benchmarks that a config can name: their size, dates, and repository on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from klear_core.config.settings import Settings


class DateWindow(Settings):
    """The problems of contests from the first day on, up to but without the last."""

    start: date
    """First day."""
    end: date
    """The day after the last."""

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if self.start >= self.end:
            raise ValueError(f"the window's start, {self.start}, is not before its end, {self.end}")
        return self

    def __str__(self) -> str:
        return f"{self.start} to {self.end}"

    def __contains__(self, day: date) -> bool:
        return self.start <= day < self.end


class KnownBenchmark(Settings):
    """Facts about a published benchmark that do not depend on who packed its file."""

    title: str
    rows: int = Field(ge=1)
    """Number of problems; a file with another number is another benchmark."""
    published: date
    """First day on which one of its problems was public, or earlier."""
    repo: str
    """Dataset repository on the Hub."""
    revision: str = ""
    """Commit of the repository that public programs pin; empty: none is known to us."""
    files: str = ""
    """Pattern of its data files in the repository."""
    subset: str = ""
    split: str = ""
    row_schema: str
    window: DateWindow | None = None
    """Days of the contests that its problems are of."""
    num_samples: int = 4
    """n of avg@n that is customary."""
    checked: Literal["rows", "questions", "code", "memory"]
    """Evidence for rows and columns. `rows`: real rows were read; `questions`: real rows without their tests; `code`:
    public programs that read the repository; `memory`: none, nothing was compared."""
    note: str = ""


_MATH = "math_benchmark"
_LCB_REPO = "livecodebench/code_generation_lite"
_LCB_REVISION = "0fe84c3912ea0c4d4a78037083943e8f0c4dd505"

KNOWN_BENCHMARKS: Mapping[str, KnownBenchmark] = {
    "aime24": KnownBenchmark(
        title="AIME 2024",
        rows=30,
        published=date(2024, 1, 31),
        repo="HuggingFaceH4/aime_2024",
        revision="2fe88a2f1091d5048c0f36abc874fb997b3dd99a",
        row_schema=_MATH,
        num_samples=64,
        checked="rows",
    ),
    "aime25": KnownBenchmark(
        title="AIME 2025",
        rows=30,
        published=date(2025, 2, 6),
        repo="math-ai/aime25",
        revision="563bb8404243c5f09de6ec262f2db674fe5bce9b",
        row_schema=_MATH,
        num_samples=64,
        checked="rows",
    ),
    "aime26": KnownBenchmark(
        title="AIME 2026",
        rows=30,
        published=date(2026, 2, 5),
        repo="MathArena/aime_2026",
        revision="10b4e45b7a503075d4da8a0d57916a4f06ce6bd2",
        row_schema=_MATH,
        num_samples=64,
        checked="code",
    ),
    "hmmt25": KnownBenchmark(
        title="HMMT February 2025",
        rows=30,
        published=date(2025, 2, 15),
        repo="MathArena/hmmt_feb_2025",
        revision="6fdc4277120810ff75aa22d2d5489b91f7a262a1",
        row_schema=_MATH,
        num_samples=64,
        checked="rows",
    ),
    "hmmt26": KnownBenchmark(
        title="HMMT February 2026",
        rows=33,
        published=date(2026, 2, 14),
        repo="MathArena/hmmt_feb_2026",
        revision="02fba4f74d8e68e73e66a02d540fd979c05c274c",
        row_schema=_MATH,
        num_samples=64,
        checked="code",
        note="33 problems, where the year before had 30",
    ),
    "brumo25": KnownBenchmark(
        title="BRUMO 2025",
        rows=30,
        published=date(2025, 4, 4),
        repo="MathArena/brumo_2025",
        row_schema=_MATH,
        num_samples=64,
        checked="code",
    ),
    "math500": KnownBenchmark(
        title="MATH-500",
        rows=500,
        published=date(2021, 3, 5),
        repo="HuggingFaceH4/MATH-500",
        revision="6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be",
        row_schema=_MATH,
        checked="rows",
    ),
    "amc23": KnownBenchmark(
        title="AMC 12 2023",
        rows=40,
        published=date(2023, 11, 8),
        repo="math-ai/amc23",
        row_schema=_MATH,
        num_samples=64,
        checked="rows",
    ),
    "olympiadbench": KnownBenchmark(
        title="OlympiadBench",
        rows=674,
        published=date(2024, 2, 21),
        repo="Hothan/OlympiadBench",
        revision="91184b52131e7fc9455fef848035173aea8cc01a",
        subset="OE_TO_maths_en_COMP",
        row_schema=_MATH,
        checked="code",
        note="open-ended, text only, mathematics, English; its problems are of older contests",
    ),
    "minerva": KnownBenchmark(
        title="Minerva",
        rows=272,
        published=date(2022, 6, 29),
        repo="math-ai/minervamath",
        row_schema=_MATH,
        checked="memory",
        note="its problems are of older courses",
    ),
    "beyond_aime": KnownBenchmark(
        title="BeyondAIME",
        rows=100,
        published=date(2025, 4, 10),
        repo="ByteDance-Seed/BeyondAIME",
        split="test",
        row_schema=_MATH,
        num_samples=8,
        checked="code",
    ),
    "apex25": KnownBenchmark(
        title="MathArena Apex 2025",
        rows=12,
        published=date(2025, 1, 1),
        repo="MathArena/apex_2025",
        row_schema=_MATH,
        num_samples=16,
        checked="code",
        note="its first commits lack the three problems of SMT 2025",
    ),
    "arxivmath_0526": KnownBenchmark(
        title="ArXivMath, May 2026",
        rows=40,
        published=date(2026, 4, 30),
        repo="MathArena/arxivmath-0526",
        revision="69f701c7f266bfba235ef302ff9b19093f7455bb",
        row_schema=_MATH,
        checked="code",
        note="MathArena publishes one a month",
    ),
    "gpqa_diamond": KnownBenchmark(
        title="GPQA-Diamond",
        rows=198,
        published=date(2023, 11, 20),
        repo="Idavidrein/gpqa",
        revision="633f5ee89ab8ad4522a9f850766b73f62147ffdd",
        files="gpqa_diamond.csv",
        row_schema="gpqa",
        checked="code",
        note="multiple choice; its repository asks for an account that has accepted its terms",
    ),
    "mmlu_pro": KnownBenchmark(
        title="MMLU-Pro, test",
        rows=12032,
        published=date(2020, 9, 7),
        repo="TIGER-Lab/MMLU-Pro",
        revision="b189ec765aa7ed75c8acfea42df31fdae71f97be",
        split="test",
        row_schema="mmlu_pro",
        num_samples=1,
        checked="code",
        note="multiple choice, up to ten options; part of it is MMLU",
    ),
    "ifeval": KnownBenchmark(
        title="IFEval, strict",
        rows=541,
        published=date(2023, 11, 14),
        repo="google/IFEval",
        split="train",
        row_schema="ifeval",
        num_samples=1,
        checked="rows",
        note="an answer is right if it follows all instructions of its prompt",
    ),
    "ifeval_loose": KnownBenchmark(
        title="IFEval, loose",
        rows=541,
        published=date(2023, 11, 14),
        repo="google/IFEval",
        split="train",
        row_schema="ifeval_loose",
        num_samples=1,
        checked="rows",
        note="the same answers without first line, last line or asterisks, where that helps",
    ),
    "gsm8k": KnownBenchmark(
        title="GSM8K, test",
        rows=1319,
        published=date(2021, 10, 27),
        repo="openai/gsm8k",
        revision="740312add88f781978c0658806c59bc2815b9866",
        subset="main",
        split="test",
        row_schema="gsm8k",
        checked="rows",
    ),
    "lcb_v5": KnownBenchmark(
        title="LiveCodeBench v5",
        rows=279,
        published=date(2024, 8, 1),
        repo=_LCB_REPO,
        revision=_LCB_REVISION,
        files="tes*[!6].jsonl",  # release 5: test.jsonl to test5.jsonl
        row_schema="lcb",
        window=DateWindow(start=date(2024, 8, 1), end=date(2025, 2, 1)),
        num_samples=8,
        checked="questions",
        note="of release 5; release 6 has 44 more problems in this window",
    ),
    "lcb_v6": KnownBenchmark(
        title="LiveCodeBench v6",
        rows=131,
        published=date(2025, 2, 1),
        repo=_LCB_REPO,
        revision=_LCB_REVISION,
        files="test6.jsonl",
        row_schema="lcb",
        window=DateWindow(start=date(2025, 2, 1), end=date(2025, 5, 1)),
        num_samples=8,
        checked="questions",
        note="of release 6",
    ),
    "humaneval": KnownBenchmark(
        title="HumanEval",
        rows=164,
        published=date(2021, 7, 7),
        repo="openai/openai_humaneval",
        revision="7dce6050a7d6d172f3cc5c32aa97f52fa1a2e544",
        row_schema="humaneval",
        checked="rows",
    ),
    "humaneval_plus": KnownBenchmark(
        title="HumanEval+",
        rows=164,
        published=date(2021, 7, 7),
        repo="evalplus/humanevalplus",
        revision="aa0d916268b1c17e84e881e9bd460508dd2fd308",
        row_schema="humaneval",
        checked="code",
        note="its tests import numpy",
    ),
    "mbpp": KnownBenchmark(
        title="MBPP, test",
        rows=500,
        published=date(2021, 8, 16),
        repo="google-research-datasets/mbpp",
        revision="4bb6404fdc6cacfda99d4ac4205087b89d32030c",
        subset="full",
        split="test",
        row_schema="mbpp_benchmark",
        checked="code",
        note="tasks 11 to 510",
    ),
    "mbpp_plus": KnownBenchmark(
        title="MBPP+",
        rows=378,
        published=date(2021, 8, 16),
        repo="evalplus/mbppplus",
        row_schema="mbpp_plus",
        checked="code",
        note="its tests import numpy",
    ),
}


_NUM_GYM_PROBLEMS = 200
"""Problems of a benchmark that names a task of reasoning-gym, unless it has a source of its own."""


def with_known_facts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a benchmark that names a known one, with the facts that they leave out.

    Raise ValueError that names the known benchmarks, or says where this one is published.
    """
    filled = dict(settings)
    name = filled["known"]
    of_gym, _, task = name.partition("/")
    if of_gym == "reasoning_gym" and task:
        source = {"kind": "reasoning_gym", "task": task, "split": "heldout", "num_problems": _NUM_GYM_PROBLEMS}
        return {"name": task, "source": source} | filled
    if name not in KNOWN_BENCHMARKS:
        raise ValueError(f"no known benchmark {name!r}; known are {', '.join(KNOWN_BENCHMARKS)}, reasoning_gym/TASK")
    known = KNOWN_BENCHMARKS[name]
    filled.setdefault("name", name)
    filled.setdefault("expected_rows", known.rows)
    filled.setdefault("num_samples", known.num_samples)
    filled.setdefault("window", known.window)
    filled["source"] = _source_of(known, filled.get("source"))
    return filled


def _source_of(known: KnownBenchmark, source: object) -> object:
    """Return the source of a known benchmark: the copy in the settings, else its repository at a pinned commit."""
    if isinstance(source, str):
        source = {"kind": "file", "path": source}
    if source is None:
        source = {"kind": "hub"}
    if not isinstance(source, Mapping):
        return source  # a source that was validated before
    filled = dict(source)
    if filled.get("kind") == "hub" and filled.setdefault("repo", known.repo) == known.repo:
        if not filled.setdefault("revision", known.revision):
            raise ValueError(
                f"{known.title} is {known.repo} on the Hub, of which no commit is known here: name one, "
                f'source = {{ kind = "hub", revision = "..." }}, or a local copy, source = "file.jsonl"'
            )
        for key in ("files", "subset", "split"):
            filled.setdefault(key, getattr(known, key))
    # `fields` means a copy with columns of its own, which the format of the published one does not fit.
    if filled.get("kind") in ("hub", "file") and "fields" not in filled:
        filled.setdefault("row_schema", known.row_schema)
    return filled
