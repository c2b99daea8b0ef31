"""What an 8B model needs of a machine, by hand, and what is said where it is not there."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from test_hf_config import QWEN3, write_config

from klear_core.cluster.placement import GpuPlan, Node, check_cpu_is_meant, gpu_memory_here, gpus_here
from klear_core.config.evaluate import TorchEngineConfig
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig, RlRuntime
from klear_core.config.submit import SubmitConfig
from klear_core.errors import ResourceError
from klear_core.generate.model_size import known_size
from klear_core.hf_config import HfConfig
from klear_core.pipeline.costs.memory import learner_load, learner_peak
from klear_core.pipeline.graph import fingerprints_of, open_store, stages_of
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.capacity import (
    disk_parts,
    disk_problem,
    machine_problems,
    memory_problems,
    pool_problems_on,
)
from klear_core.pipeline.preflight.checks import problems_with, require_asked_nodes, require_ready
from klear_core.pipeline.preflight.model_checks import (
    context_problems,
    memory_warnings,
    problems_on,
    slow_products,
    stage_lines,
)

CONFIGS = Path(__file__).parents[3] / "configs"
QWEN3_8B = QWEN3 | {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
}
EMBEDDINGS = 2 * 151_936 * 4096
LAYER = 128 * (32 + 8 + 8 + 32) * 4096 + 3 * 4096 * 12_288
NUM_PARAMS = EMBEDDINGS + 36 * LAYER
CHECKPOINT_GB, MODEL_GB = 12 * NUM_PARAMS / 1e9, 2 * NUM_PARAMS / 1e9


@pytest.fixture(autouse=True)
def nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def large(root: Path, *overrides: str) -> PipelineConfig:
    """The 8B profile on a folder that has only its config.json."""
    folder = root / "model"
    if not folder.exists():
        write_config(folder, json.dumps(QWEN3_8B))
    return load_profile(CONFIGS / "klear_8b", [f"workspace.root={root / 'ws'}", f"model.path={folder}", *overrides])


def work_of(config: PipelineConfig, *stages: str) -> PendingWork:
    return PendingWork.of(config, stages, ())


def needed_gb(work: PendingWork) -> float:
    return sum(part.gb for part in disk_parts(work))


def test_the_parameters_of_an_8b_model_are_counted_from_its_config() -> None:
    """Published: 8.2 billion, 8,190,735,360 with the norms."""
    assert HfConfig.model_validate(QWEN3_8B).num_params == NUM_PARAMS == 8_190_427_136


def test_sft_of_an_8b_model_needs_three_checkpoints_and_the_model(tmp_path: Path) -> None:
    work = work_of(large(tmp_path), "sft")
    assert needed_gb(work) == pytest.approx(1 + 3 * CHECKPOINT_GB + MODEL_GB) == pytest.approx(312.236, abs=1e-3)
    assert disk_problem(work, free_gb=312.3) is None
    problem = disk_problem(work, free_gb=100)
    assert problem is not None
    assert (
        "100.00 GB free there, 312.2 GB needed: everything else 1.0; sft model 16.4; 3 checkpoints of sft at 98.3 294.9."
        in problem
    )


def test_checkpoints_of_adapters_are_small(tmp_path: Path) -> None:
    """Rank 16 on all seven matrices of 36 layers: 43,646,976 weights, half a gigabyte a checkpoint."""
    attention, mlp = 2 * (4096 + 4096) + 2 * (4096 + 1024), 3 * (4096 + 12_288)
    assert 36 * 16 * (attention + mlp) == 43_646_976
    work = work_of(large(tmp_path, "sft.lora={}"), "sft")
    assert needed_gb(work) == pytest.approx(1 + MODEL_GB + 3 * 43_646_976 * 12 / 1e9)


def test_checkpoints_go_with_their_stage_and_models_stay(tmp_path: Path) -> None:
    assert needed_gb(work_of(large(tmp_path), "sft", "rl", "rl_code")) == pytest.approx(
        1 + 3 * MODEL_GB + 3 * CHECKPOINT_GB
    )


def test_fewer_checkpoints_and_a_kept_optimizer_are_counted(tmp_path: Path) -> None:
    fewer = large(tmp_path, "sft.runtime.checkpoint.keep=1", "sft.dtype=float32")
    assert needed_gb(work_of(fewer, "sft")) == pytest.approx(1 + 2 * CHECKPOINT_GB + 2 * MODEL_GB)
    kept = large(tmp_path, "rl.keep_optimizer=true")
    assert needed_gb(work_of(kept, "rl")) == pytest.approx(1 + 4 * CHECKPOINT_GB + MODEL_GB)


def test_a_known_model_that_is_not_here_yet_is_counted_too(tmp_path: Path) -> None:
    config = load_profile(
        CONFIGS / "klear_8b", [f"workspace.root={tmp_path / 'ws'}", f"model.path={tmp_path / 'Qwen3-8B'}"]
    )
    assert needed_gb(work_of(config, "sft")) == pytest.approx(312.236, abs=0.02)  # with the norms


def test_fewer_checkpoints_are_advised_only_where_there_are_some(tmp_path: Path) -> None:
    config = large(tmp_path)
    assert "lower runtime.checkpoint.keep" in (disk_problem(work_of(config, "sft"), free_gb=1) or "")
    assert (disk_problem(work_of(config, "distill"), free_gb=1) or "").endswith("Choose another disk")


def test_saved_steps_are_counted(tmp_path: Path) -> None:
    saving = large(tmp_path, "rl.runtime.save_steps=[1, 50]")
    assert needed_gb(work_of(saving, "rl")) == pytest.approx(1 + 5 * CHECKPOINT_GB + MODEL_GB)


def test_models_that_wait_for_their_score_are_counted(tmp_path: Path) -> None:
    """Steps 0, 10 and 15."""
    curve = "sft.runtime.curve={ benchmark = 'aime24', every_steps = 10 }"
    work = work_of(large(tmp_path, curve, "sft.max_steps=15"), "sft")
    assert needed_gb(work) == pytest.approx(1 + 3 * CHECKPOINT_GB + (1 + 3) * MODEL_GB)


def test_what_a_killed_attempt_left_is_not_needed_again(tmp_path: Path) -> None:
    work = replace(work_of(large(tmp_path), "sft"), begun_gb=2 * CHECKPOINT_GB)
    assert disk_problem(work, free_gb=CHECKPOINT_GB + MODEL_GB + 1.1) is None
    assert "and 196.6 GB of these stages' own, 312.2 GB needed" in (disk_problem(work, free_gb=100) or "")


def test_files_of_a_killed_attempt_are_found(tmp_path: Path) -> None:
    config = load_profile(CONFIGS / "smoke", [f"workspace.root={tmp_path / 'ws'}"])
    own = fingerprints_of(stages_of(config), config.workspace)["sft"]
    scratch = open_store(config.workspace).workdir(own.kind, own.fingerprint) / "scratch"
    scratch.mkdir(parents=True)
    (scratch / "checkpoint").write_bytes(bytes(2_000_000))
    assert work_of(config, "sft").begun_gb == pytest.approx(0.002)
    assert work_of(config, "rl").begun_gb == 0


def test_answers_are_counted_by_their_budget(tmp_path: Path) -> None:
    """96 problems of 4 sampled answers and a greedy one, of up to 56 tokens; nothing to do needs nothing."""
    config = load_profile(CONFIGS / "smoke", [f"workspace.root={tmp_path / 'ws'}"])
    assert needed_gb(work_of(config, "evaluate_rl")) == pytest.approx(1 + 96 * 5 * 56 / 1e9, abs=1e-12)
    assert disk_problem(work_of(config, "evaluate_rl"), free_gb=0.9) is not None
    assert disk_problem(replace(work_of(config), stages=frozenset()), free_gb=0.0) is None


# ---- a processor


def refusals(config: PipelineConfig, *stages: str) -> list[str]:
    return [p.split(" = ")[0] for p in problems_with(config, stages) if "'auto', and no GPU for it" in p]


@pytest.mark.skipif(gpus_here() > 0, reason="there is a GPU")
def test_auto_is_no_cpu_for_an_8b_model_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch_engines = ("evaluate.engine={kind='torch'}", "rl.rollout.engine={kind='torch'}")
    config = large(tmp_path, *torch_engines)
    assert sorted(refusals(config, "sft", "rl", "evaluate_rl")) == [
        "evaluate.engine.runtime.device",
        "rl.runtime.device",
        "sft.runtime.device",
    ]
    learner_named = large(tmp_path, *torch_engines, "rl.runtime.device=cpu")
    assert refusals(learner_named, "rl") == ["rl.rollout.engine.runtime.device"]
    (problem,) = [p for p in problems_with(config, ["sft"]) if "no GPU for it" in p]
    assert "8.19 billion parameters, and above 0.2 billion" in problem
    assert problem.endswith("--set sft.runtime.device=cpu")
    assert refusals(large(tmp_path, "sft.runtime.device=cpu"), "sft") == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert refusals(config, "sft", "rl", "evaluate_rl") == []
    assert any(p.startswith("RAY_ADDRESS: 127.0.0.1:1 does not answer") for p in problems_with(config, ["sft"]))


def test_a_driver_without_a_gpu_looks_at_the_nodes_of_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A login node, or the head of KubeRay, has none; whether the model may be trained depends on the others."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    work = work_of(large(tmp_path), "sft", "rl")
    head = Node(name="head", num_cpus=4)
    told = [problem.split(" = ")[0] for problem in problems_on([head], work)]
    assert told == ["sft.runtime.device", "rl.runtime.device"]
    others = [Node(name=name, num_cpus=64, num_gpus=8) for name in "ab"]
    assert not list(problems_on([head, *others], work))
    assert "need 16 GPUs; Ray has 8" in "".join(problems_on([head, others[0]], work))


def test_a_curve_without_a_gpu_beside_the_learner_is_refused(tmp_path: Path) -> None:
    curve = "sft.runtime.curve={ benchmark = 'aime24' }"
    node = Node(name="a", num_cpus=64, num_gpus=8)
    (problem,) = problems_on([node], work_of(large(tmp_path, curve, "sft.runtime.num_workers=8"), "sft"))
    assert "sft.runtime.curve: the engine that scores" in problem
    assert "needs 2 of 8 GPUs, and the learner's 8 ranks leave 0: lower sft.runtime.num_workers" in problem
    assert not list(problems_on([node], work_of(large(tmp_path, curve, "sft.runtime.num_workers=6"), "sft")))


def test_the_plan_says_what_runs_where(tmp_path: Path) -> None:
    """`node_8`: four learner ranks, and two engines with two GPUs each, on the eight GPUs of one machine."""
    config = load_profile(CONFIGS / "node_8", [f"workspace.root={tmp_path / 'ws'}"])
    (stage,) = [stage for stage in stages_of(config) if stage.name == "rl"]
    node = Node(name="a", num_cpus=64, num_gpus=8)
    assert list(stage_lines(stage, None, [node])) == [
        "rl on a: learner ranks 0-3 on GPUs 0-3, engines 0-1 on GPUs 4-7",
    ]


@pytest.mark.skipif(gpus_here() > 0, reason="there is a GPU")
def test_auto_is_a_cpu_for_a_small_model(tmp_path: Path) -> None:
    auto = ("sft.runtime.device=auto", "rl.runtime.device=auto", "evaluate.engine.runtime.device=auto")
    config = load_profile(CONFIGS / "smoke", [f"workspace.root={tmp_path / 'ws'}", *auto])
    assert problems_with(config) == []


@pytest.mark.parametrize(
    ("visible", "order", "asked", "gigabytes"),
    [
        (None, "", "", 2),  # the smaller of both
        ("0", "", "", 24),  # CUDA's first is the fastest
        ("0", "PCI_BUS_ID", "", 2),
        ("1", "PCI_BUS_ID", "", 24),
        ("0,1", "", "", 2),
        ("GPU-af", "", "-i GPU-af", 2),
        ("", "", "", None),
    ],
)
def test_the_memory_of_a_gpu_is_that_of_those_which_cuda_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, order: str, asked: str, gigabytes: float
) -> None:
    """A small card for the display, and a large one."""
    lister = tmp_path / "nvidia-smi"
    lister.write_text(f"#!/bin/sh\necho \"$*\" > {tmp_path}/asked\necho 2048\n[ -n '{asked}' ] || echo 24576\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", order)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    gpu_memory_here.cache_clear()
    try:
        found = gpu_memory_here()
    finally:
        gpu_memory_here.cache_clear()
    assert (tmp_path / "asked").read_text().strip().endswith(asked or "nounits")
    assert found == (gigabytes and pytest.approx(gigabytes * 1024 * (1 << 20) / 1e9))


def test_more_engines_than_gpus_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With RAY_ADDRESS, the cluster's GPUs count, which are known once it is joined."""
    lister = tmp_path / "nvidia-smi"
    lister.write_text("#!/bin/sh\necho GPU 0: one\necho GPU 1: two\n")
    lister.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    engine = "evaluate.engine={kind='torch', runtime={device='auto'}}"

    def told(num_engines: str) -> list[str]:
        place = f"workspace.root={tmp_path / 'ws'}"
        config = load_profile(CONFIGS / "smoke", [place, engine, f"evaluate.runtime.num_engines={num_engines}"])
        return [p for p in problems_with(config, ["evaluate_rl"]) if "num_engines" in p]

    (problem,) = told("3")
    assert problem.startswith(
        "evaluate.runtime.num_engines = 3: 3 engines with 1 GPUs each need 3 GPUs, and there are 2"
    )
    assert told("2") == told("auto") == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    assert told("3") == []


