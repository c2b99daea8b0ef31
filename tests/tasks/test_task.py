from datetime import UTC, datetime
from pathlib import Path

import pytest
from prefect.client.schemas.objects import State, StateType
from pydantic import ValidationError

from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.stage import BaseJob, SftJob
from klear_core.errors import ConfigError, DataError, EngineMemoryError, ResourceError, TeacherError
from klear_core.pipeline.graph import fingerprints_of, stages_of
from tasks.progress import Attempt
from tasks.stage import cache_key, in_workspace, is_worth_a_retry, this_attempt
from tasks.stages import TASKS
from tasks.tracking import RunInfo


def validation_error() -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        PipelineConfig(seed=-1)
    return caught.value


def after(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "is_retried"),
    [
        (ResourceError("disk"), True),
        (TeacherError("down"), True),
        (OSError("network"), True),
        (RuntimeError("a worker died"), True),
        (after(ResourceError("11 engines were lost"), ResourceError("an engine died")), True),
        (after(ResourceError("11 engines were lost"), EngineMemoryError("out of memory")), False),
        (ConfigError("wrong key"), False),
        (DataError("bad row"), False),
        (validation_error(), False),
        (TypeError("our mistake"), False),
        (AssertionError("our mistake"), False),
    ],
)
def test_what_cannot_get_better_is_not_tried_again(error: Exception, is_retried: bool):
    state = State(type=StateType.FAILED, data=error)
    assert is_worth_a_retry(TASKS["sft"], None, state) is is_retried  # type: ignore[arg-type]


def test_the_cache_key_is_the_fingerprint_and_ignores_who_runs_the_stage(tmp_path: Path):
    config = PipelineConfig(workspace=WorkspaceConfig(root=str(tmp_path)))
    expected = fingerprints_of(stages_of(config), config.workspace)["base"]
    infos = [
        RunInfo(
            workspace=config.workspace,
            run_id=i,
            run_name="n",
            stage="base",
            started_at=datetime.now(UTC),
            run_url=f"http://x/{i}",
        )
        for i in "ab"
    ]
    keys = {cache_key(None, {"info": i, "job": BaseJob.of(config), "inputs": {}}) for i in infos}  # type: ignore[arg-type]
    assert keys == {f"base-{expected.fingerprint}"}


def test_there_is_a_task_for_every_kind_of_stage():
    kinds = [stage.kind for stage in stages_of(PipelineConfig())]
    assert [TASKS[kind].name for kind in kinds] == kinds


def test_results_lie_in_the_workspace_whatever_the_working_directory(tmp_path: Path):
    task = in_workspace(TASKS["sft"], WorkspaceConfig(root=str(tmp_path), retries=5, timeout_s=7))
    assert (task.retries, task.timeout_seconds, task.persist_result) == (5, 7, True)
    assert Path(str(task.result_storage)) == tmp_path / "prefect-results"


def test_every_further_try_waits_twice_as_long(tmp_path: Path):
    task = in_workspace(TASKS["sft"], WorkspaceConfig(root=str(tmp_path), retries=3))
    assert task.retry_delay_seconds == [5, 10, 20]


def test_outside_a_task_run_there_is_one_try():
    assert this_attempt(TeacherError("down")) == Attempt(number=1, of=1, next_in_s=None)


def test_jobs_travel_through_prefect_as_themselves():
    job = SftJob.of(PipelineConfig())
    assert SftJob.model_validate_json(job.model_dump_json()) == job
