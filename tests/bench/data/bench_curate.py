"""Speed and memory of curation, and the same work by datatrove's own blocks and by a script with datasets and datasketch.

All are measured in one process each, in CPU time without imports, on synthetic prompts of which 5 % are exact repeats,
3 % have a word more than another, and 0.3 % hold a benchmark question. `datatrove`: its MinHash blocks (20 buckets of 6
hashes, 3-grams) and its NGramsDecontFilter (9-grams), which compare no numbers, answers or exact similarities.
`script`: what one would write, with exact similarities, numbers and answers, so that the same prompts survive; it fills
a MinHash shingle by shingle, as the examples of datasketch do. `script_in_batches` gives it all shingles at once.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

SIZES = (10_000, 100_000, 1_000_000)
COMPARED = (
    ("datatrove", 10_000, 1.0),
    ("script", 10_000, 5.0),
    ("script", 100_000, 5.0),
    ("script_in_batches", 10_000, 0.0),
    ("script_in_batches", 100_000, 0.0),
)
"""Each of the others, a size at which it is run (datatrove takes minutes at 10,000 already), and the ratio wanted."""
NUM_QUESTIONS = 2_000
LIMIT_MB = 1_500
NEEDED = ("datasets", "datasketch", "spacy")

Result = dict[str, float]


def measure() -> list[dict[str, object]]:
    """Return speed and memory at each size, and the ratios to the other two."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise SystemExit(f"{', '.join(missing)} not installed: pip install -e '.[bench]'")
    entries: list[tuple[str, float, str, str, bool]] = []
    with tempfile.TemporaryDirectory() as folder:
        data = {size: write_prompts(Path(folder) / f"{size}", size) for size in SIZES}
        ours = {size: run_one("klear", path) for size, path in data.items()}
        others = [(kind, size, wanted, run_one(kind, data[size])) for kind, size, wanted in COMPARED]
        for size, result in ours.items():
            megabytes = (data[size] / "prompts.jsonl").stat().st_size / 1e6
            peak = result["peak_mb"]
            entries += [
                (f"curate/{size}/prompts_per_cpu_s", size / result["cpu_s"], "prompts/s", "-", True),
                (f"curate/{size}/mb_per_cpu_s", megabytes / result["cpu_s"], "MB/s", "-", True),
                (f"curate/{size}/peak_mb", peak, "MB", f"< {LIMIT_MB}", peak < LIMIT_MB),
            ]
    small, large = SIZES[0], SIZES[-1]
    per_prompt = {size: result["cpu_s"] / size for size, result in ours.items()}
    growth = per_prompt[large] / per_prompt[small]
    entries.append(("curate/cpu_per_prompt_largest_over_smallest", growth, "times", "<= 1.2", growth <= 1.2))
    for kind, size, wanted, result in others:
        ratio = result["cpu_s"] / ours[size]["cpu_s"]
        entries.append((f"curate/{size}/speed_over_{kind}", ratio, "times", f">= {wanted:g}", ratio >= wanted))
        entries.append((f"curate/{size}/survivors_{kind}", result["survivors"], "prompts", "-", True))
        if kind == "script":
            same = ours[size]["survivors"] == result["survivors"]
            survivors = ours[size]["survivors"]
            entries.append((f"curate/{size}/survivors", survivors, "prompts", "those of the script", same))
    versions = {"questions": NUM_QUESTIONS}
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def write_prompts(folder: Path, num: int) -> Path:
    """Write `prompts.jsonl` and `bench.jsonl` to a new folder, and return it."""
    folder.mkdir()
    draw = random.Random(num)
    words = ["".join(draw.choice("bcdfglmnprstv") + draw.choice("aeiou") for _ in range(3)) for _ in range(5000)]
    questions = [text(draw, words) for _ in range(NUM_QUESTIONS)]
    rows = [json.dumps({"problem": question, "answer": "1"}) for question in questions]
    (folder / "bench.jsonl").write_text("\n".join(rows) + "\n")
    with (folder / "prompts.jsonl").open("w") as f:
        for row in prompts(num, draw, words, questions):
            f.write(json.dumps(row) + "\n")
    return folder


