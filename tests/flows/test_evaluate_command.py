"""`klear evaluate`: the run that it asks for."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from klear_command import Klear
from stored_evaluations import RIGHT, evaluation, made_model, said, sample

from flows.evaluate_model import EvaluateOptions, evaluation_config
from klear_core.config.evaluate import ServedModelConfig, VllmEngineConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.train import TinyModelConfig
from klear_core.cpus import usable_cpus
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.train.base_model import prepare_base


def config(
    tmp_path: Path, *benchmarks: str, model_type: str = "qwen3", window: int = 64, width: int = 8, **options: object
) -> PipelineConfig:
    values = {"hidden_size": width, "intermediate_size": width, "num_hidden_layers": 1, "num_attention_heads": 1}
    hf = values | {"model_type": model_type, "vocab_size": 8, "max_position_embeddings": window}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    fields = {"profile": None, "num_samples": None, "max_tokens": None, "engine": "auto", "overrides": ()} | options
    asked = EvaluateOptions(model="m", benchmarks=benchmarks, root=tmp_path / "ws", **fields)  # type: ignore[arg-type]
    return evaluation_config(asked, {"kind": "folder", "path": str(tmp_path)})


def test_a_model_and_a_file_are_enough_and_nothing_is_trained(tmp_path: Path) -> None:
    file = tmp_path / "My Set-2.jsonl"
    file.write_text("{}\n")
    cfg = config(tmp_path, str(file), num_samples=3, max_tokens=99)
    (benchmark,) = cfg.benchmarks
    assert (benchmark.name, benchmark.num_samples, cfg.evaluate.sampling.max_new_tokens) == ("my_set_2", 3, 99)
    assert (cfg.evaluate.sampling.temperature, cfg.evaluate.sampling.top_p) == (0.6, 0.95)  # the paper's
    assert [stage.name for stage in stages_of(cfg)] == ["model", "benchmarks", "evaluate_model", "report"]


@pytest.mark.parametrize(("model_type", "engine"), [("qwen3", "torch"), ("llama", "torch"), ("gemma2", "vllm")])
def test_models_that_our_sampler_does_not_run_go_to_vllm(tmp_path: Path, model_type: str, engine: str) -> None:
    assert config(tmp_path, "aime24", model_type=model_type).evaluate.engine.kind == engine


def test_a_large_model_is_sampled_by_all_cores_and_a_small_one_by_one(tmp_path: Path) -> None:
    assert config(tmp_path, "aime24").evaluate.runtime.num_threads == 1
    assert config(tmp_path, "aime24", width=4096).evaluate.runtime.num_threads == usable_cpus()
    own = config(tmp_path, "aime24", width=4096, overrides=["evaluate.runtime.num_threads=3"])
    assert own.evaluate.runtime.num_threads == 3


def test_answers_that_our_sampler_has_no_cache_for_go_to_vllm(tmp_path: Path) -> None:
    """A Qwen3-8B with its window of 40,960 is asked for the paper's 32,768 tokens."""

    def chosen(**options: object) -> str:
        return config(tmp_path, "aime24", window=40_960, **options).evaluate.engine.kind

    assert chosen() == chosen(max_tokens=8193) == "vllm"
    assert chosen(max_tokens=8192) == "torch"
    assert chosen(overrides=["evaluate.sampling.max_new_tokens=4096"]) == "torch"
    assert chosen(engine="torch") == "torch"


@pytest.mark.usefixtures("no_hub")
@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_where_vllm_is_missing_both_ways_out_are_told(tmp_path: Path) -> None:
    told = [p for p in problems_with(config(tmp_path, "aime24", window=40_960)) if "vLLM" in p]
    assert len(told) == 1
    assert "pip install -e '.[gpu]', or set kind = 'torch'" in told[0]
    assert "klear evaluate: --max-tokens 8192" in told[0]
    other = problems_with(config(tmp_path, "aime24", model_type="gemma2", window=40_960))
    assert not [p for p in other if "kind = 'torch'" in p]


def test_known_benchmarks_go_by_name_from_the_hub_or_a_copy_and_others_are_refused_with_the_names(
    tmp_path: Path,
) -> None:
    aime, code, copy = config(tmp_path, "aime24", "lcb_v6", "minerva=a.jsonl").benchmarks
    assert (aime.source.kind, copy.source.kind) == ("hub", "file")
    assert (copy.name, copy.expected_rows) == ("minerva", 272)
    assert (aime.name, aime.num_samples, aime.expected_rows) == ("aime24", 64, 30)
    assert (code.name, code.num_samples) == ("lcb_v6", 8)
    with pytest.raises(ConfigError, match=r"--benchmarks aime99: .*names: aime24, aime25, aime26, hmmt25"):
        config(tmp_path, "aime99")
    with pytest.raises(ConfigError, match="name what to score it on"):
        config(tmp_path)


