"""The champion in a real model registry: once for each decision, safe against kills and against another run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from threading import Thread

import pytest
from mlflow import MlflowClient
from stored_evaluations import RIGHT, WRONG, evaluation, said, sample

from klear_core.artifacts.manifest import ArtifactRef, read_manifest
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, PromoteConfig, WorkspaceConfig
from klear_core.config.stage import PromoteJob
from klear_core.config.train import TinyModelConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.evaluate.compare.promotion import are_comparable, read_decision
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import open_store
from klear_core.train.base_model import prepare_base
from tasks.evaluation import promote
from tasks.mlflow_backend import mlflow_client
from tasks.model_registry import Promotion, Registry, open_registry
from tasks.progress import Console, shown_on
from tasks.tracking import RunInfo, tracking_uri

_names = count()


@pytest.fixture(scope="module")
def workspace(mlflow_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> WorkspaceConfig:
    """One for all tests here; each test has a registered model of its own."""
    root = tmp_path_factory.mktemp("workspace")
    shutil.copytree(mlflow_folder, root / "mlflow")
    return WorkspaceConfig(root=str(root))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture
def name() -> str:
    return f"model{next(_names)}"


@pytest.fixture
def registry(workspace: WorkspaceConfig, name: str) -> Registry:
    return open_registry(workspace, name)


def promotion(model: str, over: int | None, decision: str = "promote/d1") -> Promotion:
    return Promotion(
        model=model,
        model_uri=f"file:///{model}",
        evaluation=f"evaluate/{model}",
        evaluation_uri="file:///e",
        decision=decision,
        decision_uri="file:///d",
        run="r",
        over=over,
    )


class Killed(BaseException):
    """Stands for the end of the process."""


class DyingClient:
    """MLflow's client; its process ends just before or just after the call that writes for the n-th time.

    A dead process sends nothing more: it does not even end its turn.
    """

    WRITES = (
        "create_registered_model",
        "create_model_version",
        "set_registered_model_alias",
        "set_model_version_tag",
        "delete_model_version",
    )

    def __init__(self, client: MlflowClient, *, at: int, after: bool) -> None:
        self.client, self.at, self.after, self.num = client, at, after, 0

    def __getattr__(self, method: str) -> Callable[..., object]:
        call = getattr(self.client, method)
        if method not in self.WRITES:
            return call

        def write(*args: object, **kwargs: object) -> object:
            self.num += 1
            if self.num > self.at or (self.num == self.at and not self.after):
                raise Killed
            result = call(*args, **kwargs)
            if self.num == self.at:
                raise Killed
            return result

        return write


def dying(workspace: WorkspaceConfig, name: str, *, at: int, after: bool) -> Registry:
    """Return the registry of another process of the same workspace."""
    client = DyingClient(mlflow_client(tracking_uri(workspace)), at=at, after=after)
    lock = Path(workspace.root) / "mlflow" / ".champion.lock"
    return Registry(client, name, lock=lock, server="s")  # type: ignore[arg-type]


def test_a_model_becomes_champion_once_however_often_it_is_promoted(registry: Registry) -> None:
    assert registry.champion() is None
    for _ in range(3):
        assert registry.promote(promotion("rl/a", None))
    (version,) = registry.versions()
    champion = registry.champion()
    assert champion is not None
    assert (champion.number, champion.promotion.model, champion.rollback) == (1, "rl/a", None)
    assert champion.promoted_at
    assert version == champion


def test_a_model_is_not_promoted_over_a_champion_that_it_was_not_compared_with(registry: Registry) -> None:
    assert registry.promote(promotion("rl/a", None))
    assert not registry.promote(promotion("rl/b", None))  # decided when there was no champion yet
    assert registry.promote(promotion("rl/b", 1))
    assert not registry.promote(promotion("rl/c", 1))
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.model == "rl/b"
    assert [v.promotion.model for v in registry.versions()] == ["rl/a", "rl/b"]


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("after", [False, True])
def test_a_promotion_that_was_killed_at_any_write_is_completed_by_the_next_attempt(
    workspace: WorkspaceConfig, registry: Registry, name: str, at: int, after: bool
) -> None:
    with pytest.raises(Killed):
        dying(workspace, name, at=at, after=after).promote(promotion("rl/a", None))
    assert registry.promote(promotion("rl/a", None))
    (version,) = registry.versions()
    assert version == registry.champion()
    assert version.promoted_at
    assert tickets(workspace, name) == []


def test_a_model_that_was_rolled_back_after_its_decision_is_not_promoted(registry: Registry) -> None:
    assert registry.promote(promotion("rl/a", None))
    decided = promotion("rl/b", 1)
    assert registry.promote(decided)
    registry.roll_back(by="ann", why="rude")
    assert not registry.promote(decided)
    champion = registry.champion()
    assert champion is not None
    assert champion.number == 1


def test_rollback_goes_back_one_champion_at_a_time_and_says_who_why_and_when(registry: Registry) -> None:
    with pytest.raises(ConfigError, match="no champion, so there is nothing to roll back"):
        registry.roll_back(by="ann", why="x")
    for model, over in (("rl/a", None), ("rl/b", 1), ("rl/c", 2)):
        assert registry.promote(promotion(model, over))
    lost, has = registry.roll_back(by="ann", why="rude")
    assert (lost.number, has.number) == (3, 2)
    assert "rolled back to version 2 by ann at 20" in registry.withdrawn("rl/c")
    assert registry.withdrawn("rl/c").endswith(": rude")
    assert registry.withdrawn("rl/b") == ""
    # the next one is compared with version 2 and goes back to it
    assert registry.promote(promotion("rl/d", 2))
    assert registry.roll_back(by="ann", why="y")[1].number == 2
    assert registry.roll_back(by="ann", why="y")[1].number == 1
    with pytest.raises(ConfigError, match=r"version 1 of .* has no former champion to go back to: it was the first"):
        registry.roll_back(by="ann", why="y")


@pytest.mark.parametrize("at", [1, 2, 3, 4, 5, 6, 7])
def test_a_rollback_that_was_killed_at_any_write_is_completed_by_the_next(
    workspace: WorkspaceConfig, registry: Registry, name: str, at: int
) -> None:
    assert registry.promote(promotion("rl/a", None))
    assert registry.promote(promotion("rl/b", 1))
    with pytest.raises(Killed):
        dying(workspace, name, at=at, after=False).roll_back(by="ann", why="x")
    lost, has = registry.roll_back(by="bob", why="y")
    assert (lost.number, has.number) == (2, 1)
    assert "by bob" in registry.withdrawn("rl/b")


@pytest.mark.parametrize("num_promoted", [1, 2])
def test_a_rollback_never_returns_to_a_version_whose_own_rollback_was_killed(
    workspace: WorkspaceConfig, registry: Registry, name: str, num_promoted: int
) -> None:
    """Version 2 keeps the alias after its rollback was killed, and others are promoted before that is repeated."""
    assert registry.promote(promotion("rl/a", None))
    assert registry.promote(promotion("rl/b", 1))
    # two writes draw the ticket, four are the tags, the seventh moves the alias
    with pytest.raises(Killed):
        dying(workspace, name, at=7, after=False).roll_back(by="ann", why="rude")
    champion = registry.champion()
    assert champion is not None
    assert champion.rollback is not None
    for i in range(num_promoted):
        assert registry.promote(promotion(f"rl/new{i}", 2 + i))
    for number in range(2 + num_promoted, 2, -1):
        lost, has = registry.roll_back(by="bob", why="slow")
        assert (lost.number, has.number) == (number, number - 1 if number > 3 else 1)
    assert "to version 1 by bob" in registry.withdrawn("rl/new0")


def test_an_alias_that_somebody_else_set_is_named(workspace: WorkspaceConfig, registry: Registry, name: str) -> None:
    client = mlflow_client(tracking_uri(workspace))
    client.create_registered_model(name)
    client.create_model_version(name, source="file:///x")
    client.set_registered_model_alias(name, "champion", "1")
    with pytest.raises(ConfigError, match="Klear did not promote it"):
        registry.champion()


# ---- two workspaces on one server ----


class Interrupted:
    """MLflow's client; before the first call of `method` about the registered model `name` it calls `act`."""

    def __init__(self, client: MlflowClient, method: str, name: str, act: Callable[[], object]) -> None:
        self.client, self.method, self.name, self.acts = client, method, name, iter([act])

    def __getattr__(self, method: str) -> Callable[..., object]:
        call = getattr(self.client, method)
        if method != self.method:
            return call

        def interrupted(name: str, *args: object, **kwargs: object) -> object:
            if name == self.name:
                for act in self.acts:
                    act()
            return call(name, *args, **kwargs)

        return interrupted


