"""Long use of one machine: many runs on one Prefect server, a day of hourly retraining, the smoke profile again and again.

`klear bench endurance` takes hours at full size; SIZE=0.1 takes a tenth of the runs. docs/data/endurance.json has what
came out, one line a measurement, and docs/data/drills.md the figures. Needs PostgreSQL, Redis and prefect-redis.

The clock of the day is virtual: between two retrainings, all that the workspace remembers becomes an hour older.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import linear_regression, median, quantiles

import httpx
import psutil
import yaml

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT / "tests" / name) for name in ("flows", "drills", ".")]

from prefect_server import Server, server_and_worker  # noqa: E402
from small_runs import SMALL  # noqa: E402
from test_outages import FLOW  # noqa: E402
from test_team_server import Databases  # noqa: E402

from klear_core.artifacts.manifest import MANIFEST, Manifest, read_manifest, write_manifest  # noqa: E402
from klear_core.artifacts.run_history import RunHistory  # noqa: E402
from klear_core.artifacts.store import TRASH  # noqa: E402
from klear_core.config.data import ProceduralSource  # noqa: E402
from klear_core.data.generated.chains import generate_chains  # noqa: E402
from klear_core.types import MathReference  # noqa: E402
from tasks.tracking import versions  # noqa: E402

SIZE = float(os.environ.get("SIZE", "1"))
NUM_RUNS, NUM_CLIENTS, NUM_HOURS = 200, 8, 24
NEW_DATA_TIMES = 4
UNTIL = os.environ.get("UNTIL", "")
Row = Mapping[str, object]


def measure() -> list[Row]:
    """Return the rows of all three, or of those that $PARTS names."""
    parts: dict[str, Callable[[], list[Row]]] = {
        "runs": many_runs,
        "worker": runs_of_a_worker,
        "day": day_of_retraining,
        "loop": smoke_in_a_loop,
    }
    wanted = os.environ.get("PARTS", " ".join(parts)).split()
    return [row for name in wanted for row in parts[name]()]


def row(name: str, value: float, unit: str, target: str, ok: bool) -> Row:
    """Return one measurement."""
    return {"name": name, "value": value, "unit": unit, "target": target, "ok": ok, "versions": versions()}


def scaled(number: int, *, at_least: int) -> int:
    """Return a number of repetitions at the size that was asked for."""
    return max(at_least, round(number * SIZE))


# ---- many runs on one server ----


CLIENT = """
import sys
from pathlib import Path
from drill import drill
from klear_core.config.pipeline import PipelineConfig
root, first, number = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
for seed in range(first, first + number):
    drill(PipelineConfig(name=f"run{seed}", seed=seed, workspace={"root": str(root)}))
