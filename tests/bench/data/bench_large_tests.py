"""Peak memory of every process that reads, curates, trains on or judges problems with 278 KB of tests each.

The files have the shape of KlearReasoner-CodeSub-15K: one JSON array of rows in verl's layout. KLEAR_BENCH_ROWS sets the number of rows;
15001 makes the 4.2 GB of the released file. `train` is a whole `klear run` of the desk_ci profile up to RL with Ray, whose
programs are judged by such tests.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import psutil

from klear_core.data.generated.puzzles import count_programs, parse_programs, write_programs

NUM_ROWS = int(os.environ.get("KLEAR_BENCH_ROWS", "2000"))
NUM_TESTS, NUMBERS_PER_TEST, DIGITS_PER_TEST = 40, 1000, 2300
NUM_ANSWERS = 64
NUM_STEPS = 3
LIMIT_MB = 2000
PROFILES = Path(__file__).parents[3] / "configs"
WORDS = [f"word{i}" for i in range(3000)]
RIGHT = "print(sum(map(int, input().split())))"
WRONG = "print(sum(map(int, input().split())) // 2 * 2)"


def measure() -> list[dict[str, object]]:
    """Run each part in a process of its own, and watch the memory of this process and of all that it starts."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("KLEAR_BENCH_DIR")) as name:
        folder = Path(name)
        num_bytes = _write_rows(folder / "train.json", _sum_rows())
        size = f"{NUM_ROWS} rows, {num_bytes / 1e9:.2f} GB"
        measured = {part: _watch(part, folder) for part in ("read", "curate", "rl")}
        _write_rows(folder / "train.json", _program_rows())
        measured["train"] = _watch("train", folder)
    versions = {"python": sys.version.split()[0], "cores": os.cpu_count(), "file": size}
    entries: list[tuple[str, float, str, str, bool]] = []
    for part, (peak_mb, cpu_s, results) in measured.items():
        entries.append(
            (f"large_tests/{part}/peak_rss_of_a_process", peak_mb, "MB", f"< {LIMIT_MB}", peak_mb < LIMIT_MB)
        )
        entries.append((f"large_tests/{part}/cpu", cpu_s, "s", "-", True))
        for key, value in results.items():
            entries.append((f"large_tests/{part}/{key}", value, "", "-", True))
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def _write_rows(path: Path, rows: Iterable[dict[str, object]]) -> int:
    with path.open("w") as f:
        f.write("[")
        for i, row in enumerate(rows):
            f.write(",\n" * bool(i) + json.dumps(row))
        f.write("]")
    return path.stat().st_size


def _sum_rows() -> Iterator[dict[str, object]]:
    rng = random.Random(0)
    for _ in range(NUM_ROWS):
        inputs: list[str] = []
        outputs: list[str] = []
        for _ in range(NUM_TESTS):
            numbers = rng.choices(range(1_000_000), k=NUMBERS_PER_TEST)
            inputs.append(" ".join(map(str, numbers)) + "\n")
            outputs.append(f"{sum(numbers)}\n")
        yield _row(" ".join(rng.choices(WORDS, k=80)), {"inputs": inputs, "outputs": outputs})


def _program_rows() -> Iterator[dict[str, object]]:
    """The desk profile's programs, each called with lists of 2,300 digits instead of six."""
    rng = random.Random(0)
    lists = [rng.choices(range(10), k=DIGITS_PER_TEST) for _ in range(NUM_TESTS)]
    inputs = [[digits] for digits in lists]
    for question in islice(_program_questions(rng), NUM_ROWS):
        pipeline = parse_programs(question)
        assert pipeline is not None, question
        outputs = [pipeline.run(digits) for digits in lists]
        yield _row(question, {"fn_name": "f", "inputs": inputs, "outputs": outputs})


def _program_questions(rng: random.Random) -> Iterator[str]:
    for level in (2, 3):
        count = count_programs(level)
        for index in rng.sample(range(count), count):
            question = write_programs(level, index)
            if question is not None:
                yield question


def _row(question: str, tests: dict[str, object]) -> dict[str, object]:
    return {
        "data_source": "coder1_longcot",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "code",
        "reward_model": {"ground_truth": json.dumps(tests), "style": "rule"},
        "extra_info": {},
    }


