"""Prepare a run: its profile, what Prefect reads on import, a Prefect server, and the servers that must answer.

Settings are environment variables, not `prefect.toml`: Prefect finds that file only from its own folder, and a relative
home would be a different one for every worker process.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from klear_core.artifacts.files import file_lock
from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.load import apply_override, overlay, profiles_in, read_profile, validate, with_defaults
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.stage import Stage
from klear_core.errors import ConfigError, ResourceError
from klear_core.pipeline.graph import workspace_root

if TYPE_CHECKING:
    import httpx

LOGGERS = ("klear_core", "tasks", "flows")

_ALWAYS = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",  # our console shows one bar per stage
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
    "PREFECT_SERVER_EPHEMERAL_ENABLED": "true",
    # The default of 20 s is too short for a first start on a busy machine.
    "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
    "PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(LOGGERS),
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",  # what is logged before a run begins belongs to no run
}
_QUIET = {
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",  # our console has the terminal; the run's log has all
    "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",
}


def prefect_home(workspace: WorkspaceConfig) -> Path:
    """Return the folder of Prefect's database for runs without a server."""
    return workspace_root(workspace) / "prefect"


def prepare_environment(workspace: WorkspaceConfig, *, is_quiet: bool = True) -> None:
    """Set the variables that the user has not set: Prefect's home in the workspace, no telemetry, and quiet logs."""
    assert "prefect" not in sys.modules, "prefect reads its settings when it is imported"
    settings = _ALWAYS | (_QUIET if is_quiet else {}) | {"PREFECT_HOME": str(prefect_home(workspace))}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)  # Prefect does not create parent folders
    show_core_logs()


def own_server(workspace: WorkspaceConfig) -> OwnServer | None:
    """Start a Prefect server for this process without waiting for it; None if PREFECT_API_URL names one already."""
    return None if os.environ.get("PREFECT_API_URL") else OwnServer(workspace_root(workspace) / "prefect-server.log")


def show_core_logs() -> None:
    """Set our loggers to INFO so that their records reach the run's log: Prefect adds a handler but sets no level."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    # MLflow logs, with a traceback, database errors that it raises anyway.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


# ---- own server ----
# Start a Prefect server for a run that has none. It starts during the caller's imports and ends with its process.
#
# Prefect's temporary server does not: Ctrl-C in a terminal ends it before the run can report its final state, and a
# killed run leaves it running for ever.


_OWN_SERVER_START_S = 600.0  # the first start creates the database: seconds, but more on a busy machine
_STOP_S = 5.0
_LOOK_FOR_CALLER_S = 0.5
_TEMPORARY = {
    "PREFECT_SERVER_UI_ENABLED": "false",
    # As for Prefect's own temporary server: without most background services, and as the only app of its process.
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
    "PREFECT_SERVER_LOGGING_LEVEL": "ERROR",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "ERROR",  # the server's console is the log file
}
_IS_OURS = "KLEAR_OWN_PREFECT_SERVER"


class OwnServer:
    """A server process and its address."""

    def __init__(self, log: Path) -> None:
        """Start the server and set PREFECT_API_URL. The socket listens at once, so early requests wait in its queue."""
        self._log = log
        self._starting = ExitStack()  # two servers must not create or migrate the same database at once
        self._starting.enter_context(file_lock(log.with_suffix(".lock"), on_wait=_log_wait))
        listener = socket.create_server(("127.0.0.1", 0))
        with listener, log.open("ab") as out:
            self.api_url = f"http://127.0.0.1:{listener.getsockname()[1]}/api"
            fd = listener.fileno()
            command = [sys.executable, "-m", __name__, str(fd), str(os.getpid())]
            self._process = subprocess.Popen(
                command,
                pass_fds=(fd,),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=os.environ | _TEMPORARY,
                start_new_session=True,  # Ctrl-C must not reach the server: the run still has to report its final state
            )
        # Exit handlers run last in, first out: registered before Prefect is imported, this one runs after Prefect's.
        atexit.register(self.stop)
        os.environ |= {"PREFECT_API_URL": self.api_url, _IS_OURS: self.api_url}

    def wait_until_ready(self) -> None:
        """Return once the server answers; ResourceError if it exits first or does not answer within ten minutes."""
        import httpx

        try:  # one request is enough: it waits in the socket's queue until the server accepts it
            httpx.get(f"{self.api_url}/health", timeout=_OWN_SERVER_START_S, trust_env=False).raise_for_status()
        except httpx.HTTPError as e:
            raise ResourceError(f"Prefect's server did not start: {e}; {self._log} says why") from e
        finally:
            self._starting.close()

    def stop(self) -> None:
        """Terminate the server; kill it if it has not exited after 5 s."""
        self._process.terminate()
        try:
            self._process.wait(timeout=_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def is_temporary_server(api_url: str) -> bool:
    """Return whether the address is that of this process's server: it ends with the run, so links to it are useless."""
    return api_url == os.environ.get(_IS_OURS)