def test_a_profile_gives_its_benchmarks_sampling_and_judges_alone(tmp_path: Path) -> None:
    cfg = config(tmp_path, profile="laptop", overrides=["evaluate.sampling.temperature=0.5"])
    assert [b.name for b in cfg.benchmarks] == ["heldout", "longer_than_trained"]
    assert (cfg.evaluate.sampling.temperature, cfg.evaluate.sampling.max_new_tokens) == (0.5, 96)
    assert cfg.rl == PipelineConfig().rl
    assert config(tmp_path, profile="laptop", engine="vllm").evaluate.engine.kind == "vllm"


def test_a_profile_of_known_benchmarks_gives_them_by_name_with_its_decoding(tmp_path: Path) -> None:
    """The profiles of the paper do not repeat the names of the published benchmarks."""
    cfg = config(tmp_path, profile="klear_8b_64k")
    assert [b.name for b in cfg.benchmarks] == ["aime24", "aime25", "hmmt25", "lcb_v5", "lcb_v6"]
    cfg = config(tmp_path, "lcb_v6", "aime24", profile="klear_8b_script", num_samples=2)
    assert [(b.name, b.num_samples) for b in cfg.benchmarks] == [("lcb_v6", 2), ("aime24", 2)]
    assert (cfg.evaluate.sampling.top_k, cfg.evaluate.sampling.repetition_penalty) == (20, 1.05)
    assert isinstance(cfg.evaluate.engine, VllmEngineConfig)
    assert (cfg.evaluate.engine.yarn_factor, cfg.evaluate.engine.yarn_original_window) == (2.5, 32_768)


@pytest.mark.parametrize(
    ("override", "section"),
    [
        ("rl.learning_rate=1", "rl"),
        ("judge.rl.tags=none", "rl"),
        ("model.path=m", "model"),
        ("given.distill.path=t.jsonl", "given.distill"),
    ],
)
def test_settings_that_an_evaluation_never_uses_are_refused(tmp_path: Path, override: str, section: str) -> None:
    wanted = f"--set '{override}': klear evaluate trains nothing and uses no setting of {section}; it uses those of"
    with pytest.raises(ConfigError, match=re.escape(wanted)):
        config(tmp_path, "aime24", overrides=[override])
    assert config(tmp_path, "aime24", overrides=["judge.evaluate.tags=none"]).judge_of("evaluate").tags == "none"
    assert config(tmp_path, "aime24", overrides=["verify.tags=none", "seed=3"]).seed == 3


def test_a_file_whose_name_gives_no_name_for_its_scores_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "数学.jsonl"
    file.write_text("{}\n")
    with pytest.raises(ConfigError, match=r"数学\.jsonl: a benchmark is named by its file, .*: rename the file"):
        config(tmp_path, str(file))


def test_the_folder_of_an_artifact_stands_for_its_model(klear: Klear, tmp_path: Path) -> None:
    """As for the other commands; a folder without a model in it is refused by name."""
    files = tmp_path / "files"
    files.mkdir()
    prepare_base(TinyModelConfig(hidden_size=16, num_layers=1), seed=0, workdir=files, telemetry=NullTelemetry())
    made = made_model(tmp_path, files=files)
    ended = klear("evaluate", made.path, "--benchmarks", tmp_path / "none.jsonl", "--root", tmp_path)
    assert "none.jsonl: no such file" in ended.err
    wrong = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)]).path
    assert "neither model/ nor model.json" in klear("evaluate", wrong, "--benchmarks", "aime24").err


def test_what_is_no_model_is_refused_before_anything_starts(klear: Klear, tmp_path: Path) -> None:
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    assert "neither model/ nor model.json" in klear("evaluate", "rl", "--benchmarks", "aime24", "--root", tmp_path).err
    assert "no artifact 'sft'" in klear("evaluate", "sft", "--benchmarks", "aime24", "--root", tmp_path).err


def test_a_model_at_an_address_is_named_there_and_sampled_by_its_server(tmp_path: Path) -> None:
    fields = {"profile": None, "num_samples": 2, "max_tokens": 99, "engine": "auto", "root": tmp_path}
    file = tmp_path / "mine.jsonl"
    file.write_text("{}\n")

    def asked(**changes: object) -> PipelineConfig:
        options = {"model_name": "r1", "overrides": ["evaluate.engine.api_key_env=KEY"], **fields, **changes}
        at = EvaluateOptions(model="http://host/v1", benchmarks=[str(file)], **options)  # type: ignore[arg-type]
        return evaluation_config(at, {})

    engine = asked().evaluate.engine
    assert isinstance(engine, ServedModelConfig)
    (endpoint,) = engine.runtime.endpoints
    assert (engine.model, endpoint.base_url, endpoint.api_key_env) == ("r1", "http://host/v1", "KEY")
    assert asked().evaluate.sampling.max_new_tokens == 99
    with pytest.raises(ConfigError, match="name its model, --model NAME"):
        asked(model_name=None)
    with pytest.raises(ConfigError, match="--engine vllm: the model at http://host/v1 is served there"):
        asked(engine="vllm")
