"""`klear submit`: what it prints, what it refuses, and what it hands to a cluster."""

import json
import re
import shutil
import ssl
import stat
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from uuid import UUID

import pytest
from prefect.settings import (
    PREFECT_API_SSL_CERT_FILE,
    PREFECT_API_URL,
    PREFECT_CLIENT_MAX_RETRIES,
    temporary_settings,
)
from typer.testing import CliRunner

from flows.cli import app
from flows.servers import check_prefect_access
from klear_core.errors import ConfigError, ResourceError

DOCKER = ("prefect.pool=docker", "image=klear")
POD = ("image=klear", "cpus_per_node=8", "memory_gb_per_node=64", "kube.volume=runs")


def submitted(tmp_path: Path, *args: str) -> str:
    result = CliRunner().invoke(app, ["submit", *args, "--set", f"workspace.root={tmp_path}"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def stand_in(folder: Path, name: str, script: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{script}\n")
    (folder / name).chmod(0o755)


NO_NODES = "allocation failure: Requested node configuration is not available"


def slurm_stand_ins(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    sbatch: str = "echo 7",
    test_only: str = "echo 'sbatch: Job 6 to start at noon' >&2",
    squeue: str = "echo 'PENDING|Priority|normal'",
) -> None:
    """Commands of Slurm, alone in PATH with the system's; scancel writes what it is asked to end."""
    stand_in(folder, "sbatch", f'if [ "$1" = --test-only ]; then\n{test_only}\nelse\n{sbatch}\nfi')
    stand_in(folder, "squeue", squeue)
    stand_in(folder, "scancel", f'echo "$*" >>{folder}/cancelled')
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


def test_a_dry_run_prints_plan_files_and_command_and_writes_nothing(tmp_path):
    shown = submitted(
        tmp_path, "smoke", "--to", "slurm", "--queue", "gpu", "--retry", "error", "--for", "6h", "--dry-run"
    )
    assert "sft on node 0: learner rank 0 on CPUs" in shown
    assert "#SBATCH --partition=gpu" in shown
    assert "-gt 21600" in shown
    assert "profile/run.toml" in shown
    assert "sbatch --parsable" in shown
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("no_hub")
def test_gpu_hours_and_price_of_the_nodes_that_are_asked_for_are_shown(tmp_path):
    eight = ("workspace.submit.gpus_per_node=8", "hardware.price_per_gpu_hour=2", "hardware.gpu_memory_gb=80")
    settings = [word for setting in eight for word in ("--set", setting)]
    with pytest.raises(ConfigError, match="nothing was submitted"):  # the model is not on this machine
        submitted(tmp_path, "klear_8b", "--to", "slurm", *settings)
    shown = CliRunner().invoke(app, ["submit", "klear_8b", "--to", "slurm", "--dry-run", *settings]).output
    assert "submits: 1 node of 8 GPUs; of 8, stages hold" in shown
    assert "GPU-hours, costing" in shown


def test_what_does_not_fit_the_nodes_that_are_asked_for_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="nothing was submitted: 1 problem"):
        submitted(tmp_path, "smoke", "--to", "slurm", "--set", "sft.runtime.device=cuda", "--dry-run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "settings", "refused"),
    [
        ("ray", ["queue=gpu"], "Ray has no queues"),
        ("ray", ["priority=high"], "Ray has no priorities"),
        ("ray", ["retry=['interruption']"], "ray starts a run again after no-capacity, error only"),
        ("ray", ["retry_for=6h"], "ray has this limit for retry = no-capacity, error only"),
        ("kube", ["retry=['error']", "retry_for=6h"], "kube has this limit for retry = no-capacity only"),
        ("slurm", ["idle_kill=10%/1h"], "workspace.submit.gpus_per_node is 0"),
        ("kube", ["cpus_per_node=8", "memory_gb_per_node=64"], "workspace.submit.image: a pod needs it"),
        ("kube", ["kube.schedule='0 3 * * 1'", "queue=team"], "Kueue misses them"),
        ("kube", ["queue=a team"], "no name of an object of Kubernetes"),
        ("kube", ["image=klear"], "the results would end with the pod"),
        ("kube", ["kube.volume=runs", "kube.schedule=weekly"], "kube.schedule"),
        ("prefect", ["queue=klear", "prefect.pool=docker", "image={{ x }}"], "would replace {{ x }}"),
        ("kube", ["idle_kill=10%/1h", "nodes=2", "gpus_per_node=8"], "which has none with nodes > 1"),
        ("prefect", ["retry=['error']"], "prefect starts a run again after no-capacity, interruption only"),
        ("prefect", ["max_retries=2"], "until its third crash in a row"),
        ("prefect", ["nodes=2", "queue=klear"], "a worker starts a run on one machine"),
        ("prefect", ["queue=klear", "image=klear"], "a pool of processes starts no container"),
        (
            "prefect",
            ["queue=klear", "prefect.pool=kubernetes", "image=k", "kube.volume=runs"],
            "the pool's job template has it",
        ),
        ("slurm", ["image=klear"], "Slurm starts no container"),
        ("slurm", ["slurm.sbatch={nodes='3'}"], "nodes is set by klear submit itself"),
        ("slurm", ["slurm.sbatch={no-requeue=''}"], "no-requeue is set by klear submit itself"),
        ("kube", [*POD, "kube.schedule='61 3 * * 1'"], "no times as cron writes them"),
        ("kube", [*POD, "kube.schedule='0 3 * * 1,7'"], "KubeRay cannot read 7"),
        ("kube", [*POD, "kube.schedule='0 22-4 * * fri'"], "KubeRay cannot read 22-4"),
        ("kube", [*POD, "kube.schedule='0 3 * * 5#2'"], "KubeRay cannot read 5#2"),
        ("kube", [*POD, "kube.schedule='@every 7d'"], "KubeRay cannot read @every 7d"),
        ("kube", [*POD, "kube.schedule='@every 6h'", "kube.time_zone=Mars"], "no time zone, such as Europe/Berlin"),
        ("kube", [*POD, "image=my image"], "workspace.submit.image = 'my image': no name of an image"),
    ],
)
def test_what_a_target_cannot_do_is_refused(tmp_path, target, settings, refused):
    asked = [word for setting in settings for word in ("--set", f"workspace.submit.{setting}")]
    with pytest.raises(ConfigError, match=re.escape(refused)):
        submitted(tmp_path, "smoke", "--to", target, *asked, "--dry-run")


@pytest.mark.parametrize("schedule", ["7 */3 7,8 jan-jul sun,1-5", "@every 1h30m"])
def test_times_that_kuberay_reads_are_taken(tmp_path, schedule):
    asked = [
        word for setting in (*POD, f"kube.schedule={schedule}") for word in ("--set", f"workspace.submit.{setting}")
    ]
    shown = submitted(tmp_path, "smoke", "--to", "kube", *asked, "--dry-run")
    assert "kind: RayCronJob" in shown


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--deadline", "tomorrow", "submit.deadline"),
        ("--deadline", "99999999999d", "submit.deadline"),
        ("--for", "6", "submit.retry_for"),
        ("--retry", "error, always", "no-capacity"),
        ("--idle-kill", "10/1h", "such as 10%/1h"),
        ("--idle-kill", "10%/week", "submit.idle_kill.window"),
    ],
)
def test_an_option_that_cannot_be_read_is_refused_with_what_it_may_be(tmp_path, option, value, said):
    with pytest.raises(ConfigError, match=said):
        submitted(tmp_path, "smoke", "--to", "slurm", option, value, "--dry-run")


