"""Contradictions between settings, and what the machine lacks, are found before anything is made; and only where it would be missed."""

import json
import re
import socket
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from manifests import manifest
from pydantic import SecretStr
from test_hf_config import QWEN3, write_config

from klear_core.artifacts.manifest import LedgerStep
from klear_core.cluster.nodes import require_listener
from klear_core.cluster.placement import GpuPlan, gpus_here, plan_gpus
from klear_core.config.curate import CurateConfig
from klear_core.config.data import HubSource
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.train import SftConfig, SftRuntime
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.errors import ConfigError, ResourceError
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.costs.estimate import estimate
from klear_core.pipeline.graph import fingerprints_of, open_store, select_stages, stages_of
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight import model_checks
from klear_core.pipeline.preflight.checks import problems_with, require_ready

CONFIGS = Path(__file__).parents[3] / "configs"
KLEAR_8B = CONFIGS / "klear_8b"
CODE_ROW = (
    '{"question": "Print the sum.", "reference": '
    '{"kind": "code", "tests": {"type": "stdin", "cases": [{"input": "1", "output": "1"}]}}}'
)
MATH_ROW = '{"question": "1 + 1?", "reference": {"kind": "math", "answers": ["2"]}}'


@pytest.fixture(autouse=True)
def nothing_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "CUDA_VISIBLE_DEVICES", "TEACHER_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def profile(root: Path, *overrides: str, of: str = "smoke") -> PipelineConfig:
    return load_profile(CONFIGS / of, [f"workspace.root={root / 'ws'}", *overrides])


def chosen(config: PipelineConfig, *, only: str | None = None, until: str | None = None) -> tuple[str, ...]:
    return select_stages(stages_of(config), only=only, from_=None, until=until)


def put_artifacts(config: PipelineConfig, *names: str) -> None:
    ids = fingerprints_of(stages_of(config), config.workspace)
    for name in names:
        own = ids[name]
        with open_store(config.workspace).create(own.kind, own.fingerprint) as slot:
            slot.publish(manifest(own.kind, own.fingerprint, stage=name))


def test_a_stage_run_alone_names_the_inputs_that_are_not_there_and_the_command_line_that_makes_them(
    tmp_path: Path,
) -> None:
    config = profile(tmp_path)
    found = problems_with(config, chosen(config, only="rl"))
    wanted = "stage 'rl' needs 'curate' and 'sft', not there or not whole for these settings: run up to that first, with --until sft"
    assert found == [wanted]
    put_artifacts(config, "curate", "sft")
    assert problems_with(config, chosen(config, only="rl")) == []


def test_what_follows_from_chosen_stages_needs_nothing_that_is_there(tmp_path: Path) -> None:
    assert problems_with(profile(tmp_path), None) == []


def test_a_context_that_the_heads_do_not_fit_is_named_with_what_is_allowed() -> None:
    config = PipelineConfig(name="x", sft=SftConfig(runtime=SftRuntime(num_workers=3, context_parallel=3)))
    wanted = "sft.runtime.context_parallel = 3 does not divide the 4 attention heads of the model; allowed: 1, 2, 4"
    assert wanted in problems_with(config)


def test_a_context_of_four_keeps_a_quarter_of_the_activations() -> None:
    """1 GB per billion bytes: what does not shrink is 16 bytes a parameter over the workers."""

    def memory_gb(context_parallel: int, tokens: int) -> float:
        runtime = SftRuntime(num_workers=4, context_parallel=context_parallel, tokens_per_microbatch=tokens)
        config = PipelineConfig(name="x", sft=SftConfig(max_tokens=tokens, runtime=runtime))
        found = next(row.memory_gb for row in estimate(config) if row.stage == "sft")
        assert found is not None
        return found

    assert memory_gb(4, 4000) == memory_gb(1, 1000) < memory_gb(1, 4000)


def test_a_weight_for_a_source_that_does_not_exist_is_a_typo() -> None:
    curate = CurateConfig.model_validate(
        {"sources": [{"kind": "procedural", "name": "chain"}, "data/openthoughts.jsonl"]}
    )
    config = PipelineConfig(
        name="x", curate=curate, sft=SftConfig(source_weights={"openthoughts": 2, "opnthoughts": 2})
    )
    wanted = "sft.source_weights: 'opnthoughts' is none of curate.sources, which are: chain, openthoughts"
    assert wanted in problems_with(config)
    assert not any("'openthoughts'" in problem for problem in problems_with(config))


