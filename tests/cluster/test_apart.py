"""Raylets whose disks are apart, with an object server between them: RL, evaluation and judging as in one process."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from manifests import manifest
from object_server import object_server
from ray_builders import PROBLEMS, config
from rl_builders import Recorder, low_byte_judge, same_weights, tiny_base
from test_engine_pool import answers
from toy_inline_evals import toy_inline_eval
from verify_builders import fenced, problem, stdin_reference

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.records import StoredTestsWriter
from klear_core.artifacts.remote_paths import NODE_ROOT, remote_paths_of
from klear_core.artifacts.store import LocalStore
from klear_core.cluster.nodes import EnginePlan
from klear_core.config.evaluate import TorchEngineConfig, TorchEngineRuntime
from klear_core.config.pipeline import ScorerConfig
from klear_core.errors import ResourceError
from klear_core.evaluate.inline_eval import open_inline_eval, score_with, spec_of
from klear_core.generate.factory import start_here
from klear_core.rl.interfaces import LocalWorkers, RlSetup, Workers
from klear_core.rl.loop import run_rl
from klear_core.train.base_model import model_folder
from klear_core.train.inline_eval import ExportedCheckpoints
from klear_core.types import CodeReference, Outcome, StoredTests
from klear_core.verify import JudgePool
from tasks.resources import Needs, ray_session

pytest.importorskip("ray")
from ray.cluster_utils import Cluster
from raylets import kill_a_rank_node
from test_judge_pool import config as judge_config
from two_nodes import actors_of

from klear_core.cluster.nodes import ray_nodes
from klear_core.cluster.pools import RayScorer, build_cluster_judges
from klear_core.cluster.rl_workers import RayWorkers

pytestmark = pytest.mark.slow

URL = "s3://klear/apart"
NEEDS = Needs(num_cpus=1, object_store_bytes=80 << 20)
QUICK_DEATH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 5,
}


@dataclass(frozen=True)
class Apart:
    """A cluster of three raylets and a driver, each with a folder of its own."""

    cluster: Cluster
    root: Path

    def store(self) -> ObjectStore:
        return ObjectStore(self.root / "driver", URL)

    def fetched(self, kind: str) -> set[str]:
        """Nodes that have fetched an artifact of a kind."""
        return {path.parents[2].name for path in self.root.glob(f"node*/{kind}/*/manifest.json")}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Apart]:
    root = tmp_path_factory.mktemp("apart")
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
    patch = pytest.MonkeyPatch()
    with object_server("klear"):
        for name, value in settings.items():
            patch.setenv(name, value)

        def node(index: int) -> dict[str, object]:
            own = {NODE_ROOT: str(root / f"node{index}")}
            return {"num_cpus": 1, "object_store_memory": 80 << 20, "env_vars": own}

        head = node(0) | {"num_cpus": 0, "include_dashboard": False, "_system_config": QUICK_DEATH}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            cluster.add_node(**node(1))
            cluster.add_node(**node(2))
            cluster.wait_for_nodes()
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield Apart(cluster=cluster, root=root)
        finally:
            patch.undo()
            cluster.shutdown()


def make(store: LocalStore, kind: str, write: Callable[[Path], object]) -> ArtifactRef:
    with store.create(kind, "f1") as slot:
        assert slot.ref is None
        write(slot.workdir)
        return slot.publish(manifest(kind=kind))


def test_engines_answer_what_one_in_the_process_answers(apart: Apart) -> None:
    base = make(apart.store(), "base", tiny_base)
    here = apart.root / "here"
    expected = answers(base.path, here, is_pool=False)
    with apart.store().create("eval", "f1") as slot:
        assert answers(base.path, slot.workdir, is_pool=True) == expected
        slot.publish(manifest(kind="eval"))
    assert apart.fetched("base") <= {"node0", "node1", "node2"}
    assert apart.fetched("base")


def test_programs_are_judged_by_the_tests_of_an_artifact(apart: Apart) -> None:
    cases = [(f"{i} {'7 ' * 9000}\n", f"{i + 63000}\n") for i in range(3)]
    stored: list[CodeReference] = []

    def write(workdir: Path) -> None:
        with StoredTestsWriter(workdir / "a.tests", name="a.tests") as writer:
            reference = writer.stored(stdin_reference(*cases))
            assert isinstance(reference, CodeReference)
            stored.append(reference)

    curated = make(apart.store(), "curate", write)
    (reference,) = stored
    assert isinstance(reference.tests, StoredTests)
    tests = replace(reference.tests, path=str(curated.path / "a.tests"))
    asked = problem(replace(reference, tests=tests))
    right, wrong = (fenced(f"print(sum(map(int, input().split())){more})") for more in ("", " + 1"))
    with ray_session(NEEDS), build_cluster_judges(judge_config()) as pool:
        pool.check_sandbox()
        verdicts = [future.result() for future in [pool.submit(asked, answer) for answer in (right, wrong) * 4]]
    assert [(v.outcome, v.score) for v in verdicts] == [(Outcome.SCORED, 1.0), (Outcome.SCORED, 0.0)] * 4
    assert apart.fetched("curate") == {"node1", "node2"}


def test_a_model_of_the_curve_is_scored_on_another_disk_as_in_this_process(apart: Apart, tmp_path: Path) -> None:
    base = apart.store().find("base", "f1") or make(apart.store(), "base", tiny_base)
    engine = TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu"))
    job = toy_inline_eval(tmp_path, scorer=ScorerConfig(engine=engine, num_threads=1))
    with apart.store().create("sft", "curve") as slot:
        points = ExportedCheckpoints(slot.workdir)
        points.add(20, lambda folder: shutil.copytree(model_folder(base.path), folder))
        assert points.waiting() == [20]
        assert not list(slot.workdir.glob("**/step-*"))  # the copy counts
        plan = EnginePlan(num_engines=1, gpus_per_engine=0)
        scorer = RayScorer(job, plan, seed=0, remote=remote_paths_of(slot.workdir), key="sft")
        with ray_session(NEEDS):
            point = scorer.score(points.fetch(20))
            scorer.stop()
            with pytest.raises(ResourceError, match="stopped"):
                scorer.score(points.fetch(20))
        points.drop(20)
        assert points.waiting() == []
        slot.publish(manifest(kind="sft"))
    # loaded, and then deleted where it was loaded
    assert not list(apart.root.glob("*/.building/**/step-00000020"))
    with open_inline_eval(job, JudgePool, model_folder(base.path), seed=0) as inline_eval:
        assert point == asyncio.run(score_with(inline_eval, start_here, spec_of(job, model_folder(base.path), seed=0)))


class KillsTheLearnersNode(Recorder):
    """Kills a raylet with all its processes when a step has been logged."""

    def __init__(self, cluster: Cluster, at_step: int) -> None:
        super().__init__()
        self.cluster = cluster
        self.at_step = at_step

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        super().log(metrics, step=step)
        if step == self.at_step and len(self.cluster.worker_nodes) == 2:
            kill_a_rank_node(self.cluster, num_ranks=1)


def learn(base: Path, workdir: Path, workers: Workers, telemetry: Recorder) -> None:
    cfg = config(num_rollout_actors=4, max_restarts=1)  # the node's rank and engines are one loss
    setup = RlSetup(cfg=cfg, model=base, seed=0, workdir=workdir, remote=remote_paths_of(workdir))
    asyncio.run(run_rl(setup, PROBLEMS, low_byte_judge, telemetry, workers))


def test_a_run_of_rl_that_loses_the_learners_node_learns_what_one_process_learns(apart: Apart) -> None:
    """The last test but one: it takes a node."""
    base = apart.store().find("base", "f1") or make(apart.store(), "base", tiny_base)
    here = apart.root / "here"
    learn(base.path, here, LocalWorkers(), Recorder())
    with ray_session(NEEDS), apart.store().create("rl", "f1") as slot:
        learn(base.path, slot.workdir, RayWorkers(), KillsTheLearnersNode(apart.cluster, at_step=3))
        assert same_weights(slot.workdir, here)
        rl = slot.publish(manifest(kind="rl"))
    assert len(apart.cluster.worker_nodes) == 1
    assert not list((apart.root / "driver" / ".building").glob("*"))
    other = ObjectStore(apart.root / "another", URL).find("rl", "f1")
    assert other is not None
    assert same_weights(other.path, rl.path)
    assert apart.store().bucket.keys("work/") == []


def test_the_only_node_with_cpus_judges_and_not_the_driver_on_a_head_without_any(apart: Apart) -> None:
    """The last test: it leaves one node beside the head."""
    while len(apart.cluster.worker_nodes) > 1:
        apart.cluster.remove_node(next(iter(apart.cluster.worker_nodes)), allow_graceful=False)
    asked = problem(stdin_reference(("1 2\n", "3\n")))
    right, wrong = (fenced(f"print(sum(map(int, input().split())){more})") for more in ("", " + 1"))
    with ray_session(NEEDS):
        while sum(node.num_cpus > 0 for node in ray_nodes()) > 1:  # Ray notices a death after some seconds
            time.sleep(0.1)
    with ray_session(NEEDS), build_cluster_judges(judge_config()) as pool:
        pool.check_sandbox()
        assert [pool.judge(asked, answer).score for answer in (right, wrong)] == [1.0, 0.0]
        assert len(actors_of("JudgeActor")) == 1