def test_a_queue_and_a_priority_may_be_called_by_a_number_or_a_word_of_toml(tmp_path):
    shown = submitted(tmp_path, "smoke", "--to", "slurm", "--queue", "7", "--priority", "true", "--dry-run")
    assert "#SBATCH --partition=7\n" in shown
    assert "#SBATCH --qos=true\n" in shown


@pytest.mark.parametrize("target", ["slurm", "ray", "kube", "prefect"])
def test_a_deadline_is_a_moment_in_the_profile_of_the_run(tmp_path, target):
    needs = {"kube": POD, "prefect": ["queue=klear"]}
    asked = [word for setting in needs.get(target, ()) for word in ("--set", f"workspace.submit.{setting}")]
    before = datetime.now(UTC)
    shown = submitted(tmp_path, "smoke", "--to", target, "--deadline", "2h", *asked, "--dry-run")
    [moment] = set(re.findall(r'ends_at = "(.*)"', shown))
    assert before <= datetime.fromisoformat(moment) - timedelta(hours=2) <= datetime.now(UTC)


def test_all_stages_wait_for_missing_nodes_as_long_as_is_asked(tmp_path):
    shown = submitted(tmp_path, "smoke", "--to", "slurm", "--retry", "no-capacity", "--for", "6h", "--dry-run")
    assert set(re.findall(r"wait_for_nodes_s = (.*)", shown)) == {"21600.0"}