def test_engines_that_no_node_of_the_cluster_has_room_for_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two GPUs on two nodes are none for an engine of two; `klear_8b` evaluates with such."""
    work = work_of(large(tmp_path), "evaluate_rl")
    head, single, pair = (Node(name=f"node {n}", num_cpus=64, num_gpus=n) for n in range(3))
    (problem,) = pool_problems_on([head, single, single], work)
    assert problem.startswith(
        "evaluate.runtime.num_engines = 'auto': 1 engines with 2 GPUs each need 2 GPUs, and there"
    )
    assert list(pool_problems_on([head, pair], work)) == []
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    torch = work_of(large(tmp_path, "evaluate.engine={kind='torch'}"), "evaluate_rl")
    (problem,) = pool_problems_on([head], torch)
    assert "evaluate.engine.runtime.device = 'auto', and no GPU for it" in problem
    assert list(pool_problems_on([head, single], torch)) == []


def test_on_policy_distillation_is_checked_like_other_trainings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`klear_8b_opd`: eight learner ranks, and a teacher of 30 billion parameters on two GPUs."""
    changes = ("hardware.gpu_memory_gb=24", "opd.train.optim.kind=adamw_8bit", "opd.train.runtime.device=cuda")
    place = f"workspace.root={tmp_path / 'ws'}"
    work = work_of(load_profile(CONFIGS / "klear_8b_opd", [place, *changes]), "opd_rollouts", "opd_scores", "opd")
    single, eight = (Node(name="a", num_cpus=96, num_gpus=n) for n in (1, 8))
    (placed,) = problems_on([single], work)
    assert placed.startswith("opd.train.runtime: runtime.num_workers = 8: every learner rank needs 1 GPU")
    (pool,) = pool_problems_on([single], work, are_remote=True)
    assert pool.startswith("opd.teacher.runtime.num_engines = 'auto': 1 engines with 2 GPUs each")
    assert [*problems_on([eight], work), *pool_problems_on([eight], work, are_remote=True)] == []
    assert [p.split(":")[0] for p in memory_problems(work)][-1] == "opd.train.runtime"
    assert needed_gb(work) > 3 * CHECKPOINT_GB + MODEL_GB
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert [p.split(":")[0] for p in machine_problems(work)] == ["opd.train.optim.kind = 'adamw_8bit'"]
    heads = ("opd.train.runtime.context_parallel=3", "opd.train.runtime.num_workers=3")
    (uneven,) = context_problems(work_of(load_profile(CONFIGS / "klear_8b_opd", [place, *heads]), "opd"))
    assert uneven.startswith("opd.train.runtime.context_parallel = 3 does not divide the 32 attention heads")


