"""Small sources for curation, and the bytes that come of them."""

import gzip
import hashlib
import json
import random
from pathlib import Path

from klear_core.config.curate import CurateConfig, CurateRuntime, DecontaminateConfig
from klear_core.config.data import FileSource, ProceduralSource
from klear_core.data.curation.curate import curate
from klear_core.metrics import NullTelemetry

WORDS = [f"{a}{b}" for a in ("ba", "ce", "di", "fo", "gu", "ly") for b in ("nt", "rk", "sh", "ll", "mp", "st", "x")]


def question(draw):
    return " ".join(draw.choice(WORDS) for _ in range(25)) + f" {draw.randrange(1000)}?"


def prompts(num, *, seed):
    """Rows with repeats, near-duplicates, broken ones and overlong ones."""
    draw = random.Random(seed)
    rows = []
    for i in range(num):
        text = question(draw)
        if rows and draw.random() < 0.2:
            text = draw.choice(rows)["problem"] + draw.choice(["", " so", "!"])
        answer = "" if draw.random() < 0.05 else str(i % 9)
        rows.append({"problem": text * (50 if i % 40 == 7 else 1), "answer": answer})
    return rows


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def sources(folder, *, num=60):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(3):
        (folder / f"s{i}.jsonl").write_text(lines(prompts(num, seed=i // 2) + prompts(num // 2, seed=10 + i)))
    (folder / "packed.jsonl.gz").write_bytes(gzip.compress(lines(prompts(num, seed=9)).encode()))
    leaks = [prompts(num, seed=0)[3], {"problem": question(random.Random(99)), "answer": "1"}]
    (folder / "bench.jsonl").write_text(lines(leaks))
    return folder


def config(folder, **runtime):
    names = ("s0.jsonl", "s1.jsonl", "packed.jsonl.gz", "s2.jsonl")
    return CurateConfig(
        sources=(*[FileSource(path=str(folder / name)) for name in names], ProceduralSource(num_problems=40)),
        decontaminate=DecontaminateConfig(also=(FileSource(path=str(folder / "bench.jsonl")),)),
        max_question_chars=2000,
        runtime=CurateRuntime(**{"rows_per_shard": 50} | runtime),
    )


def run(cfg, out, telemetry=None):
    (out / "bench").mkdir(parents=True, exist_ok=True)
    workdir = out / "work"
    summary = curate(cfg, benchmarks=out / "bench", seed=3, workdir=workdir, telemetry=telemetry or NullTelemetry())
    return summary, digest(workdir)


def digest(folder: Path):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return [(str(path.relative_to(folder)), hashlib.sha256(path.read_bytes()).hexdigest()) for path in files]


class Stopper:
    """Stops a curation at one of its reports, as Ctrl-C does, and remembers all of them."""

    def __init__(self, stop_at=None):
        self.seen = []
        self._stop_at = stop_at

    def progress(self, done, total, note=""):
        self.seen.append((note, done, total))
        if len(self.seen) == self._stop_at:
            raise KeyboardInterrupt

    def log(self, metrics, *, step):
        raise AssertionError("a curation has no metrics")