# ---- which stages


@pytest.mark.parametrize("name", ["laptop", "smoke"])
def test_profiles_for_any_machine_lack_nothing(tmp_path: Path, name: str) -> None:
    assert problems_with(profile(tmp_path, of=name)) == []


def planned(rl: RlConfig, num_gpus: int) -> GpuPlan:
    return plan_gpus(rl.runtime, rl.rollout.engine, num_gpus)


@pytest.mark.parametrize("name", ["laptop", "smoke"])
def test_profiles_for_any_machine_leave_its_gpus_alone(name: str) -> None:
    """With one GPU and `auto`, a learner and two engines would ask for three."""
    config = load_profile(CONFIGS / name)
    for available in (0, 1, 8):
        assert planned(config.rl, available) == GpuPlan(learner=0, rollout=0)
    devices = re.findall(r'"device":"(\w+)"', config.model_dump_json())
    assert devices == ["cpu"] * 4


def test_a_stage_alone_needs_what_it_reads_and_nothing_else(tmp_path: Path) -> None:
    config = profile(tmp_path, of="klear_8b")
    alone, everything = problems_with(config, chosen(config, only="curate")), problems_with(config)
    assert {p.split(":")[0].split(" '")[0] for p in alone} == {"stage", "curate.sources"}
    missed = ("benchmark", "curate_rl.sources", "model", "distill.teacher.api_key_env", "evaluate.engine.kind")
    assert all(any(p.startswith(key) for p in everything) for key in missed)
    base = problems_with(config, chosen(config, only="base"))
    assert [p.split(": ")[0] for p in base] == ["model"]


def test_a_stage_that_is_there_already_needs_nothing_any_more_unless_it_is_made_again(tmp_path: Path) -> None:
    config = profile(
        tmp_path, "distill.teacher.kind=http", "distill.teacher.model=m", f"distill.teacher.base_url={dead_url()}"
    )
    put_artifacts(config, "distill")
    assert problems_with(config) == []
    assert [p.split(":")[0] for p in problems_with(config, again=("distill",))] == ["distill.teacher"]


def test_all_that_is_missing_is_one_error(tmp_path: Path) -> None:
    config = profile(tmp_path, 'curate.sources=["no/one.jsonl", "no/two.jsonl"]')
    with pytest.raises(
        ConfigError, match=r"(?s)cannot run here yet:.*no/one\.jsonl: no such file.*no/two\.jsonl: no such file"
    ):
        require_ready(config, ("curate",))
    require_ready(config, ("base",))


def test_sources_of_one_name_and_protected_questions_that_are_missing_are_found(tmp_path: Path) -> None:
    twins = 'curate.sources=[{kind="procedural", name="a"}, {kind="procedural", name="a"}]'
    config = profile(tmp_path, twins, 'curate.decontaminate.also=[{path="no/set.jsonl"}]')
    assert sorted(p.split(":")[0] for p in problems_with(config, ("curate",))) == [
        "curate.decontaminate.also",
        "curate.sources",
    ]


def test_rl_on_prompts_that_cannot_be_judged_is_found_before_it_starts(tmp_path: Path) -> None:
    row = {"category": "math", "source": "s", "input": "Why?", "output": "Because."}
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps(row) + "\n")
    config = profile(tmp_path, f'curate.sources=["{path}"]')
    found = [problem for problem in problems_with(config) if "no answer could be judged" in problem]
    assert [problem.split(":")[0] for problem in found] == ["rl"]
    tagged = profile(tmp_path, f'curate.sources=["{path}"]', "tag={}", "tag_rl={}")
    assert any(
        problem.startswith("rl: ") and "no answer could be judged" in problem for problem in problems_with(tagged)
    )
    judged = profile(tmp_path, f'curate.sources=["{path}", {{kind="procedural"}}]')
    assert not [problem for problem in problems_with(judged) if "no answer could be judged" in problem]