@pytest.mark.parametrize(
    ("target", "submit"),
    [("ray", []), ("kube", ["kube.volume=runs"]), ("prefect", ["queue=klear", "prefect.pool=docker", "image=klear"])],
)
def test_a_run_whose_results_would_end_with_its_folder_is_refused(target, submit):
    asked = [word for setting in submit for word in ("--set", f"workspace.submit.{setting}")]
    result = CliRunner().invoke(app, ["submit", "smoke", "--to", target, *asked, "--dry-run"])
    assert "workspace.root = 'runs'" in str(result.exception)


def test_commands_are_printed_as_a_shell_takes_them(tmp_path):
    shown = submitted(tmp_path / "a b", "smoke", "--to", "slurm", "--dry-run")
    assert f"sbatch --parsable '{tmp_path}/a b/submissions/" in shown


def test_files_that_no_node_reads_are_written_here_whatever_the_nodes_call_their_workspace(tmp_path, monkeypatch):
    stand_in(tmp_path / "bin", "ray", "true")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://head:8265")
    profile = Path("configs/smoke").absolute()
    monkeypatch.chdir(tmp_path)
    submitted(Path("/nowhere/runs"), str(profile), "--to", "ray")
    [folder] = (tmp_path / "runs" / "submissions").iterdir()
    assert (folder / "run.sh").exists()


def test_a_program_that_is_missing_is_named_and_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="nothing was submitted: there is no command sbatch"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm")
    assert not (tmp_path / "runs").exists()


PLANTED = "planted-0123456789"
KEYS = {
    **dict.fromkeys(("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "PREFECT_API_KEY"), PLANTED),
    "OPS_HOOK": f"http://hook.invalid/{PLANTED}",
    "MLFLOW_TRACKING_URI": f"http://klear:{PLANTED}@mlflow.invalid",
    "PREFECT_API_URL": f"http://klear:{PLANTED}@prefect.invalid/api",
    "RAY_API_SERVER_ADDRESS": f"http://klear:{PLANTED}@ray.invalid",
}


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("slurm", []),
        ("ray", []),
        ("kube", ["image=klear:1", "kube.volume=runs", "cpus_per_node=2", "memory_gb_per_node=16"]),
        ("prefect", ["queue=klear"]),
    ],
)
def test_no_key_of_the_environment_is_in_the_files_and_commands_of_a_submission(
    tmp_path, monkeypatch, target, settings
):
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    asked = [word for setting in settings for word in ("--set", f"workspace.submit.{setting}")]
    notify = ("--set", 'workspace.notify={webhook_env="OPS_HOOK"}')
    shown = submitted(tmp_path, "smoke", "--to", target, "--dry-run", *notify, *asked)
    assert "OPS_HOOK" in shown
    assert PLANTED not in shown


def test_sbatch_gets_the_script_and_the_token_is_readable_by_its_owner_alone(tmp_path, monkeypatch):
    slurm_stand_ins(tmp_path / "bin", monkeypatch, sbatch='echo "job of $2"')
    shown = submitted(tmp_path / "runs", "smoke", "--to", "slurm")
    [folder] = (tmp_path / "runs" / "submissions").iterdir()
    assert f"job of {folder}/job.sh" in shown
    assert f"submitted {folder.name}" in shown
    assert stat.S_IMODE((folder / "token").stat().st_mode) == 0o600
    assert (folder / "token").read_text() not in "".join(f.read_text() for f in folder.glob("*.sh"))


def test_a_run_for_prefect_needs_a_server_that_answers(tmp_path, monkeypatch):
    asked = ("smoke", "--to", "prefect", "--queue", "klear")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    with pytest.raises(ConfigError, match="PREFECT_API_URL: not set"):
        submitted(tmp_path / "runs", *asked)
    assert not (tmp_path / "runs").exists()


