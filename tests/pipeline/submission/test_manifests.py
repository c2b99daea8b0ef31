"""Manifests for KubeRay and deployments for Prefect, checked against the schemas of both."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from prefect.server.api import collections_data

from klear_core.config.load import validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.pipeline.submission.kube import kube
from klear_core.pipeline.submission.prefect import ENVIRONMENT, job_variables, prefect
from klear_core.pipeline.submission.request import Submission

KUBERAY = json.loads((Path(__file__).parents[2] / "files" / "kuberay_v1.7.0.json").read_text())
NODES = {"image": "registry/klear:1", "cpus_per_node": 96, "memory_gb_per_node": 900, "gpus_per_node": 8}
NAME = "klear-1128-053012"


def submission(**submit: Any) -> Submission:
    settings = {"workspace": {"root": "/runs", "submit": NODES | submit}}
    return Submission(name=NAME, folder=Path("/runs/submissions"), config=validate(settings, origin="test"))


def manifests(**submit: Any) -> dict[str, dict[str, Any]]:
    text = kube(submission(**submit), ray_version="2.60.0").files["run.yaml"]
    return {manifest["kind"]: manifest for manifest in yaml.safe_load_all(text)}


def ray_job(**submit: Any) -> dict[str, Any]:
    return manifests(**submit)["RayJob"]["spec"]


def check(kind: str, spec: dict[str, Any]) -> None:
    Draft202012Validator({**KUBERAY["properties"][kind], "$defs": KUBERAY["$defs"]}).validate(spec)


# ---- KubeRay ----


@pytest.mark.parametrize(
    "submit",
    [
        {},
        {"nodes": 4, "queue": "team", "priority": "high", "deadline": "5d", "retry": ["error", "no-capacity"]},
        {"nodes": 2, "gpus_per_node": 0, "kube": {"volume": "runs", "secret": "keys"}},
        {"nodes": 2, "kube": {"user_namespaces": True}},
    ],
)
def test_a_rayjob_is_one_by_the_schema_of_kuberay(submit):
    check("RayJob", ray_job(**submit))


def test_a_manifest_has_no_references():
    text = kube(submission(nodes=2, kube={"volume": "runs"}), ray_version="2.60.0").files["run.yaml"]
    assert "&id" not in text


def test_the_schema_refuses_a_field_that_kuberay_does_not_have():
    with pytest.raises(ValidationError, match="'numNodes' was unexpected"):
        check("RayJob", ray_job() | {"numNodes": 4})


def test_a_retraining_is_a_raycronjob_by_the_schema_of_kuberay():
    cron = manifests(kube={"schedule": "0 3 * * 1", "time_zone": "Europe/Berlin"})["RayCronJob"]["spec"]
    check("RayCronJob", cron)
    assert (cron["schedule"], cron["timeZone"]) == ("0 3 * * 1", "Europe/Berlin")
    assert cron["jobTemplate"] == ray_job()


def test_several_nodes_are_workers_of_a_head_without_gpus_and_one_node_is_the_head():
    cluster = ray_job(nodes=4)["rayClusterSpec"]
    [workers] = cluster["workerGroupSpecs"]
    assert (workers["replicas"], gpus(workers)) == (4, 8)
    assert (gpus(cluster["headGroupSpec"]), cluster["headGroupSpec"]["rayStartParams"]["num-gpus"]) == (None, "0")
    alone = ray_job(nodes=1)["rayClusterSpec"]
    assert "workerGroupSpecs" not in alone
    assert gpus(alone["headGroupSpec"]) == 8


def gpus(group: dict[str, Any]) -> int | None:
    [container] = group["template"]["spec"]["containers"]
    return container["resources"]["limits"].get("nvidia.com/gpu")


def test_a_cluster_asks_for_a_token():
    assert ray_job()["rayClusterSpec"]["authOptions"] == {"mode": "token"}


def test_gpus_are_free_at_once_and_the_head_stays_for_its_logs():
    rules = ray_job(kube={"keep_head": "2h"})["deletionStrategy"]["deletionRules"]
    found = [(r["condition"]["jobStatus"], r["policy"], r["condition"]["ttlSeconds"]) for r in rules]
    assert found == [
        ("SUCCEEDED", "DeleteWorkers", 0),
        ("SUCCEEDED", "DeleteCluster", 7200),
        ("FAILED", "DeleteWorkers", 0),
        ("FAILED", "DeleteCluster", 7200),
    ]


def test_a_job_in_a_queue_of_kueue_may_be_suspended():
    """KubeRay refuses deletion rules beside shutdownAfterJobFinishes, and Kueue needs the latter."""
    job = manifests(queue="team", priority="high")["RayJob"]
    labels = job["metadata"]["labels"]
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    assert labels["kueue.x-k8s.io/priority-class"] == "high"
    assert job["spec"]["shutdownAfterJobFinishes"]
    assert "deletionStrategy" not in job["spec"]


@pytest.mark.parametrize(
    ("submit", "field", "value"),
    [
        ({}, "backoffLimit", 3),
        ({"retry": ["error"], "max_retries": 5}, "backoffLimit", 5),
        ({"retry": []}, "backoffLimit", 0),
        ({"deadline": "1d"}, "activeDeadlineSeconds", 86400),
        ({"retry": ["no-capacity"], "retry_for": "6h"}, "preRunningDeadlineSeconds", 21600),
    ],
)
def test_retries_and_deadlines_are_those_of_the_settings(submit, field, value):
    assert ray_job(**submit)[field] == value


def test_pods_are_reached_by_pods_of_the_run_and_the_dashboard_by_the_operator():
    found = manifests(nodes=2)
    policy, cluster = found["NetworkPolicy"]["spec"], found["RayJob"]["spec"]["rayClusterSpec"]
    own = {"matchLabels": {"klear/run": NAME}}
    pods = [cluster["headGroupSpec"]["template"], cluster["workerGroupSpecs"][0]["template"]]
    assert [pod["metadata"]["labels"] for pod in pods] == [own["matchLabels"]] * 2
    assert policy["podSelector"] == own
    inside, operator = policy["ingress"]
    assert inside == {"from": [{"podSelector": own}]}
    assert operator["ports"] == [{"protocol": "TCP", "port": 8265}]
    check("RayJob", with_rules(found["RayJob"]["spec"], policy["ingress"]))


def with_rules(job: dict[str, Any], rules: list[dict[str, Any]]) -> dict[str, Any]:
    """The job with the rules in KubeRay's own policy, whose schema is that of Kubernetes."""
    cluster = job["rayClusterSpec"] | {"networkPolicy": {"mode": "DenyAllIngress", "head": {"ingressRules": rules}}}
    return job | {"rayClusterSpec": cluster}