def test_the_sources_of_klear_8b_are_repositories_that_the_docs_list() -> None:
    config = load_profile(KLEAR_8B)
    assert config.curate_rl is not None
    listed = (CONFIGS.parent / "docs" / "data" / "data_sets.md").read_text()
    for source in (*config.curate.sources, *config.curate_rl.sources):
        assert isinstance(source, HubSource)
        assert source.repo in listed.replace(", -CodeSub-15K", ", Kwai-Klear/KlearReasoner-CodeSub-15K")


def test_benchmarks_that_are_there_are_counted_like_new_ones(tmp_path: Path) -> None:
    """Expecting another count makes no other artifact, so that these are found and would be scored on."""
    config = profile(tmp_path)
    own = fingerprints_of(stages_of(config), config.workspace)["benchmarks"]
    ledger = (LedgerStep(step="read_heldout", unit="problem", num_in=96, num_out=96),)
    with open_store(config.workspace).create(own.kind, own.fingerprint) as slot:
        ref = slot.publish(manifest(own.kind, own.fingerprint, ledger=ledger))
    put_artifacts(config, "base")
    (heldout,) = config.benchmarks

    def expecting(num_rows: int) -> PipelineConfig:
        return config.model_copy(update={"benchmarks": (heldout.model_copy(update={"expected_rows": num_rows}),)})

    assert problems_with(expecting(96)) == []
    wanted = [f"benchmark 'heldout': expected_rows = 97, but it has 96 rows in {ref.path}"]
    assert problems_with(expecting(97)) == problems_with(expecting(97), ("evaluate_base",)) == wanted
    assert problems_with(expecting(97), ("base",)) == problems_with(expecting(97), again=("benchmarks",)) == []


def test_benchmarks_that_are_there_are_checked_for_the_judge_that_would_score_them(tmp_path: Path) -> None:
    """The judge is in no fingerprint of theirs. A reference of 60 characters is too long for one of these judges."""
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"problem": "Find it.", "expected_answer": "7" * 60}) + "\n")
    config = profile(tmp_path, f'benchmarks=[{{name="long", source="{file}"}}]')
    other = profile(tmp_path, f'benchmarks=[{{name="long", source="{file}"}}]', "verify.math.max_answer_chars=50")
    job = BenchmarksJob.of(config)
    own = fingerprints_of(stages_of(config), config.workspace)["benchmarks"]
    with open_store(config.workspace).create(own.kind, own.fingerprint) as slot:
        summary = prepare_benchmarks(
            job.benchmarks(), seed=0, runtime=job.runtime, workdir=slot.workdir, telemetry=NullTelemetry()
        )
        made_with = job.model_dump(mode="json")
        slot.publish(manifest(own.kind, own.fingerprint, ledger=summary.ledger, config=made_with))
    put_artifacts(config, "base")
    assert problems_with(config, ("evaluate_base",)) == []
    (problem,) = problems_with(other, ("evaluate_base",))
    assert problem.startswith("benchmarks: 0 of 1 references of benchmark long can be judged; lost: 1 bad_reference")
    assert problems_with(other, ("base",)) == []  # nothing is scored


# ---- the model and its window


def length_problems(config: PipelineConfig, names: Collection[str] | None = None) -> list[str]:
    return [p for p in problems_with(config, names) if " is more than " in p]


def test_an_engine_wider_than_the_models_is_found_for_base_too(tmp_path: Path) -> None:
    """The folder has 512 positions and the trained models 1024; a max_model_len of 1025 fits neither."""
    folder = write_config(tmp_path / "model", json.dumps(QWEN3))
    model = ("model.kind=hf", f"model.path={folder}", "model.max_position_embeddings=1024", "evaluate.engine.kind=vllm")
    assert length_problems(profile(tmp_path, *model, "evaluate.engine.max_model_len=1024")) == []
    (problem,) = length_problems(profile(tmp_path, *model, "evaluate.engine.max_model_len=1025"))
    assert problem == "evaluate.engine.max_model_len = 1025 is more than model.max_position_embeddings = 1024"
    (problem,) = length_problems(profile(tmp_path, *model, "evaluate.engine.max_model_len=32"))
    assert problem == "evaluate.sampling.max_new_tokens = 56 is more than evaluate.engine.max_model_len = 32"


