"""Write the manifests of a run on Kubernetes: a RayJob of KubeRay 1.7, its profile and its network policy."""

from __future__ import annotations

from typing import Any

import yaml

from klear_core.config.submit import in_seconds
from klear_core.pipeline.submission.request import PROFILE, Prepared, Submission, profile_files
from klear_core.stopping import LIMIT_STATUS

_FOLDER = "/etc/klear/profile"
_HEAD_CPUS, _HEAD_GB = 4, 32
"""Resources of a head that trains and samples nothing: the driver's, with the answers of a step (docs/scale.md)."""
_WAIT_FOR_NODES_S = 1800
"""As the stages' own `wait_for_nodes_s`: without a limit KubeRay waits for ever."""
_LABEL = "klear/run"
_OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}

Manifest = dict[str, Any]

_MAY_MAKE_NAMESPACES: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "Unconfined"},
    "appArmorProfile": {"type": "Unconfined"},
    "procMount": "Unmasked",
}
"""What `security_opt` says in infra/compose: no rights, but none of the profiles that forbid namespaces and a /proc."""


def kube(submission: Submission, *, ray_version: str) -> Prepared:
    """Return the manifests as one file for kubectl."""
    name, target = submission.name, submission.submit.kube
    is_cron = bool(target.schedule)
    kind = "raycronjob" if is_cron else "rayjob"
    job = _cron_job(submission, ray_version) if is_cron else _ray_job(submission, ray_version)
    manifests = [_profile(submission), _network_policy(submission), job]
    text = yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)
    at = f"--namespace {target.namespace}"
    return Prepared(
        files={"run.yaml": text},
        commands=(("kubectl", "apply", "--filename", str(submission.folder / "run.yaml")),),
        watch=(f"kubectl get {kind} {name} {at} --watch", f"kubectl delete {kind} {name} {at}"),
    )


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
    """Writes texts of several lines as such, so that a profile in a manifest can be read, and nothing by reference."""

    def ignore_aliases(self, _data: object) -> bool:
        return True


def _as_block(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_block)


def _metadata(submission: Submission, **labels: str) -> Manifest:
    return {
        "name": submission.name,
        "namespace": submission.submit.kube.namespace,
        "labels": {_LABEL: submission.name, **labels},
    }


def _profile(submission: Submission) -> Manifest:
    data = {PROFILE.rpartition("/")[2]: profile_files(submission)[PROFILE]}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(submission), "data": data}


def _network_policy(submission: Submission) -> Manifest:
    """Let only pods of the run reach its pods, and KubeRay's operator the dashboard, by which it submits."""
    own = {"podSelector": {"matchLabels": {_LABEL: submission.name}}}
    operator = {"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(submission),
        "spec": {
            **own,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [own]}, {"from": [operator], "ports": [{"protocol": "TCP", "port": 8265}]}],
        },
    }