"""


@contextmanager
def team_server() -> Iterator[tuple[Server, Path]]:
    """Yield a server on PostgreSQL and Redis with worker and sweeper, and a folder with a flow of one short stage."""
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory(dir="/dev/shm") as shared:
        folder = Path(scratch)
        (folder / "drill.py").write_text(FLOW)
        (folder / "prefect").mkdir()
        databases = Databases(Path(shared))
        try:
            with server_and_worker(folder / "prefect", limit=NUM_CLIENTS, settings=databases.settings) as server:
                server.start_sweeper()
                for i in range(NUM_CLIENTS):
                    (folder / f"client{i}").mkdir()
                    (folder / f"client{i}" / "go").touch()  # its stage ends after one step
                yield server, folder
        finally:
            databases.kill()


def many_runs() -> list[Row]:
    """Run the flow again and again, in several processes at once."""
    each = scaled(NUM_RUNS // NUM_CLIENTS, at_least=1)

    def run(server: Server, folder: Path) -> None:
        clients = []
        for i in range(NUM_CLIENTS):
            command = [sys.executable, "-c", CLIENT, str(folder / f"client{i}"), str(i * each), str(each)]
            with (folder / f"client{i}.log").open("wb") as out:
                clients.append(subprocess.Popen(command, cwd=folder, env=server.env, stdout=out, stderr=out))
        statuses = [client.wait() for client in clients]
        if any(statuses):
            raise RuntimeError("".join(log.read_text()[-2000:] for log in folder.glob("client*.log")))

    num = each * NUM_CLIENTS
    with team_server() as (server, folder):
        return watched(run, server, folder, num, name=f"{num} runs, {NUM_CLIENTS} at a time")


def runs_of_a_worker() -> list[Row]:
    """Ask for all runs of a deployment at once; a process worker carries them out, each in a process of its own."""
    num = scaled(NUM_RUNS, at_least=1)

    def run(server: Server, folder: Path) -> None:
        pool = yaml.safe_load((ROOT / "prefect.yaml").read_text())["definitions"]["pool"]
        deployment = {"name": "plain", "entrypoint": "drill.py:drill", "work_pool": pool}
        (folder / "prefect.yaml").write_text(yaml.safe_dump({"deployments": [deployment]}))
        server.prefect("deploy", "--all", cwd=folder)
        ids = []
        for seed in range(num):
            root = str(folder / f"client{seed % NUM_CLIENTS}")
            settings = {"name": f"run{seed}", "seed": seed, "workspace": {"root": root}}
            ids.append(server.start_run("drill", "plain", {"settings": settings}))
        for run_id in ids:
            server.wait(run_id, timeout_s=4 * 3600)

    with team_server() as (server, folder):
        return watched(run, server, folder, num, name=f"{num} runs of a worker, {NUM_CLIENTS} at a time")


def watched(run: Callable[[Server, Path], None], server: Server, folder: Path, num: int, *, name: str) -> list[Row]:
    """Let all runs be made, and watch the server meanwhile."""
    usage = Usage(server.processes["server"].pid)
    begin, started = usage.now(), time.monotonic()
    with polled(f"{server.url}/flow_runs/filter") as answers:
        run(server, folder)
    wall_s, end = time.monotonic() - started, usage.now()
    states = [each["state_name"] for page in range(0, num, 100) for each in runs_from(server, page)]
    completed = states.count("Completed")
    made = len(list(folder.glob(f"client*/artifacts/*/*/{MANIFEST}")))
    slowest = quantiles(answers, n=100)[98]
    return [
        row(f"{name}: completed", completed, "runs", f"{num}", completed == num == len(states)),
        row(f"{name}: with their artifact", made, "runs", f"{num}", made == num),
        row(f"{name}: all ended after", wall_s, "s", "none", True),
        row(f"{name}: answer to a list of runs, median", median(answers), "s", "none", True),
        row(f"{name}: the same, 99th percentile", slowest, "s", "< 5", slowest < 5),
        row(f"{name}: memory of the server, growth", end[0] - begin[0], "MB", "none", True),
        row(f"{name}: its descriptors, growth", end[1] - begin[1], "files", "< 100", end[1] - begin[1] < 100),
    ]


def runs_from(server: Server, offset: int) -> list[dict[str, object]]:
    """Return a page of the server's runs."""
    found = server.post("/flow_runs/filter", {"sort": "ID_DESC", "limit": 100, "offset": offset})
    assert isinstance(found, list)
    return found


class Usage:
    """Memory and open files of a process with all its descendants."""

    def __init__(self, pid: int) -> None:
        self._leader = psutil.Process(pid)

    def now(self) -> tuple[float, int]:
        """Return resident MB and open descriptors."""
        megabytes, files = 0.0, 0
        for process in (self._leader, *self._leader.children(recursive=True)):
            try:
                megabytes += process.memory_info().rss / 1e6
                files += process.num_fds()
            except psutil.NoSuchProcess:
                continue
        return megabytes, files


@contextmanager
def polled(url: str) -> Iterator[list[float]]:
    """Yield seconds of requests as a page of the UI makes them, one a second, until the block ends."""
    taken: list[float] = []
    stop = threading.Event()

    def poll() -> None:
        while not stop.wait(1):
            before = time.monotonic()
            httpx.post(url, json={"limit": 50}, timeout=120).raise_for_status()
            taken.append(time.monotonic() - before)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield taken
    finally:
        stop.set()
        thread.join()


# ---- a day of hourly retraining ----


FEW_STEPS = ("sft.max_steps=8", "rl.num_steps=2", "rl.rollout.groups_per_step=4")
LENIENT = ("promote.first=any", "promote.max_truncated=1", "promote.max_no_answer=1", "promote.margin=100")
RETRAIN = """
import sys
from flows.run import prefect_run
from klear_core.config.pipeline import WorkspaceConfig

root, *overrides = sys.argv[1:]
with prefect_run(WorkspaceConfig(root=root), needs_ray=True):
    from flows.pipeline import retrain
    print("ENDED", flush=True)
    for _ in sys.stdin:
        retrain(profile="smoke", overrides=overrides)
        print("ENDED", flush=True)
"""
"""A process that retrains whenever it reads a line: imports and servers of 24 processes would take most of the day."""