def test_prompts_of_rl_must_leave_room_for_an_answer(tmp_path: Path) -> None:
    """The engine refuses a prompt that fills its window, and the run would end with the first such problem."""

    def found(max_prompt_tokens: int) -> list[str]:
        settings = f"rl.rollout={{max_prompt_tokens={max_prompt_tokens}, engine={{kind='vllm', max_model_len=64}}}}"
        return [problem for problem in problems_with(profile(tmp_path, settings), ["rl"]) if "no room" in problem]

    told = "rl.rollout.max_prompt_tokens = 64 leaves no room for an answer in rl.rollout.engine.max_model_len = 64"
    assert found(64) == [told]
    assert found(63) == []


def test_a_teachers_window_holds_the_longest_answer_that_it_scores(tmp_path: Path) -> None:
    """Ours to its last position; vLLM samples a token behind what it scores."""

    def found(*settings: str) -> list[str]:
        opd = ("opd.then_rl=false", "opd.rollouts.max_prompt_tokens=100", "opd.rollouts.sampling={max_new_tokens=50}")
        return length_problems(profile(tmp_path, *opd, *settings))

    of_teacher = (
        "opd.teacher.source={kind='trained', sft={max_tokens=9}, model={kind='tiny', max_position_embeddings=%d}}"
    )
    assert found(of_teacher % 150) == []
    (problem,) = found(of_teacher % 149)
    assert problem == (
        "opd.teacher: a window of 150 tokens, to score answers of opd.rollouts, is more than its "
        "max_position_embeddings = 149"
    )
    vllm = "opd.teacher.engine={kind='vllm', max_model_len=%d}"
    assert found(of_teacher % 512, vllm % 151) == []
    (problem,) = found(of_teacher % 512, vllm % 150)
    assert problem.startswith("opd.teacher: a window of 151 tokens")
    assert problem.endswith("is more than opd.teacher.engine.max_model_len = 150")
    # longer than the model's window: vLLM refuses it, and the window is what there is
    (*_, problem) = found(of_teacher % 150, vllm % 512)
    assert problem.endswith("is more than its max_position_embeddings = 150")
    live = ("rl.distill={}", "rl.rollout.max_prompt_tokens=100", "rl.rollout.sampling={max_new_tokens=50}")
    of_rl = "rl_teacher.source={kind='trained', sft={max_tokens=9}, model={kind='tiny', max_position_embeddings=%d}}"
    assert length_problems(profile(tmp_path, *live, of_rl % 150)) == []
    (problem,) = length_problems(profile(tmp_path, *live, of_rl % 149))
    assert problem.startswith("rl_teacher: a window of 150 tokens, to score answers of rl.rollout, is more")


def test_the_training_of_a_teacher_is_checked_for_the_model_that_it_trains(tmp_path: Path) -> None:
    """Not for the student's, which has 4 heads and 512 positions."""

    def found(*settings: str) -> list[str]:
        teacher = ("model={kind='tiny', num_heads=6, num_kv_heads=2, max_position_embeddings=2048}", *settings)
        opd = [f"opd.teacher.source={{kind='trained', {', '.join(teacher)}}}"]
        work = PendingWork.of(profile(tmp_path, "opd.then_rl=false", *opd), ["opd_teacher"], ())
        return [*model_checks.length_problems(work), *model_checks.context_problems(work)]

    three = "runtime={num_workers=3, context_parallel=3}"
    assert found(f"sft={{max_tokens=2048, {three}}}") == []
    assert found("sft={max_tokens=2049}") == [
        "opd.teacher.source.sft.max_tokens = 2049 is more than its max_position_embeddings = 2048"
    ]
    (problem,) = found(f"sft={{max_tokens=2048, {three.replace('3', '4')}}}")
    assert "context_parallel = 4 does not divide the 6 attention heads" in problem


@pytest.mark.usefixtures("no_hub")
def test_the_teacher_of_klear_8b_opd_holds_its_answers(tmp_path: Path) -> None:
    assert length_problems(profile(tmp_path, of="klear_8b_opd")) == []


