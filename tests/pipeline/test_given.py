"""Results that exist take the place of their stage: what is planned then, how it is named, and what is refused."""

import json
import logging
import shutil
from pathlib import Path

import pytest
from hub_server import REVISION, hub
from manifests import manifest
from test_hf_config import QWEN3, write_config

from klear_core.artifacts.manifest import POINTER, ArtifactRef
from klear_core.artifacts.model_files import folder_of
from klear_core.artifacts.records import read_shards
from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.data_jobs import BenchmarksRuntime, GivenModelJob, GivenProblemsJob
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import GivenFolder, HfModelConfig
from klear_core.data.benchmarks import prepare_benchmarks
from klear_core.data.curation.curate import curate
from klear_core.errors import ConfigError
from klear_core.generate.model_size import model_size
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.costs.estimate import estimate
from klear_core.pipeline.graph import fingerprints_of, input_records, open_store, set_moved_aside, stages_of
from klear_core.pipeline.plan import plan_stages
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.train.base_model import model_folder
from klear_core.types import Problem

CONFIGS = Path(__file__).parents[2] / "configs"
REPO = "some/sft-model"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's files, of which only the config has its real content."""
    folder = write_config(tmp_path_factory.mktemp("given"), json.dumps(QWEN3))
    for name in ("tokenizer.json", "generation_config.json"):
        (folder / name).write_text(json.dumps({"content of": name}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    header = json.dumps({"w": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"w")
    return folder


def smoke(root: Path, *overrides: str) -> PipelineConfig:
    return load_profile(CONFIGS / "smoke", [f"workspace.root={root / 'ws'}", *overrides])


def names(config: PipelineConfig) -> list[str]:
    return [stage.name for stage in stages_of(config)]


def fingerprint(config: PipelineConfig, stage: str) -> str:
    return fingerprints_of(stages_of(config), config.workspace)[stage].fingerprint


def hub_settings(endpoint: str, cache: Path, which: str = "given.sft") -> list[str]:
    of_runtime = [f"{which}.runtime.endpoint={endpoint}", f"{which}.runtime.cache_dir={cache}"]
    return [f"{which}.repo={REPO}", f"{which}.revision={REVISION}", *of_runtime]


# ---- which stages


def test_rl_from_a_given_sft_model_needs_neither_base_nor_traces(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.sft.path=x")
    assert names(config) == ["sft", "benchmarks", "curate", "rl", "evaluate_sft", "evaluate_rl", "report"]
    rl = next(stage for stage in stages_of(config) if stage.name == "rl")
    assert rl.inputs == {"model": "sft", "problems": "curate"}


def test_problems_of_distillation_are_not_curated_where_rl_has_its_own(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.sft.path=x", "curate_rl.sources=[{kind='procedural'}]")
    assert "curate_rl" in names(config)
    assert "curate" not in names(config)


def test_a_model_alone_is_scored_and_nothing_is_trained(tmp_path: Path) -> None:
    assert names(smoke(tmp_path, "given.evaluate.path=x")) == ["model", "benchmarks", "evaluate_model", "report"]


def test_given_models_are_scored_beside_each_other(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.sft.path=x", "given.rl.path=y")
    assert names(config) == ["sft", "rl", "benchmarks", "evaluate_sft", "evaluate_rl", "report"]


def test_code_rl_starts_from_a_given_math_model(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.rl.path=x", "rl_code.domain=code")
    assert names(config) == ["rl", "benchmarks", "curate", "rl_code", "evaluate_rl", "evaluate_rl_code", "report"]


def test_a_base_model_that_only_tags_is_not_scored(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.sft.path=x", "tag_rl.samples_per_problem=2")
    assert {"base", "tag_rl"} <= set(names(config))
    assert "evaluate_base" not in names(config)


def test_what_is_downloaded_comes_before_anything_is_spent(tmp_path: Path) -> None:
    model = f"{{repo='{REPO}', revision='{REVISION}'}}"
    from_hub = smoke(tmp_path, f"model={{kind='hub', repo='{REPO}', revision='{REVISION}'}}", f"tag.model={model}")
    assert names(from_hub)[:5] == ["benchmarks", "base", "tagger", "curate", "tag"]
    tagging = next(stage for stage in stages_of(from_hub) if stage.name == "tag")
    assert tagging.inputs == {"problems": "curate", "model": "tagger"}


def test_a_tagger_is_its_content_and_is_not_scored(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    a, b = (smoke(tmp_path, f"tag_rl.model={folder}") for folder in (model, copy))
    assert fingerprint(a, "tag_rl") == fingerprint(b, "tag_rl")
    assert "evaluate_tagger_rl" not in names(a)
    found = problems_with(smoke(tmp_path, "tag_rl.model=nowhere"))
    assert any(problem.startswith("tag_rl.model: nowhere: no such folder") for problem in found), found


def test_labels_say_that_a_model_is_given(tmp_path: Path) -> None:
    labels = {stage.name: stage.label for stage in stages_of(smoke(tmp_path, "given.sft.path=x"))}
    assert (labels["sft"], labels["rl"]) == ("SFT, given", "RL")


def test_given_traces_take_the_place_of_distillation(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.distill.path=x")
    assert names(config)[:6] == ["benchmarks", "distill", "curate", "base", "sft", "rl"]
    by_name = {stage.name: stage for stage in stages_of(config)}
    assert by_name["sft"].inputs == {"model": "base", "traces": "distill"}
    assert by_name["distill"].inputs == {"benchmarks": "benchmarks"}
    assert by_name["rl"].inputs == {"model": "sft", "problems": "curate"}


def test_given_problems_take_the_place_of_a_curation(tmp_path: Path) -> None:
    config = smoke(tmp_path, "given.curate_rl.path=x", "given.sft.path=y")
    assert names(config)[:4] == ["sft", "benchmarks", "curate_rl", "rl"]
    assert names(smoke(tmp_path, "given.curate.path=x"))[:4] == ["benchmarks", "curate", "base", "distill"]
    both = {stage.name: stage for stage in stages_of(smoke(tmp_path, "given.curate_rl.path=x"))}
    assert (both["distill"].inputs["problems"], both["rl"].inputs["problems"]) == ("curate", "curate_rl")


# ---- settings


def test_a_bare_path_is_a_folder_and_a_repo_is_a_model_of_the_hub(tmp_path: Path) -> None:
    by_path = smoke(tmp_path, "given.sft=some/folder").given.sft
    by_repo = smoke(tmp_path, f"given.sft={{repo='{REPO}', revision='{REVISION}'}}").given.sft
    assert by_path is not None
    assert by_repo is not None
    assert (by_path.kind, by_repo.kind) == ("folder", "hub")


def test_rows_may_come_from_several_sources(tmp_path: Path) -> None:
    more = f"given.distill=['a.jsonl', {{repo='some/traces', revision='{REVISION}', name='theirs', split='train'}}]"
    rows = smoke(tmp_path, more).given.distill
    assert rows is not None
    assert [(source.kind, source.name) for source in rows] == [("file", "given_1"), ("hub", "theirs")]
    origins = [stage.job.origin() for stage in stages_of(smoke(tmp_path, more))]
    assert list(filter(None, origins)) == ["a.jsonl, some/traces@0123456"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        (f"given.sft={{repo='{REPO}', revision='main'}}", "given.sft.revision: 'main' is no commit"),
        (f"given.sft={{repo='{REPO}'}}", "given.sft.revision: missing"),
        ("given.sft.repo=model", r"given.sft.repo = 'model': string should match"),
        ("given.sft.pth=x", "given.sft.pth: unknown key; did you mean path"),
        ("given.stf.path=x", "given.stf: unknown key; did you mean sft"),
        ("given.sft={path='x', repo='a/b'}", "given.sft.path: unknown key"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path: Path, override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        smoke(tmp_path, override)


# ---- content addresses


def test_the_same_content_elsewhere_is_the_same_model(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    here, there = smoke(tmp_path, f"given.sft.path={model}"), smoke(tmp_path, f"given.sft.path={copy}")
    assert fingerprint(here, "rl") == fingerprint(there, "rl")
    (copy / "generation_config.json").write_text("{}")
    assert fingerprint(here, "rl") != fingerprint(there, "rl")


def test_what_is_declared_of_a_model_does_not_train_again(tmp_path: Path, model: Path) -> None:
    plain = smoke(tmp_path, f"given.sft.path={model}")
    declared = ["given.sft.licence=mit", "given.sft.decontaminated_against=['heldout']"]
    assert fingerprint(plain, "rl") == fingerprint(smoke(tmp_path, f"given.sft.path={model}", *declared), "rl")
    wider = smoke(tmp_path, f"given.sft.path={model}", "given.sft.max_position_embeddings=1024")
    assert fingerprint(plain, "rl") != fingerprint(wider, "rl")


def test_a_model_of_the_hub_is_its_commit_wherever_it_is_cached(tmp_path: Path) -> None:
    a, b = (smoke(tmp_path, *hub_settings("http://a", tmp_path / cache)) for cache in "ab")
    assert fingerprint(a, "sft") == fingerprint(b, "sft")
    other = smoke(tmp_path, *hub_settings("http://a", tmp_path), f"given.sft.revision={'f' * 40}")
    assert fingerprint(a, "sft") != fingerprint(other, "sft")
    stage = stages_of(a)[0]
    (record,) = input_records(stage.job, {}, a.workspace)
    assert (record.kind, record.role, record.fingerprint) == ("hub", REPO, REVISION)
    assert stage.job.origin() == f"{REPO}@0123456"


TRACE = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>hm</think>2"}]}
PROBLEM = {"question": "1+1?", "reference": {"kind": "math", "answers": ["2"]}}


def rows_file(path: Path, *rows: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("stage", ["curate", "curate_rl", "distill"])
def test_the_same_rows_elsewhere_are_the_same(tmp_path: Path, stage: str) -> None:
    a, b = rows_file(tmp_path / "a" / "x.jsonl", TRACE), rows_file(tmp_path / "b" / "y.jsonl", TRACE)
    configs = [smoke(tmp_path, f"given.{stage}.path={path}", f"given.{stage}.licence={path.stem}") for path in (a, b)]
    assert fingerprint(configs[0], stage) == fingerprint(configs[1], stage)
    rows_file(b, TRACE, TRACE)
    assert fingerprint(configs[0], stage) != fingerprint(configs[1], stage)
    assert fingerprint(configs[0], stage) != fingerprint(
        smoke(tmp_path, f"given.{stage}={{path='{a}', limit=1}}"), stage
    )


# ---- the plan


def take(config: PipelineConfig, stage_name: str) -> ArtifactRef:
    stage = next(stage for stage in stages_of(config) if stage.name == stage_name)
    own = fingerprints_of([stage], config.workspace)[stage_name]
    with open_store(config.workspace).create(own.kind, own.fingerprint) as slot:
        assert isinstance(stage.job, GivenModelJob)
        folder = folder_of(stage.job.runtime.as_model())
        weights = {"model.safetensors": (folder / "model.safetensors").stat().st_size}
        pointed = {"path": str(folder), "max_position_embeddings": None, "weights": weights}
        (slot.workdir / POINTER).write_text(json.dumps(pointed))
        return slot.publish(manifest(own.kind, own.fingerprint, stage=stage_name))


def test_the_plan_says_what_is_given_and_from_where(tmp_path: Path, model: Path) -> None:
    config = smoke(tmp_path, f"given.sft.path={model}")
    plan = {row.stage: row for row in plan_stages(config)}
    assert (plan["sft"].action, plan["sft"].why) == ("given", str(model))
    assert plan["rl"].action == "run"
    take(config, "sft")
    plan = {row.stage: row for row in plan_stages(config)}
    assert (plan["sft"].action, plan["sft"].why) == ("reuse", f"given: {model}, already taken")


def test_the_plan_of_a_model_on_the_hub_tells_the_download_and_its_size(tmp_path: Path, model: Path) -> None:
    files = {file.name: file.read_bytes() for file in model.iterdir()}
    with hub(REPO, files, repo_type="model") as (endpoint, fetched):
        config = smoke(tmp_path, *hub_settings(endpoint, tmp_path / "cache"))
        assert model_size(config.start_model) is None
        assert not [problem for problem in problems_with(config) if problem.startswith("given")]
        sft = plan_stages(config)[0]
        assert sft.action == "given"
        assert sft.why.startswith(f"{REPO}@0123456, ")
        assert sft.why.endswith(" GB to be downloaded")
        assert fetched == ["config.json"]
    assert model_size(config.start_model) == model_size(HfModelConfig(path=str(model)))
    rows = {row.stage: row.memory_gb for row in estimate(config)}
    assert rows["rl"] == {row.stage: row.memory_gb for row in estimate(smoke(tmp_path, f"given.sft={model}"))}["rl"]


def test_a_model_that_was_moved_is_taken_again_and_another_in_its_place_is_not_used(
    tmp_path: Path, model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, new = shutil.copytree(model, tmp_path / "old"), shutil.copytree(model, tmp_path / "new")
    before, after = smoke(tmp_path, f"given.sft={old}"), smoke(tmp_path, f"given.sft={new}")
    taken = take(before, "sft")
    set_moved_aside(before)
    assert taken.path.is_dir()
    weights = bytearray((old / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (old / "model.safetensors").write_bytes(weights)  # another model of the same size
    with caplog.at_level(logging.WARNING):
        set_moved_aside(after)
    assert not taken.path.exists()
    assert f"sft: the same model is now taken from {new}" in caplog.text
    assert take(after, "sft").fingerprint == taken.fingerprint
    assert model_folder(taken.path) == new


# ---- before a run


def test_a_folder_that_is_no_model_is_named_before_anything_is_spent(tmp_path: Path, model: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    (copy / "tokenizer_config.json").unlink()
    wanted = {
        str(tmp_path / "nowhere"): "no such folder",
        str(tmp_path): "no config.json there",
        str(copy): "no tokenizer there",
    }
    for path, told in wanted.items():
        found = problems_with(smoke(tmp_path, f"given.sft.path={path}"))
        assert any(f"given.sft: {path}: {told}" in problem for problem in found), found
    assert not [p for p in problems_with(smoke(tmp_path, f"given.sft.path={model}")) if p.startswith("given")]


@pytest.mark.parametrize("settings", [["given.sft.path={}"], ["model.kind=hf", "model.path={}"]])
def test_a_model_without_a_chat_template_is_named_before_anything_is_spent(
    tmp_path: Path, model: Path, settings: list[str]
) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    config = smoke(tmp_path, *[setting.format(copy) for setting in settings])

    def complains(files: dict[str, str]) -> bool:
        for name in ("tokenizer_config.json", "chat_template.jinja"):
            (copy / name).unlink(missing_ok=True)
        for name, text in files.items():
            (copy / name).write_text(text)
        return any(f"{copy}: the tokenizer has no chat template" in problem for problem in problems_with(config))

    tokenizer, with_template = json.dumps({"eos_token": "</s>"}), json.dumps({"chat_template": "{{ messages }}"})
    assert complains({"tokenizer_config.json": tokenizer})
    assert complains({"tokenizer_config.json": json.dumps({"chat_template": None})})
    assert complains({"tokenizer_config.json": with_template, "chat_template.jinja": ""})
    assert not complains({"tokenizer_config.json": with_template})
    assert not complains({"tokenizer_config.json": tokenizer, "chat_template.jinja": "{{ messages }}"})


def test_a_hub_that_cannot_be_reached_is_told_with_what_to_do(tmp_path: Path) -> None:
    found = problems_with(smoke(tmp_path, *hub_settings("http://127.0.0.1:9", tmp_path / "cache")))
    assert any("given.sft: some/sft-model at revision" in p and "hf download some/sft-model" in p for p in found), found


def given_problems(root: Path, *overrides: str) -> list[str]:
    return [problem for problem in problems_with(smoke(root, *overrides)) if problem.startswith(("given", "rl"))]


def test_rows_that_cannot_be_used_are_named_before_anything_is_spent(tmp_path: Path) -> None:
    traces, problems = rows_file(tmp_path / "t.jsonl", TRACE), rows_file(tmp_path / "p.jsonl", PROBLEM)
    assert given_problems(tmp_path, f"given.distill={traces}", f"given.curate_rl={problems}") == []
    (found,) = given_problems(tmp_path, f"given.distill={problems}")
    assert "no known format of traces has the keys ['question', 'reference']" in found
    (found,) = given_problems(tmp_path, "given.distill=nowhere.jsonl")
    assert found == "given.distill: nowhere.jsonl: no such file"
    (found,) = given_problems(tmp_path, "given.curate_rl=nowhere.jsonl")
    assert found == "given.curate_rl: nowhere.jsonl: no such file"


def test_problems_without_references_cannot_be_given_to_rl(tmp_path: Path) -> None:
    chat = {"conversations": [{"from": "user", "value": "1+1?"}, {"from": "assistant", "value": "2"}]}
    rows = rows_file(tmp_path / "p.jsonl", chat)
    found = given_problems(tmp_path, f"given.curate_rl={{path='{rows}', domain='math'}}")
    assert any(problem.startswith("rl: its problems come from sources without answers") for problem in found), found


def test_weights_name_the_given_sources(tmp_path: Path) -> None:
    rows = rows_file(tmp_path / "t.jsonl", TRACE)
    (found,) = (
        problem
        for problem in problems_with(smoke(tmp_path, f"given.distill={rows}", "sft.source_weights={given=2, chain=1}"))
        if problem.startswith("sft")
    )
    assert found == "sft.source_weights: 'chain' is none of the given sources, which are: given"


def test_given_problems_are_taken_as_they_are_but_for_those_of_benchmarks(tmp_path: Path) -> None:
    secret = "How many positive integers less than one thousand are divisible by seven but not by eleven or thirteen?"
    asked = ["What is 1+1?", "What is 1 + 1 ?", secret]
    problems = [{"question": q, "reference": {"kind": "math", "answers": ["2"]}} for q in asked]
    benchmark = rows_file(tmp_path / "secret.jsonl", problems[2])
    rows = rows_file(tmp_path / "p.jsonl", *problems)
    config = smoke(tmp_path, f"given.curate_rl={{path='{rows}', name='mine', licence='mit'}}")
    prepared = BenchmarkConfig(name="secret", source=FileSource(path=str(benchmark)))
    prepare_benchmarks((prepared,), seed=0, runtime=BenchmarksRuntime(), workdir=tmp_path, telemetry=NullTelemetry())
    job = next(stage.job for stage in stages_of(config) if stage.name == "curate_rl")
    assert isinstance(job, GivenProblemsJob)
    (tmp_path / "out").mkdir()
    summary = curate(job.curation(), benchmarks=tmp_path, seed=0, workdir=tmp_path / "out", telemetry=NullTelemetry())
    kept = list(read_shards(tmp_path / "out" / "problems", Problem))
    assert sorted(problem.question for problem in kept) == sorted(asked[:2])
    assert {problem.source for problem in kept} == {"mine"}
    drops = {step.step: step.dropped for step in summary.ledger if step.dropped}
    assert drops == {"decontaminate": {"in_secret": 1}}


def test_the_folder_of_an_artifact_stands_for_the_model_in_it(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    for path in (tmp_path, tmp_path / "model"):
        assert GivenFolder(path=str(path)).path == str(tmp_path / "model")
    assert GivenFolder(path="models/mine").path == "models/mine"