def test_pods_may_make_the_namespaces_of_the_sandbox_as_the_containers_of_compose_may():
    cluster = ray_job(kube={"user_namespaces": True})["rayClusterSpec"]
    spec = cluster["headGroupSpec"]["template"]["spec"]
    [container] = spec["containers"]
    assert (spec["hostUsers"], container["securityContext"]["procMount"]) == (False, "Unmasked")
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_profile_is_mounted_where_klear_run_reads_it():
    found = manifests(kube={"volume": "runs"})
    [container] = found["RayJob"]["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert found["RayJob"]["spec"]["entrypoint"] == f"klear run {mounts['profile']} || [ $? = 3 ]"
    assert mounts["workspace"] == "/runs"
    profile = found["ConfigMap"]["data"]["run.toml"]
    assert validate(tomllib.loads(profile), origin="test") == submission(kube={"volume": "runs"}).config


# ---- Prefect ----

POOLS = json.loads((Path(collections_data.__path__[0]) / "views" / "aggregate-worker-metadata.json").read_text())
"""The pools that Prefect knows, as its server serves them to its UI."""


@pytest.mark.parametrize("pool", ["process", "docker", "kubernetes"])
def test_job_variables_are_those_of_prefects_base_job_template(pool):
    submit = submission(queue="klear", prefect={"pool": pool}).submit
    package = "prefect" if pool == "process" else f"prefect-{pool}"
    template = POOLS[package][pool]["default_base_job_configuration"]["variables"]
    variables = job_variables(submit)
    assert variables.keys() <= template["properties"].keys()
    Draft202012Validator(template).validate(variables)


def test_the_environment_of_a_run_is_that_of_the_deployments_in_the_repository():
    deployments = yaml.safe_load((Path(__file__).parents[3] / "prefect.yaml").read_text())
    assert deployments["definitions"]["pool"]["job_variables"]["env"] == ENVIRONMENT


def test_a_deployment_has_all_settings_of_the_run_and_the_stages_that_were_asked_for():
    given = submission(queue="gpus", priority="high", prefect={"pool": "kubernetes"})
    prepared = prefect(given, workdir="/klear", selection={"until": "rl"})
    [deployment] = yaml.safe_load(prepared.files["prefect.yaml"])["deployments"]
    assert PipelineConfig.model_validate(deployment["parameters"]["settings"]) == given.config
    assert deployment["parameters"]["until"] == "rl"
    assert (deployment["work_pool"]["name"], deployment["work_pool"]["work_queue_name"]) == ("gpus", "high")


def test_a_process_reads_the_profile_of_the_submission_in_the_folder_where_it_was_submitted():
    files = prefect(submission(queue="gpus"), workdir="/klear", selection={}).files
    [deployment] = yaml.safe_load(files["prefect.yaml"])["deployments"]
    assert deployment["parameters"] == {"profile": "/runs/submissions/profile"}
    assert "profile/run.toml" in files
    [step] = deployment["pull"]
    assert step["prefect.deployments.steps.set_working_directory"] == {"directory": "/klear"}