@pytest.mark.usefixtures("no_hub")
def test_the_64k_evaluation_of_klear_8b_fits_its_stretched_window(tmp_path: Path) -> None:
    assert length_problems(profile(tmp_path, of="klear_8b")) == []
    assert length_problems(profile(tmp_path, of="klear_8b_64k")) == []
    (unstretched,) = length_problems(profile(tmp_path, "evaluate.sampling.max_new_tokens=65536", of="klear_8b"))
    assert unstretched == "evaluate.sampling.max_new_tokens = 65536 is more than evaluate.engine.max_model_len = 36864"
    (too_wide,) = length_problems(profile(tmp_path, "evaluate.engine.max_model_len=81921", of="klear_8b_64k"))
    assert too_wide == (
        "evaluate.engine.max_model_len = 81921 is more than evaluate.engine.yarn_original_window = 32768 times "
        "evaluate.engine.yarn_factor = 2.5"
    )


def test_a_model_that_the_torch_engine_does_not_run_is_found_at_once(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", json.dumps(QWEN3 | {"model_type": "mistral"}))
    problems = problems_with(profile(tmp_path, "model.kind=hf", f"model.path={folder}"))
    assert [p.split(":")[0] for p in problems if 'set engine.kind = "vllm"' in p] == [
        "rl.rollout.engine",
        "evaluate.engine",
    ]


# ---- the machine


def test_klear_8b_takes_the_gpus_that_its_readme_says() -> None:
    readme = (KLEAR_8B / "README.md").read_text()
    assert "16 GPUs" in readme
    assert "`node_8`" in readme
    for rl in (load_profile(KLEAR_8B).rl, load_profile(KLEAR_8B).rl_code):
        assert rl is not None
        assert planned(rl, 16) == GpuPlan(learner=1, rollout=2)
        with pytest.raises(ResourceError, match="need 16 GPUs; Ray has 15"):
            planned(rl, 15)
    one_node = load_profile(KLEAR_8B.with_name("node_8"))
    assert one_node.rl_code is not None
    assert planned(one_node.rl, 8) == planned(one_node.rl_code, 8)


@pytest.mark.skipif(gpus_here() > 0, reason="there is a GPU")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sft.runtime.device=cuda", "sft.runtime: device 'cuda' was asked for, but torch sees no CUDA device"),
        ("rl.runtime.device=cuda", "rl.runtime: device 'cuda'"),
        ("rl.rollout.engine.runtime.device=cuda", "rl.rollout.engine.runtime: device 'cuda'"),
        ("evaluate.engine.runtime.device=cuda", "evaluate.engine.runtime: device 'cuda'"),
        (
            "rl.runtime.device=auto rl.runtime.learner_gpus=1",
            "rl.runtime: 1 learner ranks with 1 GPUs and 2 rollout actors with 0 need 1 GPUs; Ray has 0",
        ),
    ],
)
def test_a_gpu_that_is_not_there_is_missed_at_once(tmp_path: Path, override: str, told: str) -> None:
    (problem,) = problems_with(profile(tmp_path, *override.split()))
    assert problem.startswith(told)


def test_a_ray_cluster_that_cannot_be_joined_is_told_before_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    (problem,) = problems_with(profile(tmp_path, "rl.runtime.learner_gpus=1", "rl.runtime.device=cuda"))
    assert problem.startswith("RAY_ADDRESS: 127.0.0.1:1 does not answer")


@pytest.mark.parametrize(
    "address", ["localhost", "http://127.0.0.1:8265", "10.0.0.1:", ":6379", "::1:6379", "10.0.0.1:6379/x", "u:p@h:1"]
)
def test_what_is_no_address_of_a_ray_cluster_is_told_as_such(address: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(f"RAY_ADDRESS = {address!r} is no HOST:PORT")):
        require_listener(address)


@pytest.mark.parametrize(
    ("address", "told"), [("127.0.0.1:1", "127.0.0.1:1"), ("ray://127.0.0.1:1", "127.0.0.1:1"), ("[::1]:1", "::1:1")]
)
def test_an_address_at_which_nothing_listens_is_told_as_such(address: str, told: str) -> None:
    with pytest.raises(ResourceError, match=re.escape(f"RAY_ADDRESS: {told} does not answer")):
        require_listener(address)
    with pytest.raises(ResourceError, match="99999 does not answer"):
        require_listener("127.0.0.1:99999")
    require_listener("auto")