def _watch(part: str, folder: Path) -> tuple[float, float, dict[str, float]]:
    """Run a part; returns the highest memory of one of its processes in MB, its CPU seconds, and what it printed."""
    child = subprocess.Popen([sys.executable, __file__, part, str(folder)], stdout=subprocess.PIPE, text=True)
    root = psutil.Process(child.pid)
    peak_kb = 0
    cpu_s: dict[int, float] = {}
    while child.poll() is None:
        for process in (root, *_descendants(root)):
            try:
                times = process.cpu_times()
                cpu_s[process.pid] = times.user + times.system
                # the kernel's own high-water mark, so that no peak between two looks is missed
                status = Path(f"/proc/{process.pid}/status").read_text()
                marks = [line for line in status.splitlines() if line.startswith("VmHWM")]
                peak_kb = max(peak_kb, *(int(line.split()[1]) for line in marks), 0)
            except (psutil.Error, OSError):
                continue  # it ended
        time.sleep(0.02)
    assert child.stdout is not None
    said = child.stdout.read()
    assert child.returncode == 0, f"{part} failed: {said}"
    return peak_kb / 1024, sum(cpu_s.values()), json.loads(said.splitlines()[-1])


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.Error:
        return []


def _read(folder: Path) -> dict[str, float]:
    from klear_core.config.data import FileSource
    from klear_core.data.sources import read_source

    rows = sum(1 for _ in read_source(FileSource(path=str(folder / "train.json")), seed=0))
    return {"rows": rows}


def _curate(folder: Path) -> dict[str, float]:
    from klear_core.config.curate import CurateConfig
    from klear_core.config.data import FileSource
    from klear_core.data.curation.curate import curate
    from klear_core.metrics import NullTelemetry

    (folder / "no_benchmarks").mkdir()
    summary = curate(
        CurateConfig(sources=(FileSource(path=str(folder / "train.json")),)),
        benchmarks=folder / "no_benchmarks",
        seed=0,
        workdir=folder / "curated",
        telemetry=NullTelemetry(),
    )
    shards = list((folder / "curated" / "problems").iterdir())
    return {"problems": summary.counts["problems"], "artifact_mb": sum(s.stat().st_size for s in shards) / 1e6}


def _rl(folder: Path) -> dict[str, float]:
    """Hold the prompts as RL does, and judge answers to some of them: every second program is wrong in half of the tests."""
    from klear_core.config.rl import PromptFilterConfig
    from klear_core.config.verify import VerifyConfig
    from klear_core.rl.groups import choose_problems
    from klear_core.rl.stream import PromptStream
    from klear_core.types import Verdict
    from klear_core.verify import JudgePool

    chosen, _ = choose_problems(folder / "curated", "code", PromptFilterConfig())
    stream = PromptStream(chosen, seed=0)
    with JudgePool(VerifyConfig()) as judges:
        judges.prepare(chosen)
        futures: list[Future[Verdict]] = []
        for i, prompt in enumerate(stream.take(NUM_ANSWERS)):
            program = WRONG if i % 2 else RIGHT
            futures.append(judges.submit(prompt.problem, f"</think>\n```python\n{program}\n```"))
        verdicts = [future.result() for future in futures]
    outcomes = Counter(str(verdict.outcome) for verdict in verdicts)
    right = sum(verdict.is_correct for verdict in verdicts)
    assert outcomes == {"scored": NUM_ANSWERS}, outcomes
    assert right == NUM_ANSWERS // 2, right
    return {"prompts": len(chosen), "right_of_64_answers": right}


def _train(folder: Path) -> dict[str, float]:
    """Run the desk_ci profile as a user would, with code RL on the rows; RL samples with two engines of Ray."""
    root = folder / "workspace"
    settings = [
        f"workspace.root={root}",
        f"given.curate_rl.path={folder / 'train.json'}",
        "rl.domain=code",
        f"rl.num_steps={NUM_STEPS}",
        "rl.rollout.sampling.max_new_tokens=160",
    ]
    options = [word for setting in settings for word in ("--set", setting)]
    command = [
        str(Path(sys.executable).with_name("klear")),
        "run",
        str(PROFILES / "desk_ci"),
        *options,
        "--until",
        "rl",
    ]
    log = folder / "train.log"
    with log.open("w") as out:
        ended = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False)
    assert ended.returncode == 0, log.read_text()[-3000:]
    (manifest,) = root.glob("artifacts/rl/*/manifest.json")
    return json.loads(manifest.read_text())["counts"]


if __name__ == "__main__":
    parts = {"read": _read, "curate": _curate, "rl": _rl, "train": _train}
    print(json.dumps(parts[sys.argv[1]](Path(sys.argv[2]))))
