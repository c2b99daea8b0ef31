"""Prepare a run: its profile, and what Prefect reads on import; and the result that it returns.

Settings are environment variables, not `prefect.toml`: Prefect finds that file only from its own folder, and a relative
home would be a different one for every worker process.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.load import apply_overrides, overlay, profiles_in, read_profile, validate, with_defaults
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.stage import Stage
from klear_core.errors import ConfigError, meant
from klear_core.pipeline.graph import select_stages, stages_again, workspace_root

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
    home = Path(os.environ["PREFECT_HOME"])
    try:
        home.mkdir(parents=True, exist_ok=True)  # Prefect does not create parent folders
    except OSError as e:
        raise ConfigError(f"{home}: cannot be created ({e.strerror}); it has the records of Prefect") from e
    show_core_logs()


def show_core_logs() -> None:
    """Set our loggers to INFO so that their records reach the run's log: Prefect adds a handler but sets no level."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    # MLflow logs, with a traceback, database errors that it raises anyway.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
"""OpenTelemetry's own environment variables with the address of a collector; its others count as well."""


def export_spans() -> None:
    """Send Prefect's spans, one of each run and each stage, to the collector that the environment names, if it does.

    ConfigError without the exporter. A program that was started with `opentelemetry-instrument` keeps its own.
    """
    endpoint = next((name for name in OTEL_ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as e:
        raise ConfigError(f"{endpoint} is set, and the exporter is missing: pip install 'klear[otel]'") from e
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    os.environ.setdefault("OTEL_SERVICE_NAME", "klear")
    provider = TracerProvider(resource=Resource.create())  # sends what is left when the process exits
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


# ---- profiles ----


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
    return validate(apply_overrides(tree, overrides), origin=f"profile {profile}")


def grid_file(grid: str) -> Path:
    """Return a grid's file, given as a path or as a name under configs/ablations. ConfigError lists the names."""
    named, given = CONFIGS / "ablations" / f"{grid}.toml", Path(grid)
    if not named.is_file() and given.name == grid and not given.exists():
        names = sorted(file.stem for file in named.parent.glob("*.toml"))
        raise ConfigError(f"{grid}: no such grid; {meant(grid, names, 'grids that go by their name')}")
    return named if named.is_file() else given


def profile_folder(profile: str) -> Path:
    """Return a profile's folder, given as a path or a name under configs/. ConfigError lists the names if unknown.

    A name is a single word, so `./laptop` and `.` are paths. ConfigError for a word that means two profiles.
    """
    given = Path(profile)
    try:
        is_here = given.is_dir()
    except OSError as e:
        raise ConfigError(f"{profile[:100]}: no profile folder can have this name: {e.strerror}") from e
    if given.name != profile or profile == "..":
        return given
    named = CONFIGS / profile
    if not is_here and not named.is_dir():
        raise ConfigError(
            f"{profile}: no such profile folder; "
            f"{meant(profile, profiles_in(CONFIGS), 'profiles that go by their name')}"
        )
    if is_here and named.is_dir() and any(given.glob("*.toml")) and not given.samefile(named):
        raise ConfigError(f"{profile}: a folder here and a profile by its name; write ./{profile} or {named}")
    return named if named.is_dir() else given


# ---- selections and results ----


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSelection:
    """The stages that the user wants to run; None is no limit."""

    only: str | None = None
    from_: str | None = None
    until: str | None = None
    rerun_from: str | None = None
    """Rebuild this stage and all that depend on it; only once per flow run, also if the run is retried."""
    needed_by: tuple[str, ...] = ()
    """Run only these stages and what they depend on."""

    def of(self, stages: Sequence[Stage]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the names of the stages to run or reuse, and of those among them to rebuild."""
        chosen = select_stages(stages, only=self.only, from_=self.from_, until=self.until, needed_by=self.needed_by)
        return chosen, stages_again(stages, self.rerun_from, chosen)


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