def day_of_retraining() -> list[Row]:
    """Retrain at even times of a virtual day, on a file that grows four times; past noon two processes do so at once."""
    num = max(2 * NEW_DATA_TIMES, scaled(NUM_HOURS, at_least=1))
    passes = timedelta(hours=24 / num)
    grows = {round(i * num / NEW_DATA_TIMES) for i in range(NEW_DATA_TIMES)}
    with tempfile.TemporaryDirectory() as scratch:
        root, data = Path(scratch) / "ws", Path(scratch) / "problems.jsonl"
        source = f'curate.sources=[{{kind="file", path="{data}"}}]'
        overrides = [*SMALL, *FEW_STEPS, *LENIENT, source, f"workspace.root={root}"]
        sizes, seconds, ended_well = [], [], 0
        first = Retraining(root, overrides, Path(scratch) / "first.log")
        for i in range(num):
            if i in grows:
                write_problems(data, 192 + 16 * i)
            running = [first]
            if i == num // 2 + 1:
                running.append(Retraining(root, overrides, Path(scratch) / "second.log"))
            started = time.monotonic()
            for process in running:
                process.begin()
            ended_well += sum(process.has_ended_well() for process in running)
            seconds.append(time.monotonic() - started)
            for process in running[1:]:
                process.close()
            make_older(root, passes)
            sizes.append(megabytes_of(root))
            print(f"{i} {seconds[-1]:.0f} s {sizes[-1]:.2f} MB", file=sys.stderr, flush=True)
        first.close()
        why = [record.why for record in RunHistory.of(root).records()]
        make_older(root, timedelta(days=2))
        klear("gc", "--root", str(root), "--last", "1", "--yes")
        left = megabytes_of(root)
    trained = sum(not text.startswith("- no new data") for text in why)
    idle = [s for i, s in enumerate(seconds) if i not in grows]
    growth = [after - before for i, (before, after) in enumerate(pairwise(sizes), 1) if i not in grows]
    name = f"24 hours, retrained {num} times and once at the same time"
    return [
        row(f"{name}: ended well", ended_well, "runs", f"{num + 1}", ended_well == num + 1),
        row(f"{name}: trained, for there was new data", trained, "runs", f"{len(grows)}", trained == len(grows)),
        row(f"{name}: one with new data, median", median(seconds[i] for i in grows), "s", "none", True),
        row(f"{name}: one without new data, median", median(idle), "s", "none", True),
        row(f"{name}: workspace after the first", sizes[0], "MB", "none", True),
        row(f"{name}: workspace after the last", sizes[-1], "MB", "none", True),
        row(f"{name}: growth by one without new data, median", median(growth), "MB", "< 1", median(growth) < 1),
        row(f"{name}: workspace two days later, after klear gc", left, "MB", f"< {sizes[-1]:.3g}", left < sizes[-1]),
    ]


class Retraining:
    """A process of its own that runs the flow of the schedule each time it is told to."""

    def __init__(self, root: Path, overrides: Sequence[str], log: Path) -> None:
        self._log = log
        command = [sys.executable, "-c", RETRAIN, str(root), *overrides]
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=clean(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=out
            )
        if not self.has_ended_well():
            raise RuntimeError(log.read_text()[-3000:])

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def has_ended_well(self) -> bool:
        """Wait for what was begun."""
        assert self._process.stdout is not None
        if any(line == b"ENDED\n" for line in self._process.stdout):
            return True
        print(self._log.read_text()[-3000:], file=sys.stderr)
        return False

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def write_problems(file: Path, number: int) -> None:
    """Write chains of sums with known answers; more of them begin with those of fewer."""
    source = ProceduralSource(name="grows", modulus=6, num_operations=(2, 3), num_problems=1536)
    rows = [
        {"question": each.question, "answer": each.reference.answers[0]}
        for each in generate_chains(source, seed=0)
        if isinstance(each.reference, MathReference)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows[:number]))


def klear(*args: str) -> None:
    """Run a command to its good end."""
    command = [sys.executable, "-c", "from flows.cli import main; main()", *args]
    subprocess.run(command, cwd=ROOT, env=clean(), check=True, capture_output=True)


