"""Curation by several processes: on this machine, killed and continued; on Ray; on Slurm, whose commands are stand-ins."""

import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from curations import config, digest, lines, prompts, run, sources
from processes import alive

from klear_core.config.curate import (
    CurateConfig,
    CurateRuntime,
    LocalExecutorConfig,
    RayExecutorConfig,
    SlurmExecutorConfig,
)
from klear_core.config.data import FileSource
from klear_core.data.curation.curate import num_workers, run_tasks
from klear_core.data.curation.executors import ask_queue, run_on_executor, slurm_executor
from klear_core.errors import ConfigError, DataError, ResourceError

IN_PROCESS = LocalExecutorConfig(workers=1)


class Squares:
    """Tasks that write a file each; some fail, or end their process."""

    def __init__(self, folder, *, fails=(), dies=()):
        self.folder = folder
        self.fails = fails
        self.dies = dies

    def is_done(self, task):
        return (self.folder / str(task)).exists()

    def __call__(self, task):
        if task in self.fails:
            raise DataError(f"task {task}: the file a.gz is cut short")
        if task in self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / str(task)).write_text(str(task**2))


def results(folder):
    return {int(path.name): int(path.read_text()) for path in folder.iterdir()}


def do(tasks, num, executor, folder):
    seen = []
    run_on_executor("squares", tasks, num, executor=executor, workers=2, folder=folder / "notes", on_done=seen.append)
    return seen


@pytest.fixture
def results_folder(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


def test_one_worker_starts_no_process_and_does_what_is_missing(results_folder, tmp_path):
    (results_folder / "1").write_text("1")
    seen = []
    run_tasks(
        "squares",
        Squares(results_folder),
        3,
        executor=IN_PROCESS,
        folder=tmp_path / "notes",
        is_small=False,
        on_done=seen.append,
    )
    assert seen == [1, 2, 3]
    assert results(results_folder) == {0: 0, 1: 1, 2: 4}
    assert not (tmp_path / "notes").exists()


def test_workers_are_limited_to_the_cores_of_this_process():
    assert 1 <= num_workers(LocalExecutorConfig()) <= len(os.sched_getaffinity(0))
    assert num_workers(LocalExecutorConfig(workers=7)) == 7


@pytest.mark.slow
def test_processes_of_this_machine_do_all_tasks_in_silence(results_folder, tmp_path, capfd):
    assert do(Squares(results_folder), 5, LocalExecutorConfig(), tmp_path) == [1, 2, 3, 4, 5]
    assert results(results_folder) == {i: i * i for i in range(5)}
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("", "")


@pytest.mark.slow
def test_the_error_of_a_task_arrives_as_it_was_raised_and_others_results_stay(results_folder, tmp_path, capfd):
    with pytest.raises(DataError, match=r"^task 2: the file a\.gz is cut short$"):
        do(Squares(results_folder, fails=(2,)), 3, LocalExecutorConfig(), tmp_path)
    assert capfd.readouterr().err == ""
    do(Squares(results_folder), 3, LocalExecutorConfig(), tmp_path)
    assert results(results_folder) == {0: 0, 1: 1, 2: 4}


@pytest.mark.slow
def test_a_worker_that_is_killed_is_an_error_that_says_what_to_do(results_folder, tmp_path):
    with pytest.raises(ResourceError, match=r"a process of the curation died.*workers to a smaller number"):
        do(Squares(results_folder, dies=(1,)), 3, LocalExecutorConfig(), tmp_path)


@pytest.mark.slow
def test_ray_does_all_tasks_and_returns_a_tasks_error(results_folder, tmp_path):
    # What is pickled for Ray's workers is imported there: tasks of the product, not of this module.
    cfg = config(sources(tmp_path / "data"))
    expected = run(cfg, tmp_path / "plain")
    ray = RayExecutorConfig(workers=2, memory_gb_per_cpu=1)
    on_ray = cfg.model_copy(update={"runtime": cfg.runtime.model_copy(update={"executor": ray})})
    assert run(on_ray, tmp_path / "ray") == expected
    (tmp_path / "data" / "packed.jsonl.gz").write_bytes((tmp_path / "data" / "packed.jsonl.gz").read_bytes()[:-300])
    with pytest.raises(DataError, match=r"packed\.jsonl\.gz: cannot be read beyond row"):
        run(on_ray, tmp_path / "broken")


def test_slurms_script_asks_for_what_the_settings_say(tmp_path):
    cfg = SlurmExecutorConfig(
        partition="cpu", time="00:30:00", workers=40, memory_gb_per_cpu=3, qos="low", sbatch={"account": "us"}
    )
    executor = slurm_executor([], 200, cfg, tmp_path)
    script = executor.get_launch_file_contents(executor.get_sbatch_args(200), "srun the-task")
    for line in (
        "partition=cpu",
        "time=00:30:00",
        "array=0-199%40",
        "mem-per-cpu=3G",
        "cpus-per-task=1",
        "qos=low",
        "account=us",
        "job-name=klear-curate",
    ):
        assert f"#SBATCH --{line}\n" in script
    assert f"export PATH={Path(sys.executable).parent}:$PATH" in script
    assert script.rstrip().endswith("srun the-task")


def test_without_sbatch_slurm_is_refused(monkeypatch, results_folder, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="there is no command sbatch"):
        do(Squares(results_folder), 2, SlurmExecutorConfig(partition="cpu"), tmp_path)


SLURM = {
    # Runs all tasks of the array, one after the other, as Slurm would on its machines.
    "sbatch": """
        script="${@: -1}"
        last=$(sed -n 's/#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
        for i in $(seq 0 "$last"); do
          SLURM_ARRAY_TASK_ID=$i RUN_OFFSET=0 SLURM_NODELIST=here bash "$script" >> "$0.log" 2>&1
        done
        echo Submitted batch job 17
    """,
    "srun": """
        while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
        exec "$@"
    """,
    "scontrol": "echo here",
    "squeue": "",
}


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo ' 17 cpu klear-curate RUNNING'", "queued"),
        ("exit 0", "ended"),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", "ended"),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1", "no answer"),
        ("echo 'slurm_load_jobs error: Socket timed out on send/recv operation' >&2; exit 1", "no answer"),
    ],
)
def test_a_controller_that_does_not_answer_has_not_ended_a_job(monkeypatch, tmp_path, script, said):
    """The messages are those of Slurm 22.05."""
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/bash\n{script}\n")
    squeue.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert ask_queue("17") == said