def _ray_job(submission: Submission, ray_version: str) -> Manifest:
    submit = submission.submit
    labels = {}
    if submit.queue:
        labels["kueue.x-k8s.io/queue-name"] = submit.queue
    if submit.priority:
        labels["kueue.x-k8s.io/priority-class"] = submit.priority
    metadata = _metadata(submission, **labels)
    spec = _job_spec(submission, ray_version)
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _cron_job(submission: Submission, ray_version: str) -> Manifest:
    """Return a retraining by the clock; it needs the operator's feature gate RayCronJob."""
    target = submission.submit.kube
    spec = {
        "schedule": target.schedule,
        "timeZone": target.time_zone,
        "jobTemplate": _job_spec(submission, ray_version),
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayCronJob", "metadata": _metadata(submission), "spec": spec}


def _job_spec(submission: Submission, ray_version: str) -> Manifest:
    submit = submission.submit
    is_retried = not {"error", "interruption"}.isdisjoint(submit.retry)
    run = " ".join(["klear", "run", _FOLDER, *submission.options])
    spec: Manifest = {
        # KubeRay starts again what fails: a run that its deadline or idle_kill has ended counts as done.
        "entrypoint": f"{run} || [ $? = {LIMIT_STATUS} ]",
        "submissionMode": "HTTPMode",  # the operator submits, with the token: no pod more to let through
        "backoffLimit": submit.max_retries if is_retried else 0,
    }
    if submit.deadline:
        spec["activeDeadlineSeconds"] = in_seconds(submit.deadline)
    is_patient = "no-capacity" in submit.retry
    spec["preRunningDeadlineSeconds"] = in_seconds(submit.retry_for) if is_patient else _WAIT_FOR_NODES_S
    keep_s = in_seconds(submit.kube.keep_head)
    if submit.queue:
        # Kueue suspends a RayJob until there is room, which KubeRay allows only without deletion rules.
        spec |= {"shutdownAfterJobFinishes": True, "ttlSecondsAfterFinished": keep_s}
    else:
        spec["deletionStrategy"] = {"deletionRules": _deletion_rules(keep_s)}
    spec["rayClusterSpec"] = _cluster(submission, ray_version)
    return spec


def _deletion_rules(keep_s: int) -> list[Manifest]:
    """Return the rules that free the GPUs at once and keep the head, with its logs, for a while."""
    return [
        {"policy": policy, "condition": {"jobStatus": status, "ttlSeconds": after_s}}
        for status in ("SUCCEEDED", "FAILED")
        for policy, after_s in (("DeleteWorkers", 0), ("DeleteCluster", keep_s))
    ]


def _cluster(submission: Submission, ray_version: str) -> Manifest:
    """Return head and workers. A single node is the head itself."""
    submit = submission.submit
    assert submit.cpus_per_node is not None, "checked by require_possible"
    assert submit.memory_gb_per_node is not None, "checked by require_possible"
    node: Manifest = {"cpu": str(submit.cpus_per_node), "memory": f"{submit.memory_gb_per_node}Gi"}
    if submit.gpus_per_node:
        node["nvidia.com/gpu"] = submit.gpus_per_node
    head: Manifest = {"cpu": str(_HEAD_CPUS), "memory": f"{_HEAD_GB}Gi"}
    is_single = submit.nodes == 1
    cluster: Manifest = {
        "rayVersion": ray_version,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": {} if is_single else {"num-cpus": "0", "num-gpus": "0"},
            "template": _pod(submission, "ray-head", node if is_single else head),
        },
    }
    if not is_single:
        workers = {
            "groupName": "nodes",
            "replicas": submit.nodes,
            "minReplicas": submit.nodes,
            "maxReplicas": submit.nodes,
            "rayStartParams": {},
            "template": _pod(submission, "ray-worker", node),
        }
        cluster["workerGroupSpecs"] = [workers]
    return cluster


def _pod(submission: Submission, container: str, resources: Manifest) -> Manifest:
    submit, target = submission.submit, submission.submit.kube
    volumes: list[Manifest] = [
        {"name": "profile", "configMap": {"name": submission.name}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "profile", "mountPath": _FOLDER}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    if target.volume:
        volumes.append({"name": "workspace", "persistentVolumeClaim": {"claimName": target.volume}})
        mounts.append({"name": "workspace", "mountPath": submission.config.workspace.root})
    main: Manifest = {
        "name": container,
        "image": submit.image,
        "env": [{"name": "RAY_worker_niceness", "value": "0"}],
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": mounts,
    }
    if target.secret:
        main["envFrom"] = [{"secretRef": {"name": target.secret}}]
    spec: Manifest = {"containers": [main], "volumes": volumes}
    if target.user_namespaces:
        main["securityContext"] = _MAY_MAKE_NAMESPACES
        spec["hostUsers"] = False  # Kubernetes asks for it where /proc is not masked
    return {"metadata": {"labels": {_LABEL: submission.name}}, "spec": spec}