def clean() -> dict[str, str]:
    """Return this process's environment without servers."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PREFECT", "MLFLOW"))}


def make_older(root: Path, by: timedelta) -> None:
    """Let the virtual clock go on: artifacts, records of runs and files are older."""
    for file in root.glob(f"artifacts/*/*/{MANIFEST}"):
        manifest: Manifest = read_manifest(file.parent)
        write_manifest(file.parent, manifest.model_copy(update={"created_at": manifest.created_at - by}))
    history = RunHistory.of(root)
    for record in history.records():
        times = {"started_at": record.started_at - by, "updated_at": record.updated_at - by}
        history.write(record.model_copy(update=times))
    for path in root.rglob("*"):
        at = path.lstat().st_mtime - by.total_seconds()
        os.utime(path, (at, at), follow_symlinks=False)


def megabytes_of(root: Path) -> float:
    """Return what a workspace takes on its disk, less the trash."""
    files = (path for path in root.rglob("*") if path.is_file() and TRASH not in path.parts)
    return sum(file.stat().st_blocks * 512 for file in files) / 1e6


# ---- the smoke profile again and again ----


LOOP = """
import json, os, sys, time
from pathlib import Path
import psutil
from flows.environment import StageSelection
from flows.run import prefect_run
from klear_core.config.load import load_profile

root, minutes, until, *overrides = sys.argv[1:]
own = psutil.Process()
stop_at = time.monotonic() + 60 * float(minutes)
config = load_profile(Path("configs/smoke"), [*overrides, f"workspace.root={root}"])
with prefect_run(config.workspace, needs_ray=True):
    from flows.pipeline import run_pipeline
    seed = 0
    while time.monotonic() < stop_at or seed < 4:
        run_pipeline(config.model_copy(update={"seed": seed}), StageSelection(until=until or None))
        seed += 1
        children = own.children(recursive=True)
        seen = {
            "memory": own.memory_info().rss / 1e6,
            "descriptors": own.num_fds(),
            "threads": own.num_threads(),
            "processes": len(children),
            "memory of processes": sum(child.memory_info().rss for child in children) / 1e6,
            "temporary files": sum(1 for _ in Path(os.environ["TMPDIR"]).rglob("*")),
            "shared memory": sum(1 for _ in Path("/dev/shm").iterdir()),
        }
        print("SEEN", json.dumps(seen), flush=True)
"""
BOUNDS = {
    "memory": ("MB", 5.0),
    "descriptors": ("files", 1.5),  # a socket of Ray: `ray.init` and `ray.shutdown` alone leave one each time
    "threads": ("threads", 0.5),
    "processes": ("processes", 0.1),
    "memory of processes": ("MB", 5.0),
    "temporary files": ("files", 5.0),
    "shared memory": ("files", 0.5),
}
"""Largest growth a run, in the second half of the loop: the first runs load libraries and fill caches."""


def smoke_in_a_loop() -> list[Row]:
    """Run the smoke profile with seed after seed in one process for an hour, up to $UNTIL if that is set."""
    minutes = max(1.0, 60 * SIZE)
    with tempfile.TemporaryDirectory() as scratch:
        temporary = Path(scratch) / "tmp"
        temporary.mkdir()
        command = [
            sys.executable,
            "-c",
            LOOP,
            str(Path(scratch) / "ws"),
            str(minutes),
            UNTIL,
            *SMALL,
            *FEW_STEPS,
        ]
        env = clean() | {"TMPDIR": str(temporary)}
        ended = subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, text=True)
        if ended.returncode:
            raise RuntimeError(ended.stdout[-3000:] + ended.stderr[-3000:])
    seen = [json.loads(line[5:]) for line in ended.stdout.splitlines() if line.startswith("SEEN ")]
    late = seen[len(seen) // 2 :]
    name = f"{len(seen)} runs of smoke{UNTIL and f' up to {UNTIL}'} in one process"
    rows = []
    for what, (unit, bound) in BOUNDS.items():
        values = [each[what] for each in late]
        slope = linear_regression(range(len(values)), values).slope
        rows.append(row(f"{name}: {what}, growth a run", slope, unit, f"< {bound:g}", slope < bound))
        rows.append(row(f"{name}: {what}, at the end", values[-1], unit, "none", True))
    return rows


if __name__ == "__main__":
    for each in measure():
        print(json.dumps(each))
