"""The command on real published files, which lie beside the checkout in `shared/data`."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path

import pytest
from klear_command import ROOT, start

from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.records import read_shards
from klear_core.artifacts.store import LocalStore
from klear_core.types import Dropped, Problem

SHARED = ROOT.parent / "shared" / "data"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SHARED.is_dir(), reason=f"no published files in {SHARED}"),
]

SOURCES = {
    "math-deepmath/math_deepmath_deal.jsonl": 3026,
    "math-deepscaler-aime/aime.json": 599,
    "math-deepscaler-math/math.json": 4462,
    "math-dsr-sub/dsr_sub.parquet": 738,
    "math-gsm8k/train.jsonl": 4529,
    "math-nemo-comp-24-25/test.jsonl": 256,
    "math-simplerl-math8k/simplerl_math8k.parquet": 5109,
}
BENCHMARKS = {
    "aime24": "bench-aime24/aime24.qs.jsonl",
    "aime25": "bench-aime25/aime25.qs.jsonl",
    "hmmt25": "bench-hmmt25/HMMT-202502.jsonl",
}

GRADED = {
    "cot-skythought/aime24.Sky-T1-math-reflection-0.2-32B.jsonl.gz": (30, 30),
    "cot-skythought/amc23.Sky-T1-math-reflection-0.2-32B.jsonl.gz": (40, 40),
    "cot-skythought/amc23.Sky-T1-math-wrong-5K-14B.jsonl.gz": (40, 40),
    "cot-skythought/math500.Sky-T1-math-correct-5K-27B.jsonl.gz": (500, 450),
    "graded-math-outputs/math500.Qwen2.5-14B-Instruct.jsonl.gz": (500, 492),
}
"""Answers, and how many must be judged as the harness of Qwen2.5-Math did; without a box that one takes the last number, even of a text
that breaks off."""


@pytest.fixture(scope="module")
def curated(tmp_path_factory: pytest.TempPathFactory, mlflow_folder: Path, prefect_database: Path) -> Path:
    """The artifacts of `klear run configs/laptop --until curate` on the published math files."""
    root = tmp_path_factory.mktemp("curated")
    shutil.copytree(mlflow_folder, root / "ws" / "mlflow")
    shutil.copytree(prefect_database, root / "ws" / prefect_database.name)
    sources = ", ".join(f'"{SHARED / file}"' for file in SOURCES)
    benchmarks = ", ".join(
        f'{{name = "{name}", num_samples = 1, source = "{SHARED / file}"}}' for name, file in BENCHMARKS.items()
    )
    overrides = (f"curate.sources=[{sources}]", f"benchmarks=[{benchmarks}]", f"workspace.root={root / 'ws'}")
    settings = [part for override in overrides for part in ("--set", override)]
    command = start("run", "configs/laptop", "--until", "curate", *settings, log=root / "log")
    assert command.wait() == 0, command.output
    return root / "ws" / "artifacts"


def test_every_row_of_the_sources_is_accounted_for(curated: Path):
    (folder,) = LocalStore(curated).folders("curate")
    ledger = read_manifest(folder).ledger
    assert ledger[0].num_in == sum(SOURCES.values())
    assert all(before.num_out == after.num_in for before, after in pairwise(ledger))
    assert ledger[-1].num_out == len(list(read_shards(folder / "problems", Problem)))
    assert sum(sum(step.dropped.values()) for step in ledger) == len(list(read_shards(folder / "dropped", Dropped)))


def test_the_benchmarks_are_whole(curated: Path):
    (folder,) = LocalStore(curated).folders("benchmarks")
    assert {name: len(list(read_shards(folder / name, Problem))) for name in BENCHMARKS} == dict.fromkeys(
        BENCHMARKS, 30
    )


def test_the_aime_problems_of_the_benchmark_years_are_removed_but_for_one_told_in_other_words(curated: Path):
    """2024 I 5 stands in the two files without nine words in common, which is what the paper's rule looks for."""
    (folder,) = LocalStore(curated).folders("curate")
    published = [json.loads(line) for line in (SHARED / "math-nemo-comp-24-25/test.jsonl").read_text().splitlines()]
    aime = {row["problem"].strip() for row in published if row["subset_for_metrics"].startswith("aime")}
    kept = {problem.question.strip() for problem in read_shards(folder / "problems", Problem)}
    assert len(aime) == 60
    assert [question[:33] for question in aime & kept] == ["Rectangles  $ABCD$  and  $EFGH$  "]
    assert len({row["problem"].strip() for row in published} & kept) > 100


@pytest.mark.parametrize("file", GRADED)
def test_real_answers_are_judged_as_another_harness_did(klear, tmp_path: Path, file: str):
    with gzip.open(SHARED / file, "rt") as f:
        rows = [json.loads(line) for line in f]
    answers = [
        {"id": str(r["idx"]), "response": r["code"][0], "reference": {"kind": "math", "answers": [str(r["gt"])]}}
        for r in rows
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    others = ("verify.tags=none", "verify.window=whole")  # these models write other marks, or none
    settings = [part for setting in (*others, "verify.math.cpu_s=60") for part in ("--set", setting)]
    told = klear("judge", tmp_path / "answers.jsonl", "--out", tmp_path / "verdicts.jsonl", *settings)
    assert told.status == 0, told.err
    verdicts = {
        v["id"]: v["score"] == 1.0 for v in map(json.loads, (tmp_path / "verdicts.jsonl").read_text().splitlines())
    }
    num_rows, num_same = GRADED[file]
    assert len(verdicts) == num_rows
    assert sum(verdicts[str(r["idx"])] == r["score"][0] for r in rows) >= num_same