def test_a_run_for_ray_needs_the_address_of_a_cluster(tmp_path, monkeypatch):
    """Without one `ray job submit` takes the cluster that runs on this machine, whosever it is."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="RAY_API_SERVER_ADDRESS: not set"):
        submitted(tmp_path / "runs", "smoke", "--to", "ray")
    assert not (tmp_path / "runs").exists()


def test_a_workspace_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file is not a folder"):
        submitted(tmp_path / "file" / "runs", "smoke", "--to", "slurm", "--dry-run")


def test_what_a_cluster_says_in_several_lines_is_one(tmp_path, monkeypatch):
    said = "sbatch: error: invalid partition specified: gpus\\nsbatch: error: Batch job submission failed"
    slurm_stand_ins(tmp_path / "bin", monkeypatch, sbatch=f"printf '{said}\\n' >&2; exit 1")
    with pytest.raises(ResourceError, match=r"specified: gpus; sbatch: error: Batch job submission failed$"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm")


class PrefectPools(BaseHTTPRequestHandler):
    """A Prefect server with one pool of Docker, `dock`, and its default queue."""

    status = 200

    def do_GET(self) -> None:
        status = self.status if "admin" in self.path else 200
        self.reply(True, status=404 if "csrf" in self.path else status)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        own = {"id": str(UUID(int=1)), "name": "default", "priority": 1, "work_pool_id": str(UUID(int=2))}
        pool = {"id": str(UUID(int=2)), "name": "dock", "type": "docker", "default_queue_id": own["id"]}
        self.reply([own] if "queues" in self.path else [pool], status=self.status)

    def reply(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Nothing."""


@contextmanager
def served(
    handler: type[BaseHTTPRequestHandler], monkeypatch: pytest.MonkeyPatch, certificate: Path | None = None
) -> Iterator[None]:
    """The handler as the server of PREFECT_API_URL, with TLS if it has a certificate."""
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"{'https' if certificate else 'http'}://127.0.0.1:{server.server_port}/api"
        monkeypatch.setenv("PREFECT_API_URL", url)
        with temporary_settings({PREFECT_API_URL: url}):
            yield
        server.shutdown()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["queue=dok"], "queue = 'dok': no work pool; there are: dock"),
        (["queue=dock"], "prefect.pool = 'process': the pool dock is of type docker"),
        (["queue=dock", "priority=high", *DOCKER], "priority = 'high': no work queue of dock; there are: default"),
    ],
)
def test_a_pool_that_prefect_has_not_is_refused_with_those_that_it_has(tmp_path, monkeypatch, settings, said):
    asked = [word for setting in settings for word in ("--set", f"workspace.submit.{setting}")]
    with served(PrefectPools, monkeypatch), pytest.raises(ConfigError, match=re.escape(said)):
        submitted(tmp_path / "runs", "smoke", "--to", "prefect", *asked)
    assert not (tmp_path / "runs").exists()


def test_a_prefect_server_that_wants_a_password_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(PrefectPools, "status", 401)
    with served(PrefectPools, monkeypatch), pytest.raises(ConfigError, match=r"with 401; set PREFECT_API_AUTH_STRING$"):
        submitted(tmp_path / "runs", "smoke", "--to", "prefect", "--queue", "dock")
    with served(PrefectPools, monkeypatch), pytest.raises(ConfigError, match=r"with 401; set PREFECT_API_AUTH_STRING$"):
        check_prefect_access()  # as `klear run` does


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_a_certificate_of_an_authority_of_ones_own_needs_ssl_cert_file(tmp_path, monkeypatch):
    file = tmp_path / "server.pem"
    request = "req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=own -addext subjectAltName=IP:127.0.0.1"
    made = ["openssl", *request.split(), "-keyout", str(file), "-out", str(tmp_path / "ca.pem")]
    subprocess.run(made, check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "ca.pem").read_text())
    asked = ("smoke", "--to", "prefect", "--queue", "dok")
    with served(PrefectPools, monkeypatch, certificate=file), temporary_settings({PREFECT_CLIENT_MAX_RETRIES: 0}):
        with pytest.raises(ConfigError, match="SSL_CERT_FILE names the certificate of your authority"):
            submitted(tmp_path / "runs", *asked)
        trusted = {PREFECT_API_SSL_CERT_FILE: str(tmp_path / "ca.pem")}  # its default is SSL_CERT_FILE
        with temporary_settings(trusted), pytest.raises(ConfigError, match="no work pool; there are: dock"):
            submitted(tmp_path / "runs", *asked)