def test_rl_looks_again_once_it_knows_the_cluster() -> None:
    """As it does at RAY_ADDRESS, before a model is loaded."""
    runtime, engine = RlRuntime(), TorchEngineConfig()
    with pytest.raises(ResourceError, match=r"rl\.runtime\.device = 'auto', and no GPU for it"):
        check_cpu_is_meant(runtime, engine, GpuPlan(learner=0, rollout=0), NUM_PARAMS)
    with pytest.raises(ResourceError, match=r"rl\.rollout\.engine\.runtime\.device = 'auto'"):
        check_cpu_is_meant(runtime, engine, GpuPlan(learner=1, rollout=0), NUM_PARAMS)
    check_cpu_is_meant(runtime, engine, GpuPlan(learner=1, rollout=1), NUM_PARAMS)
    check_cpu_is_meant(runtime, engine, GpuPlan(learner=0, rollout=0), 200_000_000)
    with pytest.raises(ResourceError, match=r"rollout\.engine"):
        check_cpu_is_meant(RlRuntime(device="cpu"), engine, GpuPlan(learner=0, rollout=0), 200_000_001)


def test_a_run_that_was_submitted_with_no_capacity_waits_for_the_nodes_that_it_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without `no-capacity`, what the cluster lacks at the start is refused at once."""
    asked = SubmitConfig(nodes=2, gpus_per_node=8, cpus_per_node=96, retry=("no-capacity",))
    node, small = (Node(name=f"{n} GPUs", num_cpus=96, num_gpus=n) for n in (8, 4))
    with pytest.raises(ResourceError, match=r"asks for 2 nodes of 96 CPUs and 8 GPUs; the Ray cluster has 1$"):
        require_asked_nodes(asked, [node, small])
    require_asked_nodes(asked, [node, small, node])
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    waits = [f"workspace.root={tmp_path}", "workspace.submit.retry=['no-capacity']", "workspace.submit.retry_for=1s"]
    with pytest.raises(ResourceError, match=r"127\.0\.0\.1:1 does not answer"):
        require_ready(load_profile(CONFIGS / "smoke", waits), ["sft"])
    assert "waiting up to 1 s for nodes of the Ray cluster" in caplog.text


# ---- CPU


def test_a_training_on_a_cpu_that_holds_more_than_the_machine_is_warned_of(tmp_path: Path) -> None:
    one_rank = ("rl.runtime.device=cpu", "rl.runtime.num_workers=1", "rl.runtime.context_parallel=1")
    work = work_of(large(tmp_path, *one_rank), "rl")
    (training,) = [stage.job.training() for stage in work.stages]
    assert isinstance(training, RlConfig)
    learner_gb = learner_peak(known_size("Qwen3-8B"), learner_load(training)).num_bytes / 1e9
    needed_gb = learner_gb + training.runtime.num_rollout_actors * MODEL_GB
    (told,) = memory_warnings(work, has_gpus=True, memory_gb=needed_gb - 0.1)
    assert told.startswith(f"rl: learners and weights of engines take {needed_gb:.1f} GB, and this machine has ")
    assert list(memory_warnings(work, has_gpus=True, memory_gb=needed_gb + 0.1)) == []
    assert list(memory_warnings(work_of(large(tmp_path), "rl"), has_gpus=True, memory_gb=1.0)) == []


def test_bfloat16_that_the_compiler_has_no_products_for_is_warned_of_on_a_cpu_alone(tmp_path: Path) -> None:
    half = ["rl.dtype=bfloat16", "rl.rollout.engine.dtype=bfloat16"]
    auto = ["rl.runtime.device=auto", "rl.rollout.engine.runtime.device=auto"]

    def told(*overrides: str, has_gpus: bool, compiles_bfloat16: bool = False) -> list[str]:
        work = work_of(load_profile(CONFIGS / "smoke", [f"workspace.root={tmp_path}", *overrides]), "sft", "rl")
        found = slow_products(work, has_gpus=has_gpus, compiles_bfloat16=compiles_bfloat16)
        return [warning.partition(" is slower than float32 here: ")[0] for warning in found]

    both = ["rl.dtype = 'bfloat16'", "rl.rollout.engine.dtype = 'bfloat16'"]
    assert told(*half, has_gpus=True) == told(*half, *auto, has_gpus=False) == both
    assert told(*half, *auto, has_gpus=True) == told(has_gpus=False) == []
    assert told(*half, has_gpus=False, compiles_bfloat16=True) == []