def _log_wait(who: str) -> None:
    logging.getLogger(__name__).info("waiting for the Prefect server of %s to start", who)


def _serve(fd: int, caller: int) -> None:
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    import uvicorn

    app = "prefect.server.api.server:create_app"
    config = uvicorn.Config(app, factory=True, log_level="error", lifespan="on", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


def _end_with(caller: int) -> None:
    # A killed caller cannot stop this server. But the kernel then gives the server another parent, which it notices.
    while os.getppid() == caller:
        time.sleep(_LOOK_FOR_CALLER_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_STOP_S)
    os._exit(1)


# ---- resolve ----
# Resolve a flow's parameters (profile, settings, overrides) to one config.


CONFIGS = (Path(__file__).parent / "profiles").resolve()
"""The folder of profiles that can be given by name: configs/ of a checkout, or its copy in an installed package."""


def resolve(profile: str | None, overrides: Sequence[str], settings: PipelineConfig | None) -> PipelineConfig:
    """Return the profile's config with the given `settings` merged over it, then the `key.path=value` overrides.

    Prefect replaces a nested parameter as a unit: a form or a command line that sets one learning rate would reset all
    other settings to the code's defaults. Here only fields that were set replace the profile's. Without a profile,
    `settings` is the config.
    """
    if profile is None:
        if settings is None or overrides:
            raise ConfigError("without a profile, settings must be given, and overrides cannot be used")
        return settings
    tree = read_profile(profile_folder(profile))
    if settings is not None:
        tree = overlay(with_defaults(tree), settings.model_dump(mode="json", exclude_unset=True))
    for override in overrides:
        tree = apply_override(tree, override)
    return validate(tree, origin=f"profile {profile}")


def grid_file(grid: str) -> Path:
    """Return a grid's file, given as a path or as a name under configs/ablations."""
    named = CONFIGS / "ablations" / f"{grid}.toml"
    return named if named.is_file() else Path(grid)


def profile_folder(profile: str) -> Path:
    """Return a profile's folder, given as a path or a name under configs/. ConfigError lists the names if unknown."""
    named, given = CONFIGS / profile, Path(profile)
    if named.is_dir():
        return named
    if given.name == profile and not given.is_dir():
        raise ConfigError(
            f"{profile}: no such profile folder; profiles that go by their name: {', '.join(profiles_in(CONFIGS))}"
        )
    return given


# ---- result ----
# The result that a pipeline run returns.


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineResult:
    """Artifacts and ids of a finished run."""

    refs: Mapping[str, ArtifactRef]
    """Artifacts of the stages that ran or were reused, by stage name."""
    mlflow_run_id: str | None
    """MLflow's parent run; None if every stage was reused, because then nothing is tracked."""
    report: Path | None
    """The HTML file; None if the report stage was not chosen."""
    flow_run_id: str
    """Prefect's flow run id; empty if every stage was reused without Prefect."""


def page_of(stages: Sequence[Stage], refs: Mapping[str, ArtifactRef]) -> Path | None:
    """Return the HTML file among the artifacts of a run; None if it has none."""
    for stage in stages:
        if stage.job.page and stage.name in refs:
            return refs[stage.name].path / stage.job.page
    return None


# ---- reachable ----
# Check at the start of a command that the servers named by the environment answer.
#
# Without these checks a wrong address shows only after minutes of retries, or as pages of traceback.


T = TypeVar("T")

NOTICE_AFTER_S = 1.0
GIVE_UP_AFTER_S = 5.0
"""Seconds before a check fails; a healthy server on a busy machine may need more than one."""


def check_prefect() -> None:
    """Raise ConfigError if PREFECT_API_URL is set but no Prefect API answers there."""
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    remedy = "start that server, or unset PREFECT_API_URL to run with a server of its own"
    reply = check_endpoint(url, "PREFECT_API_URL", path="/health", remedy=remedy)
    # Prefect's UI answers every path outside /api with its page.
    if reply.is_success and "html" in reply.headers.get("content-type", ""):
        raise ConfigError(
            f"PREFECT_API_URL: {_host_of(url)} answers with a web page; the API's address usually ends in /api"
        )


def check_tracking(workspace: WorkspaceConfig) -> None:
    """Raise ConfigError if MLflow's server does not answer, or if its database is damaged and holds runs."""
    from tasks.mlflow_backend import database_file, refuse_broken_with_runs
    from tasks.tracking import tracking_uri

    uri = tracking_uri(workspace)
    file = database_file(uri)
    if file is not None:
        refuse_broken_with_runs(file)
    if uri.startswith(("http://", "https://")):
        remedy = "start that server, or unset MLFLOW_TRACKING_URI to track in a file of the workspace"
        check_endpoint(
            uri, "MLFLOW_TRACKING_URI", path="/api/2.0/mlflow/experiments/search?max_results=1", remedy=remedy
        )


def check_ray() -> None:
    """Raise ConfigError if RAY_ADDRESS names a host and a port where nothing listens."""
    host, _, port = os.environ.get("RAY_ADDRESS", "").removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        check_port(
            host, int(port), "RAY_ADDRESS", remedy="start that cluster, or unset RAY_ADDRESS to run Ray on this machine"
        )


def check_endpoint(url: str, what: str, *, path: str, remedy: str) -> httpx.Response:
    """Return the reply to a GET of `path` below `url`; ConfigError, prefixed with `what`, on a timeout, a 404 or a 5xx.

    No password or key is sent and the certificate is not verified: the server's real client does both, with its own
    settings. "Not authorized" therefore counts as an answer. Messages name only the host.
    """
    import httpx

    try:
        address = httpx.URL(url).copy_with(username=None, password=None)
    except (httpx.InvalidURL, ValueError) as e:
        raise ConfigError(f"{what}: not a valid address") from e
    if address.scheme not in ("http", "https") or not address.host:
        raise ConfigError(f"{what}: not an http or https address")
    target = address.copy_with(raw_path=(address.path.rstrip("/") + path).encode())

    def ask() -> httpx.Response:
        return httpx.get(target, timeout=GIVE_UP_AFTER_S, verify=False)  # noqa: S501  nothing secret is sent

    host = _host_of(url)
    try:
        reply = _within_limit(ask, f"{what}: {host}")
    except (httpx.HTTPError, TimeoutError) as e:
        raise ConfigError(f"{what}: {host} does not answer ({_reason(e)}); {remedy}") from e
    if reply.status_code == httpx.codes.NOT_FOUND or reply.is_server_error:
        raise ConfigError(f"{what}: {host} answers {reply.status_code} {reply.reason_phrase} to {path}; {remedy}")
    return reply


def check_port(host: str, port: int, what: str, *, remedy: str) -> None:
    """Raise ConfigError, prefixed with `what`, unless a TCP connection succeeds within 5 s."""

    def connect() -> None:
        socket.create_connection((host, port), timeout=GIVE_UP_AFTER_S).close()

    try:
        _within_limit(connect, f"{what}: {host}:{port}")
    except OSError as e:
        raise ConfigError(f"{what}: {host}:{port} does not answer ({_reason(e)}); {remedy}") from e


def _within_limit(ask: Callable[[], T], who: str) -> T:
    """Return the result of `ask`, or raise TimeoutError after 5 s. It runs in a thread: socket timeouts omit DNS."""
    answers: list[T] = []
    errors: list[Exception] = []

    def work() -> None:
        try:
            answers.append(ask())
        except Exception as e:  # noqa: BLE001  raised again below, in the caller's thread
            errors.append(e)

    thread = threading.Thread(target=work, name="reachable", daemon=True)
    thread.start()
    thread.join(NOTICE_AFTER_S)
    if thread.is_alive():
        typer.echo(f"{who} has not answered yet; waiting for {GIVE_UP_AFTER_S - NOTICE_AFTER_S:.0f} s more", err=True)
        thread.join(GIVE_UP_AFTER_S - NOTICE_AFTER_S)
    if errors:
        raise errors[0]
    if not answers:
        raise TimeoutError(f"no answer within {GIVE_UP_AFTER_S:.0f} s")
    return answers[0]


def _host_of(url: str) -> str:
    """Return host and port of an address, without user name and password."""
    import httpx

    address = httpx.URL(url)
    return f"{address.host}:{address.port}" if address.port else address.host


def _reason(error: Exception) -> str:
    """Return the error's text if it cannot contain the address with its password, else the error's type."""
    import httpx

    if isinstance(error, (OSError, httpx.ConnectError)):
        return str(error) or type(error).__name__
    return type(error).__name__


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