def test_code_is_judged_in_a_sandbox_that_must_prove_itself_where_there_is_code(tmp_path: Path) -> None:
    for name, row in (("code", CODE_ROW), ("math", MATH_ROW)):
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    broken = 'verify.limits.python="/no/such/python"'

    def stages(*overrides: str) -> list[str]:
        found = problems_with(profile(tmp_path, broken, *overrides))
        return [p.split(":")[0] for p in found if p.startswith("verify.sandbox")]

    code, math = (
        f'source={{kind="file", path="{tmp_path / name}.jsonl", row_schema="problem"}}' for name in ("code", "math")
    )
    assert stages(f'benchmarks=[{{name="a", {math}}}]') == []
    assert stages(f'benchmarks=[{{name="a", {code}}}]') == ["verify.sandbox, for the code problems of evaluate"]
    assert stages(f'curate.sources=["{tmp_path}/code.jsonl"]') == ["verify.sandbox, for the code problems of distill"]
    in_code_rl = ("rl_code.domain=code", "rl_code.rollout.sampling.max_new_tokens=56")
    assert stages(*in_code_rl) == ["verify.sandbox, for the code problems of rl_code"]


def test_code_is_looked_for_in_the_problems_that_a_stage_takes(tmp_path: Path) -> None:
    for name, row in (("code", CODE_ROW), ("math", MATH_ROW)):
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")

    def stages(*overrides: str) -> list[str]:
        found = problems_with(profile(tmp_path, 'verify.limits.python="/no/such/python"', *overrides))
        return [p.split(":")[0] for p in found if p.startswith("verify.sandbox")]

    code, math = (f'["{tmp_path / name}.jsonl"]' for name in ("code", "math"))
    given = f"given.curate.path={tmp_path / 'code.jsonl'}"
    assert stages(given) == ["verify.sandbox, for the code problems of distill"]
    assert stages(f"curate.sources={code}", f"given.curate.path={tmp_path / 'math.jsonl'}") == []
    own = (f"curate.sources={math}", f"curate_rl.sources={code}", "tag={}", "tag_rl={}")
    assert stages(*own) == ["verify.sandbox, for the code problems of tag_rl"]


def test_sft_judges_where_it_has_a_curve(tmp_path: Path) -> None:
    (tmp_path / "code.jsonl").write_text(CODE_ROW + "\n")
    settings = [
        'verify.limits.python="/no/such/python"',
        'verify.judges=[{name = "off", function = "nowhere:off"}]',
        f"benchmarks=[{{name='a', source='{tmp_path / 'code.jsonl'}'}}]",
    ]

    def keys(*overrides: str) -> list[str]:
        found = problems_with(profile(tmp_path, *settings, *overrides), ["sft"])
        return [p.split(",")[0] for p in found if p.startswith("verify.")]

    assert keys() == []
    assert keys("sft.runtime.curve.benchmark=a") == ["verify.judges", "verify.sandbox"]


# ---- the teacher


def dead_url() -> str:
    """Of a port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{s.getsockname()[1]}/v1"


@contextmanager
def endpoint(status: int) -> Iterator[tuple[str, list[str]]]:
    """Its address, and what it was asked for so far; it answers everything with this status."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def with_teacher(root: Path, url: str) -> PipelineConfig:
    return profile(root, "distill.teacher.kind=http", "distill.teacher.model=m", f"distill.teacher.base_url={url}")


def test_a_teacher_that_nobody_serves_is_missed_with_the_address_that_was_tried(tmp_path: Path) -> None:
    url = dead_url()
    (problem,) = problems_with(with_teacher(tmp_path, url))
    assert problem.startswith(f"distill.teacher: no server answers at base_url = '{url}': tried GET {url}/models")


@pytest.mark.parametrize(("status", "is_fit"), [(200, True), (404, True), (500, True), (401, False), (403, False)])
def test_a_teacher_that_answers_is_asked_once_and_may_refuse_our_key(tmp_path: Path, status: int, is_fit: bool) -> None:
    with endpoint(status) as (url, asked):
        config = with_teacher(tmp_path, url)
        problems = problems_with(config)
        assert asked == ["/v1/models"]
        assert problems_with(config, chosen(config, until="base")) == []
        assert asked == ["/v1/models"]
    assert [f"HTTP {status}" in p for p in problems] == ([] if is_fit else [True])