def prompts(num: int, draw: random.Random, words: list[str], questions: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of a synthetic source."""
    recent: list[dict[str, str]] = []
    for i in range(num):
        kind = draw.random()
        row = {"problem": text(draw, words), "answer": str(draw.randrange(10_000))}
        if kind < 0.08 and recent:
            row = draw.choice(recent)
        if 0.05 <= kind < 0.08:
            start, _, rest = row["problem"].partition(" ")
            row = row | {"problem": f"{start} thus {rest}"}
        elif 0.08 <= kind < 0.083:
            row = row | {"problem": f"Solve this. {draw.choice(questions)}"}
        elif kind >= 0.083 and i % 3 == 0:
            recent = [*recent[-1000:], row]
        yield row


def text(draw: random.Random, words: list[str]) -> str:
    """Return a question of about 450 characters."""
    parts = [draw.choice(words) if draw.random() < 0.9 else str(draw.randrange(1000)) for _ in range(70)]
    return " ".join(parts).capitalize() + "."


def run_one(kind: str, data: Path) -> Result:
    """Run one kind in a process of its own."""
    command = [sys.executable, __file__, kind, str(data)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{kind} failed:\n{done.stderr[-3000:]}")
    result: Result = json.loads(done.stdout.splitlines()[-1])
    return result


def klear(data: Path, work: Path) -> Callable[[], int]:
    """Return our curation in one process."""
    from klear_core.config.curate import CurateConfig, CurateRuntime, DecontaminateConfig, LocalExecutorConfig
    from klear_core.config.data import FileSource
    from klear_core.data.curation.curate import curate
    from klear_core.metrics import NullTelemetry

    cfg = CurateConfig(
        sources=(FileSource(path=str(data / "prompts.jsonl")),),
        decontaminate=DecontaminateConfig(also=(FileSource(path=str(data / "bench.jsonl")),)),
        runtime=CurateRuntime(executor=LocalExecutorConfig(workers=1)),
    )
    (work / "bench").mkdir()

    def run() -> int:
        summary = curate(cfg, benchmarks=work / "bench", seed=0, workdir=work / "out", telemetry=NullTelemetry())
        return int(summary.counts["problems"])

    return run


def datatrove(data: Path, work: Path) -> Callable[[], int]:
    """Return datatrove's own blocks, one after the other in one process."""
    import numpy as np
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import ParquetWriter
    from datatrove.utils.text import ngrams, simplify_text
    from loguru import logger

    logger.remove()
    minhash = MinhashConfig(n_grams=3, num_buckets=20, hashes_per_bucket=6)
    contaminated = NGramsDecontConfig(n_grams=9, find_query_ngrams=True)
    sigs, buckets, remove, index = (str(work / name) for name in ("sigs", "buckets", "remove", "index"))

    def reader() -> JsonlReader:
        return JsonlReader(str(data), glob_pattern="prompts.jsonl", text_key="problem")

    def run() -> int:
        decontaminate = NGramsDecontFilter(index, config=contaminated)
        # Its indexer needs lighteval to be installed; the file is a list of hashes.
        hashes: set[int] = set()
        for line in (data / "bench.jsonl").read_text().splitlines():
            question = simplify_text(json.loads(line)["problem"], contaminated.norm_config)
            grams = ngrams(decontaminate.tokenizer.word_tokenize(question), 9)
            hashes |= {decontaminate.hash_func(" ".join(gram)) for gram in grams}
        Path(index).mkdir()
        np.array(list(hashes), dtype=np.uint64).tofile(f"{index}/bench.index.hashes")
        drain([reader(), MinhashDedupSignature(sigs, config=minhash)])
        for bucket in range(20):
            drain([MinhashDedupBuckets(sigs, buckets, config=minhash)], rank=bucket, world_size=20)
        drain([MinhashDedupCluster(buckets, remove, config=minhash)])
        out = [MinhashDedupFilter(remove), decontaminate, ParquetWriter(str(work / "out"))]
        return drain([reader(), *out])

    return run


def drain(steps: list[Callable[..., Iterator[object]]], *, rank: int = 0, world_size: int = 1) -> int:
    """Run a pipeline of datatrove as its executors do; return the number of documents at its end."""
    documents: Iterator[object] | None = None
    for step in steps:
        documents = step(documents, rank, world_size)
    return sum(1 for _ in documents or ())


def script(data: Path, work: Path, *, in_batches: bool = False) -> Callable[[], int]:
    """Return a single-process script with datasets and datasketch."""
    import datasets
    from datasketch import MinHash, MinHashLSH

    def words_of(question: str) -> list[str]:
        return re.findall(r"\w+", question.lower())

    def grams_of(words: list[str], length: int) -> set[str]:
        return {" ".join(words[i : i + length]) for i in range(len(words) - length + 1)}

    def run() -> int:
        datasets.disable_progress_bars()
        rows = datasets.load_dataset("json", data_files=str(data / "prompts.jsonl"), split="train", cache_dir=str(work))
        leaked: set[str] = set()
        for line in (data / "bench.jsonl").read_text().splitlines():
            leaked |= grams_of(words_of(json.loads(line)["problem"]), 9)
        lsh = MinHashLSH(num_perm=120, params=(20, 6))
        seen: set[str] = set()
        known: dict[int, tuple[set[str], list[str], str]] = {}
        kept: list[int] = []
        for i, row in enumerate(rows):
            words = words_of(row["problem"])
            if " ".join(words) in seen:
                continue
            seen.add(" ".join(words))
            shingles = grams_of(words, 3)
            sketch = MinHash(num_perm=120)
            if in_batches:
                sketch.update_batch([shingle.encode() for shingle in shingles])
            else:
                for shingle in shingles:
                    sketch.update(shingle.encode())
            numbers = [word for word in words if word.isdigit()]
            for j in lsh.query(sketch):
                others, their_numbers, answer = known[j]
                alike = len(shingles & others) / len(shingles | others)
                if alike >= 0.7 and numbers == their_numbers and answer == row["answer"]:
                    break
            else:
                lsh.insert(i, sketch)
                known[i] = (shingles, numbers, row["answer"])
                if leaked.isdisjoint(grams_of(words, 9)):
                    kept.append(i)
        rows.select(kept).shuffle(seed=0).to_parquet(str(work / "kept.parquet"))
        return len(kept)

    return run


KINDS: dict[str, Callable[[Path, Path], Callable[[], int]]] = {
    "klear": klear,
    "datatrove": datatrove,
    "script": script,
    "script_in_batches": partial(script, in_batches=True),
}


def main() -> None:
    """Run one kind on prepared data and print CPU time, peak memory and number of survivors."""
    with tempfile.TemporaryDirectory() as work:
        # pyarrow imports pandas when it makes its first table. `datasets` does so on its import, before the clock starts.
        importlib.import_module("pandas")
        run = KINDS[sys.argv[1]](Path(sys.argv[2]), Path(work))
        started = time.process_time()
        survivors = run()
        cpu_s = time.process_time() - started
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"cpu_s": cpu_s, "peak_mb": peak_mb, "survivors": survivors}))


if __name__ == "__main__":
    main()
