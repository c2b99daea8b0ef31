"""Manifests for Kubernetes and KubeRay, and deployments for Prefect, checked against the schemas of all three."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator, ValidationError
from prefect.server.api import collections_data
from prefect.utilities.templating import apply_values

from klear_core.config.load import validate
from klear_core.config.pipeline import PipelineConfig
from klear_core.pipeline.submission.kube import kube
from klear_core.pipeline.submission.prefect import ENVIRONMENT, job_variables, prefect
from klear_core.pipeline.submission.request import Submission

FILES = Path(__file__).parents[2] / "files"
KUBERAY = json.loads((FILES / "kuberay_v1.7.0.json").read_text())
KUBERNETES = json.loads((FILES / "kubernetes_v1.34.0.json").read_text())
DEFINED_AS = {
    "ConfigMap": "core.v1.ConfigMap",
    "NetworkPolicy": "networking.v1.NetworkPolicy",
    "Job": "batch.v1.Job",
}
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


def check_object(manifest: dict[str, Any]) -> None:
    """Check an object as a whole, whatever its kind; Kubernetes checks the metadata of all."""
    kind = manifest["kind"]
    Draft202012Validator(schema_of("apimachinery.pkg.apis.meta.v1.ObjectMeta")).validate(manifest["metadata"])
    for label in manifest["metadata"].get("labels", {}).values():
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?", label), label
    if kind in DEFINED_AS:
        Draft202012Validator(schema_of(f"api.{DEFINED_AS[kind]}")).validate(manifest)
    else:
        assert manifest.keys() == {"apiVersion", "kind", "metadata", "spec"}
        assert manifest["apiVersion"] == "ray.io/v1"
        check(kind, manifest["spec"])


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/$defs/io.k8s.{name}", "$defs": KUBERNETES["$defs"]}


# ---- Kubernetes and KubeRay ----


@pytest.mark.parametrize(
    "submit",
    [
        {},
        {"nodes": 4, "queue": "team", "priority": "high", "deadline": "5d", "retry": ["error", "no-capacity"]},
        {"nodes": 2, "gpus_per_node": 0, "kube": {"volume": "runs", "secret": "keys"}},
        {"nodes": 2, "kube": {"user_namespaces": True}},
        {"kube": {"schedule": "0 3 * * 1", "time_zone": "Europe/Berlin"}},
    ],
)
def test_all_objects_of_a_submission_are_such_by_the_schemas_of_kubernetes_and_kuberay(submit):
    found = manifests(**submit)
    assert found.keys() == {
        "ConfigMap",
        "NetworkPolicy",
        "RayCronJob" if "schedule" in submit.get("kube", {}) else "RayJob",
    }
    for manifest in found.values():
        check_object(manifest)


def test_a_manifest_has_no_references():
    text = kube(submission(nodes=2, kube={"volume": "runs"}), ray_version="2.60.0").files["run.yaml"]
    assert "&id" not in text


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("RayJob", ("spec", "numNodes"), 4, "'numNodes' was unexpected"),
        ("RayJob", ("spec", "backoffLimit"), "3", "not of type 'integer'"),
        ("RayJob", ("spec", "rayClusterSpec", "authOptions", "mode"), "password", "is not one of"),
        ("RayJob", ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "gpus"), 8, "'gpus' was unexpected"),
        ("RayJob", ("metadata", "label"), {}, "'label' was unexpected"),
        ("NetworkPolicy", ("spec", "ingres"), [], "'ingres' was unexpected"),
        ("NetworkPolicy", ("apiVersion",), "networking.k8s.io/v2", "is not one of"),
        ("ConfigMap", ("data", "seed"), 7, "not of type 'string'"),
    ],
)
def test_the_schemas_refuse_fields_and_values_that_there_are_not(kind, path, value, said):
    manifest = manifests()[kind]
    *parents, last = path
    inner = manifest
    for key in parents:
        inner = inner[key]
    inner[last] = value
    with pytest.raises(ValidationError, match=said):
        check_object(manifest)


def test_a_retraining_is_a_raycronjob_with_the_same_job():
    cron = manifests(kube={"schedule": "0 3 * * 1", "time_zone": "Europe/Berlin"})["RayCronJob"]["spec"]
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
        ({"retry": []}, "preRunningDeadlineSeconds", 1800),
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


def started_by(pool: str, **submit: Any) -> dict[str, Any]:
    """What Prefect's worker makes of our variables and its base job template."""
    template = POOLS[f"prefect-{pool}"][pool]["default_base_job_configuration"]
    properties = template["variables"]["properties"].items()
    defaults = {name: each["default"] for name, each in properties if "default" in each}
    variables = job_variables(submission(queue="klear", prefect={"pool": pool}, **submit).submit)
    return apply_values(template["job_configuration"], defaults | variables)


def test_a_pool_of_kubernetes_starts_a_job_by_the_schema_of_kubernetes():
    job = started_by("kubernetes", kube={"namespace": "team"})["job_manifest"]
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert (job["metadata"]["namespace"], container["image"]) == ("team", NODES["image"])
    assert container["resources"]["limits"] == {"cpu": "96", "memory": "900Gi"}
    assert container["env"] == ENVIRONMENT
    for misplaced in ("completions", "parallelism"):  # by Prefect's template, in the pod; Kubernetes leaves them out
        del job["spec"]["template"]["spec"][misplaced]
    # the worker writes the environment as a list
    container["env"] = [{"name": name, "value": value} for name, value in container["env"].items()]
    check_object(job)
    container["gpus"] = 8
    with pytest.raises(ValidationError, match="'gpus' was unexpected"):
        check_object(job)


def test_a_pool_of_docker_starts_a_container_of_the_image_with_the_memory_that_is_asked_for():
    container = started_by("docker")
    assert (container["image"], container["mem_limit"]) == (NODES["image"], "900g")
    assert container["env"] == ENVIRONMENT


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