def test_a_fleet_may_lack_a_server_while_another_one_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dead, other = dead_url(), dead_url()

    def fleet(*urls: str) -> PipelineConfig:
        endpoints = ", ".join(f'{{ base_url = "{url}" }}' for url in urls)
        of_teacher = ("kind=http", "model=m", f"runtime.endpoints=[{endpoints}]")
        return profile(tmp_path, *(f"distill.teacher.{setting}" for setting in of_teacher))

    with endpoint(200) as (url, asked):
        assert problems_with(fleet(dead, url, other)) == []
        assert asked == ["/v1/models"]
    assert [f"base_url = '{one}'" in caplog.text for one in (dead, other, url)] == [True, True, False]
    (problem,) = problems_with(fleet(dead, other))
    assert problem.startswith("distill.teacher: no server answers at any of its 2 endpoints; the last: ")
    with endpoint(401) as (url, _):
        (problem,) = problems_with(fleet(dead, url))
        assert "HTTP 401" in problem


def test_a_missing_key_block_is_named_once_prefect_can_be_asked(tmp_path: Path) -> None:
    teacher = {"kind": "http", "base_url": "http://127.0.0.1:9/v1", "model": "r1", "api_key_block": "teacher-key"}
    config = PipelineConfig.model_validate({"workspace": {"root": str(tmp_path)}, "distill": {"teacher": teacher}})
    told = "distill.teacher.api_key_block = 'teacher-key': Prefect has no such block"
    assert not [p for p in problems_with(config) if p.startswith("distill.teacher")]
    assert [p for p in problems_with(config, keys={}) if p.startswith(told)]
    found = problems_with(config, keys={"teacher-key": SecretStr("sk-very-secret")})
    assert [p for p in found if p.startswith("distill.teacher: no server answers")]
    assert "sk-very-secret" not in str(found)


def test_a_users_reward_that_cannot_be_called_is_found_at_once_and_only_where_rl_would_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def twice(answer): return 2 * answer.score")
    rewards = '[{function = "mine:twice"}, {function = "mine:thrice"}, {function = "nowhere:f", files = ["table.csv"]}]'
    config = profile(tmp_path, f"rl.reward.custom={rewards}")
    key = "rl.reward.custom, function ="
    assert [problem for problem in problems_with(config) if "reward" in problem] == [
        f"{key} 'mine:thrice': {Path.cwd() / 'mine.py'} has no function 'thrice'",
        f"{key} 'nowhere:f': files: table.csv: no such file",
        f"{key} 'nowhere:f': no Python file of module 'nowhere' in the working directory ({Path.cwd()}) or among the "
        "installed packages",
    ]
    assert not any("reward" in problem for problem in problems_with(config, chosen(config, until="sft")))


def test_judges_of_ones_own_that_cannot_be_called_or_are_not_bound_are_found_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def near(answer): return 1")
    for name in ("near", "far"):
        reference = {"kind": "custom", "judge": name, "value": 24}
        Path(f"{name}.jsonl").write_text(json.dumps({"question": f"How {name}?", "reference": reference}))
    judges = '[{name = "near", function = "mine:near"}, {name = "off", function = "mine:off"}]'
    config = profile(tmp_path, f"verify.judges={judges}", "benchmarks=[{name='n', source='near.jsonl'}]")
    key = "verify.judges, name = 'off', function = 'mine:off'"
    missing = f"{key}: {Path.cwd() / 'mine.py'} has no function 'off'"
    assert [problem for problem in problems_with(config) if "judge" in problem] == [missing]
    unbound = profile(tmp_path, "curate.sources=['far.jsonl']", "verify.judges=[{name='near', function='mine:near'}]")
    (found,) = (problem for problem in problems_with(unbound) if "judge" in problem)
    assert found.startswith("curate.sources: its references name the judge 'far', and verify.judges has near")


def test_the_source_of_a_judge_is_part_of_what_its_verdicts_depend_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def near(answer): return 1")
    config = profile(tmp_path, "verify.judges=[{name='near', function='mine:near'}]")
    before = fingerprints_of(stages_of(config), config.workspace)
    Path("mine.py").write_text("def near(answer): return 0")
    after = fingerprints_of(stages_of(config), config.workspace)
    changed = {name for name in before if before[name] != after[name]}
    assert {"distill", "rl", "evaluate_rl"} <= changed
    assert not {"benchmarks", "curate", "base"} & changed
