"""Write the deployment of a run for a Prefect server: work pools of processes, Docker or Kubernetes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from klear_core.config.submit import SubmitConfig
from klear_core.pipeline.submission.request import PROFILE, Prepared, Submission, profile_files

ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "PREFECT_LOGGING_EXTRA_LOGGERS": "klear_core,tasks,flows",
    "PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW": "ignore",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30",
    "PREFECT_CLIENT_MAX_RETRIES": "8",
}
"""Environment of a run, as in prefect.yaml, which has the reasons."""


def prefect(submission: Submission, *, workdir: str, selection: Mapping[str, str]) -> Prepared:
    """Return the deployment and the commands that register it and start a run of it.

    Processes start in `workdir` and read the profile in the submission's folder. Containers have Klear in their image
    and all settings as parameters.
    """
    submit = submission.submit
    pool: dict[str, Any] = {"name": submit.queue, "job_variables": job_variables(submit)}
    if submit.priority:
        pool["work_queue_name"] = submit.priority
    folder = {"prefect.deployments.steps.set_working_directory": {"directory": workdir}}
    is_process = submit.prefect.pool == "process"
    if is_process:
        settings: dict[str, Any] = {"profile": str((submission.folder / PROFILE).parent)}
    else:
        settings = {"profile": None, "settings": submission.config.model_dump(mode="json")}
    deployment = {
        "name": submission.name,
        "entrypoint": "flows.pipeline.pipeline",
        "parameters": settings | dict(selection),
        "work_pool": pool,
        "pull": [folder] if is_process else [],
    }
    file = submission.folder / "prefect.yaml"
    text = yaml.safe_dump({"name": "klear", "deployments": [deployment]}, sort_keys=False, width=120)
    deploy = ("prefect", "--no-prompt", "deploy", "--prefect-file", str(file), "--name", submission.name)
    run = ("prefect", "--no-prompt", "deployment", "run", f"klear/{submission.name}")
    return Prepared(
        files={"prefect.yaml": text, **(profile_files(submission) if is_process else {})},
        commands=(deploy, run),
        watch=("prefect flow-run ls --flow-name klear", f"prefect deployment delete klear/{submission.name}"),
    )


def job_variables(submit: SubmitConfig) -> dict[str, Any]:
    """Return what the worker of the pool is told: variables of its base job template."""
    variables: dict[str, Any] = {"env": ENVIRONMENT, "stream_output": False}
    cpus, memory_gb = submit.cpus_per_node, submit.memory_gb_per_node
    match submit.prefect.pool:
        case "process":
            return variables
        case "docker":
            variables |= {"image": submit.image, "auto_remove": True}
            return variables | ({"mem_limit": f"{memory_gb}g"} if memory_gb else {})
        case "kubernetes":
            variables |= {"image": submit.image, "namespace": submit.kube.namespace, "finished_job_ttl": 3600}
            if cpus:
                variables |= {"cpu_request": str(cpus), "cpu_limit": str(cpus)}
            if memory_gb:
                variables |= {"memory_request": f"{memory_gb}Gi", "memory_limit": f"{memory_gb}Gi"}
            return variables