def elsewhere(workspace: WorkspaceConfig, name: str, client: object = None, **more: float) -> Registry:
    """Return the registry as another workspace opens it, which has a lock file of its own."""
    client = client or mlflow_client(tracking_uri(workspace))
    lock = Path(workspace.root) / "elsewhere" / ".champion.lock"
    return Registry(client, name, lock=lock, server="s", **more)  # type: ignore[arg-type]


def tickets(workspace: WorkspaceConfig, name: str) -> list[object]:
    return list(mlflow_client(tracking_uri(workspace)).search_model_versions(f"name = '{name}.lock'"))


def draw_ticket(workspace: WorkspaceConfig, name: str, holder: str) -> str:
    """Return the number of a ticket of another machine, which is now changing the champion."""
    client = mlflow_client(tracking_uri(workspace))
    client.create_registered_model(f"{name}.lock")
    made = client.create_model_version(f"{name}.lock", source="klear:/turn", tags={"klear.holder": holder})
    return str(made.version)


def test_of_two_workspaces_that_promote_at_once_one_is_told_that_the_champion_changed(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    """The second begins right before the first one's alias moves: it must not see the old champion any more."""
    assert registry.promote(promotion("rl/a", None))
    second: list[bool] = []
    thread = Thread(target=lambda: second.append(registry.promote(promotion("rl/c", 1))))

    def begin() -> None:
        thread.start()
        thread.join(timeout=0.5)  # without turns it would be champion by then, and lose its place right after

    client = Interrupted(mlflow_client(tracking_uri(workspace)), "set_registered_model_alias", name, begin)
    assert elsewhere(workspace, name, client).promote(promotion("rl/b", 1))
    thread.join()
    assert second == [False]
    champion = registry.champion()
    assert champion is not None
    assert champion.promotion.model == "rl/b"


def test_a_rollback_that_waits_while_the_champion_changes_is_refused(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    """Two people who roll back version 3 at once mean version 3: the second must not take version 2 away."""
    for model, over in (("rl/a", None), ("rl/b", 1), ("rl/c", 2)):
        assert registry.promote(promotion(model, over))

    def other_person() -> None:
        registry.roll_back(by="bob", why="y")

    client = Interrupted(
        mlflow_client(tracking_uri(workspace)), "create_registered_model", f"{name}.lock", other_person
    )
    with pytest.raises(ConfigError, match=r"changed meanwhile, from version 3 to version 2 \(rl/b\), so nothing was"):
        elsewhere(workspace, name, client).roll_back(by="ann", why="x")
    champion = registry.champion()
    assert champion is not None
    assert (champion.number, champion.rollback) == (2, None)


def test_the_turn_of_a_process_that_died_on_another_machine_ends_after_a_while(
    workspace: WorkspaceConfig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    draw_ticket(workspace, name, "node7:/w")
    assert elsewhere(workspace, name, turn_s=0.3).promote(promotion("rl/a", None))
    assert "node7:/w did not finish changing the champion within" in caplog.text
    assert tickets(workspace, name) == []


def test_a_process_that_took_too_long_does_not_move_the_alias(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    """It was stopped while it made its version, and another one ended its turn."""
    client = mlflow_client(tracking_uri(workspace))

    def end_turn() -> None:
        for ticket in client.search_model_versions(f"name = '{name}.lock'"):
            client.delete_model_version(ticket.name, ticket.version)

    slow = elsewhere(workspace, name, Interrupted(client, "create_registered_model", name, end_turn))
    with pytest.raises(ResourceError, match="took longer than 120 s to change the champion"):
        slow.promote(promotion("rl/a", None))
    assert registry.champion() is None
    assert registry.promote(promotion("rl/a", None))
    assert [version.number for version in registry.versions()] == [1]


CONTENDER = """
import sys, time
from pathlib import Path
from klear_core.config.pipeline import WorkspaceConfig
from tasks.model_registry import open_registry
from tasks.model_registry import Promotion

folder, who, name = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
registry = open_registry(WorkspaceConfig(root=str(folder / who)), name)


def meet(where):
    (folder / f"{who} {where}").touch()
    while True:
        is_running = (folder / "running").exists()  # asked first: the other may end well right after it was here
        if len(list(folder.glob(f"* {where}"))) == 2:
            return
        if not is_running:
            sys.exit("the other process has failed")
        time.sleep(0.01)


for i in range(3):
    champion = registry.champion()
    meet(f"has read {i}")
    facts = {field: f"{who}/{i}" for field in Promotion.model_fields if field != "over"}
    print(registry.promote(Promotion(over=champion.number if champion else None, **facts)), flush=True)
    meet(f"has tried {i}")
"""


@pytest.mark.slow
def test_of_two_processes_that_promote_over_the_same_champion_one_does(
    workspace: WorkspaceConfig, registry: Registry, name: str, tmp_path: Path
) -> None:
    """Three times, two processes in two workspaces read the champion, and then both take its place at once."""
    (tmp_path / "running").touch()
    environment = {**os.environ, "MLFLOW_TRACKING_URI": tracking_uri(workspace)}
    commands = [[sys.executable, "-c", CONTENDER, str(tmp_path), who, name] for who in ("ann", "bob")]
    processes = [subprocess.Popen(c, env=environment, stdout=subprocess.PIPE, text=True) for c in commands]
    while all(process.poll() is None for process in processes):
        time.sleep(0.05)
    (tmp_path / "running").unlink()  # one has ended: if it failed, the other does not wait for it
    ann, bob = (process.communicate()[0].split() for process in processes)
    assert [sorted(pair) for pair in zip(ann, bob, strict=True)] == [["False", "True"]] * 3
    promoted = [version for version in registry.versions() if version.promoted_at]
    assert [version.promotion.over for version in promoted] == [None, 1, 2]
    assert registry.champion() == promoted[-1]
    assert tickets(workspace, name) == []


# ---- the stage ----


def inputs_of(workspace: WorkspaceConfig, num_right: int, seed: int, **more: ArtifactRef) -> dict[str, ArtifactRef]:
    """Store a model that answers so many of 60 problems right, and return it with its scores."""
    samples = [sample(i, 0, said(i), RIGHT if i < num_right else WRONG) for i in range(60)]
    scores = evaluation(Path(workspace.root), samples, seed=seed, judged=True)
    model = open_store(workspace).find("rl", f"rl{seed}".ljust(20, "0"))
    assert model is not None
    return {"model": model, "evaluation": scores, **more}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage with a model of random weights."""
    folder = tmp_path_factory.mktemp("tiny")
    cfg = TinyModelConfig(
        hidden_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=64,
    )
    prepare_base(cfg, seed=0, workdir=folder, telemetry=NullTelemetry())
    return folder


def run_promote(workspace: WorkspaceConfig, name: str, inputs: dict[str, ArtifactRef], **rule: object) -> ArtifactRef:
    bench = BenchmarkConfig(name="toy", source=ProceduralSource(split="heldout", num_problems=60))
    cfg = PromoteConfig.model_validate({"registered_model": name, **rule})
    job = PromoteJob.of(PipelineConfig(benchmarks=(bench,), promote=cfg))
    info = RunInfo(workspace=workspace, run_id="r", run_name="n", stage="promote", started_at=datetime.now(UTC))
    return promote.fn(info, job, inputs)


def test_the_stage_promotes_refuses_and_decides_the_same_when_it_is_run_again(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    first, better, worse = (inputs_of(workspace, num, seed) for num, seed in ((20, 1), (50, 2), (30, 3)))
    assert not read_decision(run_promote(workspace, name, first).path).is_passed  # nothing to compare with
    a = run_promote(workspace, name, first, first="any")
    b = run_promote(workspace, name, better)
    c = run_promote(workspace, name, worse)
    assert [read_decision(ref.path).is_passed for ref in (a, b, c)] == [True, True, False]
    assert read_decision(b.path).rival is not None
    # a retry of what has become champion meets the rival that it met, not itself
    assert run_promote(workspace, name, better) == b
    assert [version.number for version in registry.versions()] == [1, 2]

    registry.roll_back(by="ann", why="rude")
    again = run_promote(workspace, name, better)
    assert again.fingerprint != b.fingerprint
    assert "rude" in read_decision(again.path).checks[0].text
    champion = registry.champion()
    assert champion is not None
    assert champion.number == 1


class Meanwhile(Console):
    """Calls `act` once when a stage has made its artifact."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.acts = iter([act])

    def stage_done(self, stage: str, ref: ArtifactRef, *, was_reused: bool, wall_s: float) -> None:
        for act in self.acts:
            act()


def test_the_second_of_two_runs_is_compared_with_the_new_champion(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    """Both decide against version 1; the other run's model is champion before this one's alias moves."""
    first, ours, theirs = (inputs_of(workspace, num, seed) for num, seed in ((20, 4), (40, 5), (58, 6)))
    run_promote(workspace, name, first, first="any")
    with shown_on(Meanwhile(lambda: run_promote(workspace, name, theirs))):
        decision = read_decision(run_promote(workspace, name, ours).path)
    assert decision.rival is not None
    assert (decision.rival.version, decision.is_passed) == (2, False)
    champion = registry.champion()
    assert champion is not None
    assert champion.number == 2


def test_a_first_champion_must_beat_the_first_model_of_its_run(workspace: WorkspaceConfig, name: str) -> None:
    base = inputs_of(workspace, 30, 7)["evaluation"]
    same, better = inputs_of(workspace, 30, 8, first=base), inputs_of(workspace, 45, 9, first=base)
    refused = read_decision(run_promote(workspace, name, same).path)
    assert (refused.is_passed, refused.rival_is) == (False, "first model of the run")
    assert read_decision(run_promote(workspace, name, better).path).is_passed


def test_a_champion_whose_scores_are_gone_is_not_replaced(
    workspace: WorkspaceConfig, registry: Registry, name: str
) -> None:
    assert registry.promote(promotion("rl/gone", None))
    decision = read_decision(run_promote(workspace, name, inputs_of(workspace, 60, 10)).path)
    assert [check.text for check in decision.checks if not check.is_passed] == [
        "the scores of the champion (evaluate/rl/gone) are gone"
    ]


@pytest.mark.slow
def test_a_champion_is_scored_again_only_if_that_is_asked_for_and_needed(
    workspace: WorkspaceConfig, name: str, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The champion's own scores have no record of their judge, so that they do not compare."""
    samples = [sample(i, 0, said(i), RIGHT) for i in range(3)]
    root = Path(workspace.root) / "of three"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(workspace))
    there = WorkspaceConfig(root=str(root))
    old = evaluation(root, samples, seed=20, files=tiny)
    new = evaluation(root, samples, seed=21, judged=True)
    store = open_store(there)
    models = [store.find("rl", f"rl{seed}".ljust(20, "0")) for seed in (20, 21)]
    benchmarks = store.find("benchmarks", "b" * 20)
    assert benchmarks is not None
    first, second = (
        {"model": model, "evaluation": scores, "benchmarks": benchmarks}
        for model, scores in zip(models, (old, new), strict=True)
        if model is not None
    )
    run_promote(there, name, first, first="any")
    refused = read_decision(run_promote(there, name, second).path)
    assert "the judge of the scores was not recorded" in [check.text for check in refused.checks]
    decision = read_decision(run_promote(there, name, second, score_champion=True).path)
    assert decision.rival is not None
    assert decision.rival.evaluation != f"evaluate/{old.fingerprint}"
    scored = store.find(*decision.rival.evaluation.split("/"))
    assert scored is not None
    manifest = read_manifest(scored.path)
    assert (manifest.stage, {i.fingerprint for i in manifest.inputs if i.role == "model"}) == (
        "evaluate_champion",
        {f"rl{20}".ljust(20, "0")},
    )
    assert are_comparable(scored.path, scored.path)
    assert not are_comparable(new.path, old.path)