@pytest.mark.slow
def test_slurm_does_all_tasks_and_returns_a_tasks_error(monkeypatch, tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, script in SLURM.items():
        (commands / name).write_text("#!/bin/bash\n" + textwrap.dedent(script))
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    cfg = config(sources(tmp_path / "data"))
    expected = run(cfg, tmp_path / "plain")
    slurm = SlurmExecutorConfig(partition="cpu")
    on_slurm = cfg.model_copy(update={"runtime": cfg.runtime.model_copy(update={"executor": slurm})})
    assert run(on_slurm, tmp_path / "slurm") == expected
    (tmp_path / "data" / "packed.jsonl.gz").write_bytes((tmp_path / "data" / "packed.jsonl.gz").read_bytes()[:-300])
    with pytest.raises(DataError, match=r"packed\.jsonl\.gz: cannot be read beyond row"):
        run(on_slurm, tmp_path / "broken")


CURATION = """
import json, sys
from pathlib import Path
from klear_core.config.curate import CurateConfig
from klear_core.data.curation.curate import curate

class Reports:
    def progress(self, done, total, note=""):
        print(note, done, flush=True)

if __name__ == "__main__":
    cfg = CurateConfig.model_validate_json(Path(sys.argv[1]).read_text())
    out = Path(sys.argv[2])
    (out / "bench").mkdir(parents=True, exist_ok=True)
    curate(cfg, benchmarks=out / "bench", seed=3, workdir=out / "work", telemetry=Reports())
"""


def large_sources(folder):
    """More than one process takes alone, in eight blocks."""
    folder.mkdir()
    padding = " ".join(["nothing else is known about any of these"] * 12)
    for i in range(8):
        rows = prompts(2500, seed=i)
        (folder / f"s{i}.jsonl").write_text(lines([row | {"note": padding} for row in rows]))
    files = [FileSource(path=str(folder / f"s{i}.jsonl")) for i in range(8)]
    runtime = CurateRuntime(rows_per_shard=500, executor=LocalExecutorConfig(workers=2))
    return CurateConfig(sources=tuple(files), max_question_chars=2000, runtime=runtime)


def start(cfg, folder):
    (folder / "curation.py").write_text(CURATION)
    (folder / "config.json").write_text(cfg.model_dump_json())
    command = [sys.executable, str(folder / "curation.py"), str(folder / "config.json"), str(folder / "killed")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def kill_after(cfg, folder, num_reports):
    """Start a curation and kill its first process alone after some reports; all others must end by themselves."""
    with start(cfg, folder) as process:
        reports = [process.stdout.readline().strip() for _ in range(num_reports)]
        workers = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert workers
    deadline = time.monotonic() + 240  # on a busy machine a fork server has taken over a minute to end
    while alive(workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(workers)
    return reports


@pytest.mark.slow
def test_a_curation_killed_twice_and_continued_gives_the_bytes_of_one_process(tmp_path):
    cfg = large_sources(tmp_path / "data")
    alone = cfg.model_copy(update={"runtime": cfg.runtime.model_copy(update={"executor": IN_PROCESS})})
    _, expected = run(alone, tmp_path / "alone")
    assert kill_after(cfg, tmp_path, 4) == ["reading 0", "reading 1", "reading 2", "reading 3"]
    num_done = [int(report.split()[1]) for report in kill_after(cfg, tmp_path, 3)]
    assert num_done[0] >= 3
    with start(cfg, tmp_path) as process:
        last, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    assert last.startswith("reading ")
    assert int(last.split()[1]) >= num_done[-1]
    assert digest(tmp_path / "killed" / "work") == expected