def test_of_a_traceback_the_last_line_is_shown(tmp_path, monkeypatch):
    said = "Traceback (most recent call last):\n  x\nConnectionError: no\n"
    slurm_stand_ins(tmp_path / "bin", monkeypatch, sbatch=f"printf '{said}' >&2; exit 1")
    with pytest.raises(ResourceError, match=r"before you repeat it: ConnectionError: no$"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm")


def test_a_cluster_that_fails_to_answer_may_have_taken_the_run(tmp_path, monkeypatch):
    slurm_stand_ins(tmp_path / "bin", monkeypatch, sbatch="echo 'Socket timed out on send/recv operation' >&2; exit 1")
    with pytest.raises(ResourceError, match=r"look for smoke-\S+ before you repeat it: Socket timed out"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm")


@pytest.mark.parametrize("qos", ["(null)", "", "normal"])
def test_a_job_that_slurm_takes_without_its_qos_is_cancelled(tmp_path, monkeypatch, qos):
    """Slurm 22.05 drops any QOS without accounting, and a wrong name where accounting enforces nothing."""
    slurm_stand_ins(tmp_path / "bin", monkeypatch, squeue=f"echo 'PENDING|None|{qos}'")
    with pytest.raises(ConfigError, match=r"priority = 'high': this Slurm has taken job 7 without that QOS"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm", "--priority", "high")
    assert (tmp_path / "bin" / "cancelled").read_text() == "7\n"


def test_how_slurm_has_queued_a_job_is_shown(tmp_path, monkeypatch):
    slurm_stand_ins(tmp_path / "bin", monkeypatch, sbatch="echo '7;far'", squeue="echo 'PENDING|Resources|high'")
    shown = submitted(tmp_path / "runs", "smoke", "--to", "slurm", "--priority", "high")
    assert "Slurm: Job 6 to start at noon\n7;far\nPENDING (Resources)\n" in shown
    assert not (tmp_path / "bin" / "cancelled").exists()


@pytest.mark.parametrize("reason", ["PartitionConfig", "PartitionTimeLimit", "BadConstraints", "QOSMaxNodePerJobLimit"])
def test_a_job_that_would_wait_for_ever_is_cancelled(tmp_path, monkeypatch, reason):
    slurm_stand_ins(tmp_path / "bin", monkeypatch, squeue=f"echo 'PENDING|{reason}|normal'")
    with pytest.raises(ResourceError, match=f"would keep job 7 for ever .{reason}."):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm")
    assert (tmp_path / "bin" / "cancelled").read_text() == "7\n"


def test_missing_nodes_are_waited_for_only_if_that_is_asked_for(tmp_path, monkeypatch):
    waits = "echo 'PENDING|ReqNodeNotAvail, UnavailableNodes:n2|normal'"
    slurm_stand_ins(tmp_path / "bin", monkeypatch, test_only=f"echo '{NO_NODES}' >&2; exit 1", squeue=waits)
    with pytest.raises(ResourceError, match="not available; with --retry no-capacity it waits for nodes"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm", "--retry", "error")
    assert not (tmp_path / "runs").exists()
    shown = submitted(tmp_path / "runs", "smoke", "--to", "slurm", "--retry", "no-capacity", "--for", "6h")
    assert "the job waits for nodes, for 6h at most" in shown
    assert "PENDING (ReqNodeNotAvail, UnavailableNodes:n2)" in shown


def test_what_slurm_refuses_is_said_before_anything_is_written(tmp_path, monkeypatch):
    said = "allocation failure: Invalid qos specification"
    slurm_stand_ins(tmp_path / "bin", monkeypatch, test_only=f"echo '{said}' >&2; exit 1")
    with pytest.raises(ResourceError, match=f"nothing was submitted: sbatch: {said}"):
        submitted(tmp_path / "runs", "smoke", "--to", "slurm", "--retry", "no-capacity")
    assert not (tmp_path / "runs").exists()


def test_a_controller_that_does_not_answer_is_asked_again_and_gets_one_job(tmp_path, monkeypatch):
    """After its start it does not know its nodes at first."""
    bin_ = tmp_path / "bin"
    answers = ["Unable to contact slurm controller (connect failure)", NO_NODES]
    asked = f"echo >>{bin_}/asked; n=$(wc -l <{bin_}/asked)\n"
    cases = "\n".join(f"[ $n = {i} ] && {{ echo '{answer}' >&2; exit 1; }}" for i, answer in enumerate(answers, 1))
    slurm_stand_ins(bin_, monkeypatch, test_only=f"{asked}{cases}\ntrue", sbatch=f"echo >>{bin_}/jobs; echo 7")
    shown = submitted(tmp_path / "runs", "smoke", "--to", "slurm")
    assert shown.count("Slurm is asked again") == len(answers)
    assert (bin_ / "jobs").read_text() == "\n"
