"""Models published as Hugging Face folders."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf_models import write_model as write_model_of
from hub_upload_server import upload_hub
from manifests import manifest
from safetensors.torch import load_file
from snapshot import Snapshots
from stored_evaluations import RIGHT, SILENT, WRONG, evaluation, made_model, problem, published_report, said, sample

from klear_core.artifacts.hub import upload
from klear_core.artifacts.manifest import ArtifactId, ArtifactRef, InputRecord
from klear_core.artifacts.records import write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.evaluate import EvaluateSamplingConfig
from klear_core.config.load import load_profile, profile_toml, validate
from klear_core.config.settings import config_digest
from klear_core.config.train import GgufModelConfig, TinyModelConfig
from klear_core.errors import ConfigError
from klear_core.gguf_checks import check_gguf
from klear_core.metrics import NullTelemetry
from klear_core.report.publish import check_published, published_artifact, write_data, write_model
from klear_core.train.base_model import prepare_base, take_model
from klear_core.types import Difficulty, TeacherTrace

CONFIGS = Path(__file__).parents[2] / "configs"
TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
SAMPLES = [sample(1, 0, said(1), RIGHT), sample(1, 1, said(2), WRONG), sample(2, 0, "cut", SILENT, finish="length")]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an RL stage with LoRA leaves: a merged model and its adapter."""
    folder = tmp_path_factory.mktemp("artifact")
    prepare_base(TINY, seed=0, workdir=folder, telemetry=NullTelemetry())
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    return folder


@pytest.fixture
def artifact(files: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The model's artifact, and the evaluation of it, of a run whose report is there too."""
    ref = evaluation(tmp_path, SAMPLES, files=files)
    config = load_profile(CONFIGS / "smoke").model_dump(mode="json")
    published_report(tmp_path, {"evaluate_rl": ref}, config)
    (folder,) = [f for f in LocalStore(tmp_path / "artifacts").folders() if f.parent.name == "rl"]
    return folder, ref.path


def test_a_published_folder_is_whole_and_says_where_it_is_from(
    artifact: tuple[Path, Path], tmp_path: Path, snapshot: Snapshots
) -> None:
    model, scores = artifact
    out = tmp_path / "out"
    write_model(model, model / "model", [scores], out, name="mine", licence="mit")
    check_published(out)
    card = (out / "README.md").read_text()
    # The mean over problems of 1 of 2 and 0 of 1; a third each is cut off and has no answer.
    assert "| toy | avg@1.5 | 25.0 % |" in card
    snapshot("model_card", card)
    assert (out / "adapter" / "adapter_config.json").is_file()
    assert {file.name for file in (out / "klear").iterdir()} == {"rl-rl000000.json"}
    stated = json.loads((out / "generation_config.json").read_text())
    assert (stated["temperature"], stated["top_p"], stated["do_sample"]) == (0.6, 0.95, True)
    assert config_digest(load_profile(out / "profile")) == config_digest(load_profile(CONFIGS / "smoke"))


def test_a_gguf_file_lies_beside_the_model_with_the_same_weights_and_the_card_names_it(tmp_path: Path) -> None:
    write_model_of("llama", tmp_path / "files" / "model")
    artifact = made_model(tmp_path, files=tmp_path / "files").path
    published = write_model(artifact, artifact / "model", [], tmp_path / "mine", name="mine", licence="mit", gguf="f16")
    header = check_gguf(published.folder / "mine-F16.gguf")
    assert (header.architecture, header.metadata["general.license"]) == ("llama", "mit")
    assert "`mine-F16.gguf` is the same model for llama.cpp" in (published.folder / "README.md").read_text()
    (tmp_path / "taken").mkdir()
    taken = GgufModelConfig(path=str(header.path))
    take_model(taken, licence="", workdir=tmp_path / "taken", telemetry=NullTelemetry())
    before, after = (load_file(folder / "model.safetensors") for folder in (published.folder, tmp_path / "taken/model"))
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_the_card_of_a_model_from_a_gguf_file_says_that_its_weights_were_quantised(tmp_path: Path) -> None:
    write_model_of("llama", tmp_path / "files" / "model")
    first = made_model(tmp_path, files=tmp_path / "files").path
    write_model(first, first / "model", [], tmp_path / "first", name="first", gguf="q8_0")
    (tmp_path / "taken").mkdir()
    file = GgufModelConfig(path=str(tmp_path / "first" / "first-Q8_0.gguf"))
    taken = take_model(file, licence="", workdir=tmp_path / "taken", telemetry=NullTelemetry())
    with LocalStore(tmp_path / "artifacts").create("base", "base0") as slot:
        shutil.copytree(tmp_path / "taken", slot.workdir, dirs_exist_ok=True)
        base = slot.publish(manifest("base", "base0", notes=taken.notes, given=taken.given))
    write_model(base.path, base.path / "model", [], tmp_path / "second", name="second")
    card = (tmp_path / "second" / "README.md").read_text()
    assert "- `base`: dequantised from first-Q8_0.gguf (" in card
    assert "its weights differ a little from those that were published before they were quantised" in card
    assert "### Notes" not in (tmp_path / "first" / "README.md").read_text()


def test_a_model_that_no_gguf_file_can_hold_is_refused_before_anything_is_written(
    artifact: tuple[Path, Path], tmp_path: Path
) -> None:
    model, _ = artifact
    with pytest.raises(ConfigError, match="its BPE has no merges: each token is a byte, as in the demo's model"):
        write_model(model, model / "model", [], tmp_path / "out", name="mine", gguf="q8_0")
    assert list(tmp_path.glob("out*")) == []


def test_without_an_evaluation_the_card_has_no_scores_and_says_so(
    artifact: tuple[Path, Path], tmp_path: Path, snapshot: Snapshots
) -> None:
    model, _ = artifact
    published = write_model(model, model / "model", [], tmp_path / "out", name="mine")
    assert published.warnings == ("no evaluation of this model is known",)
    snapshot("model_card_without_scores", (tmp_path / "out" / "README.md").read_text())


def test_a_template_whose_end_is_no_end_token_is_refused(artifact: tuple[Path, Path], tmp_path: Path) -> None:
    model, scores = artifact
    write_model(model, model / "model", [scores], tmp_path / "out", name="mine")
    config = tmp_path / "out" / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": 1}))
    with pytest.raises(ConfigError, match="answers would never stop"):
        check_published(tmp_path / "out")


def test_nothing_is_overwritten_and_a_damaged_model_is_not_published(
    artifact: tuple[Path, Path], tmp_path: Path
) -> None:
    model, scores = artifact
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    with pytest.raises(ConfigError, match="not empty"):
        write_model(model, model / "model", [scores], tmp_path / "full", name="mine")
    (model / "model" / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer"):
        write_model(model, model / "model", [scores], tmp_path / "out", name="mine")
    assert not (tmp_path / "out").exists()


def test_a_model_is_published_anew_where_it_was_and_nowhere_else(artifact: tuple[Path, Path], tmp_path: Path) -> None:
    model, scores = artifact
    out = tmp_path / "out"
    (tmp_path / "out.tmp").mkdir()  # somebody's own
    write_model(model, model / "model", [], out, name="mine")
    assert published_artifact(out) == ArtifactId(kind="rl", fingerprint=model.name)
    write_model(model, model / "model", [scores], out, name="mine")
    assert (
        "| toy | avg@1.5 | 25.0 % |" in (out / "README.md").read_text()
    )  # of the evaluation that there was not before
    (out / "notes.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"has files that publishing does not write \(notes.txt\)"):
        write_model(model, model / "model", [], out, name="mine")
    assert (out / "notes.txt").read_text() == "precious"
    assert "25.0 %" in (out / "README.md").read_text()
    assert sorted(path.name for path in tmp_path.glob("*out*")) == ["out", "out.tmp"]
    (out / "notes.txt").unlink()
    other = made_model(tmp_path / "elsewhere", model="rl", seed=7, files=model).path
    with pytest.raises(ConfigError, match=f"holds another published model, rl/{model.name[:8]}; name a new folder"):
        write_model(other, other / "model", [], out, name="mine")


@pytest.mark.parametrize("temperature", [0.0, 0.6])
def test_a_models_own_sampling_does_not_mix_with_that_of_its_scores(
    files: Path, tmp_path: Path, temperature: float
) -> None:
    from transformers import GenerationConfig

    shutil.copytree(files, tmp_path / "files")
    own = {"do_sample": True, "temperature": 0.7, "top_k": 20, "min_p": 0.15}
    (tmp_path / "files" / "model" / "generation_config.json").write_text(json.dumps(own))
    sampling = EvaluateSamplingConfig(temperature=temperature, max_new_tokens=64)
    scores = evaluation(tmp_path, SAMPLES, files=tmp_path / "files", sampling=sampling).path
    (model,) = [f for f in LocalStore(tmp_path / "artifacts").folders() if f.parent.name == "rl"]
    stated = GenerationConfig.from_pretrained(
        write_model(model, model / "model", [scores], tmp_path / "out", name="mine").folder
    )
    expected = (0.6, 0, None) if temperature else (None, None, None)
    assert (stated.temperature, stated.top_k, stated.min_p) == expected
    stated.validate(strict=True)  # as transformers does when the model is saved again


def test_the_present_folder_is_not_replaced(
    artifact: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, scores = artifact
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ConfigError, match=r"--to \.: has no name of its own; name a new folder"):
        write_model(model, model / "model", [scores], Path(), name="mine")


@pytest.mark.parametrize("profile", ["laptop", "klear_8b"])
def test_a_config_comes_back_from_its_toml(profile: str, tmp_path: Path) -> None:
    config = load_profile(CONFIGS / profile)
    (tmp_path / "config.toml").write_text(profile_toml(config))
    assert config_digest(load_profile(tmp_path).model_copy(update={"hardware": config.hardware})) == config_digest(
        config
    )


def test_a_reward_that_was_switched_off_stays_off_in_the_toml(tmp_path: Path) -> None:
    """None is not its default, and TOML has no null."""
    config = validate({"rl": {"reward": {"missing_close": "none"}}, "rl_code": {}}, origin="here")
    (tmp_path / "config.toml").write_text(profile_toml(config))
    assert load_profile(tmp_path).rl == config.rl
    assert load_profile(tmp_path).rl_code == config.rl_code


def test_a_folder_is_uploaded_to_a_repository_that_is_made_for_it(
    artifact: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    model, scores = artifact
    out = tmp_path / "out"
    write_model(model, model / "model", [scores], out, name="mine")
    with upload_hub() as hub:
        address = upload(out, "me/model", is_private=True, message="first", endpoint=hub.address)
    assert address.endswith("/me/model/commit/" + "1" * 40)
    assert hub.created[0]["visibility"] == "private"
    assert hub.messages == ["first"]
    sent = {str(file.relative_to(out)): file.read_bytes() for file in out.rglob("*") if file.is_file()}
    assert hub.files == sent


def test_a_hub_that_refuses_names_the_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    (tmp_path / "README.md").write_text("x")
    with upload_hub(refuses=True) as hub, pytest.raises(ConfigError, match="may not write"):
        upload(tmp_path, "me/model", is_private=True, message="m", endpoint=hub.address)


# ---- data sets


@pytest.fixture
def learned(tmp_path: Path) -> Path:
    """A model that was fine-tuned on traces of curated problems."""
    (tmp_path / "files" / "model").mkdir(parents=True)
    write_shard(tmp_path / "curated" / "problems" / "00000-of-00001.parquet", [problem(1), problem(2)])
    write_shard(tmp_path / "curated" / "dropped" / "00000-of-00001.parquet", [])
    write_shard(tmp_path / "made" / "traces" / "00000-of-00001.parquet", [trace(1), trace(2), trace(2)])
    curated = stored(tmp_path, "curate", (), "curated")
    made = stored(tmp_path, "distill", [curated], "made")
    return stored(tmp_path, "sft", [made], "files").path


def stored(root: Path, stage: str, inputs: Sequence[ArtifactRef], files: str) -> ArtifactRef:
    records = tuple(InputRecord(kind=ref.kind, fingerprint=ref.fingerprint, role=ref.kind) for ref in inputs)
    with LocalStore(root / "artifacts").create(stage, f"{stage}0") as slot:
        shutil.copytree(root / files, slot.workdir, dirs_exist_ok=True)
        return slot.publish(manifest(stage, f"{stage}0").model_copy(update={"stage": stage, "inputs": records}))


def trace(number: int) -> TeacherTrace:
    return TeacherTrace(
        problem_id=f"{number:016x}",
        question=f"What is {number}?",
        difficulty=Difficulty.EASY,
        source="toy",
        teacher="t",
        sample_idx=0,
        reasoning="easy",
        answer=str(number),
        finish_reason="stop",
        num_tokens=3,
        verdict=RIGHT,
        prompt_version="1",
    )


def test_problems_and_traces_are_published_as_a_data_set_that_the_library_loads(learned: Path, tmp_path: Path) -> None:
    import datasets

    out = write_data(learned, ["curate", "distill"], tmp_path / "mine-data", name="mine-data").folder
    loaded = {
        stage: datasets.load_dataset(str(out), stage, split="train", cache_dir=str(tmp_path / "cache"))
        for stage in ("curate", "distill")
    }
    assert loaded["curate"]["question"][:] == ["What is 1?", "What is 2?"]
    assert loaded["distill"]["answer"][:] == ["1", "2", "2"]
    card = (out / "README.md").read_text()
    assert "| distill | `distill/" in card
    assert str(tmp_path) not in card


def test_a_stage_that_is_not_behind_the_model_is_refused_with_those_that_are(learned: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data rl: no stage of that name .* there: curate, distill"):
        write_data(learned, ["rl"], tmp_path / "out", name="out")
    assert not (tmp_path / "out").exists()


def test_data_are_published_anew_where_they_were_and_nowhere_else(learned: Path, tmp_path: Path) -> None:
    """After a failed upload, or with a model that is published anew."""
    out = tmp_path / "mine-data"
    write_data(learned, ["distill"], out, name="mine-data")
    write_data(learned, ["distill"], out, name="renamed")
    assert "# renamed" in (out / "README.md").read_text()
    with pytest.raises(ConfigError, match="exists and is not empty"):
        write_data(learned, ["curate", "distill"], tmp_path / "artifacts", name="mine-data")
    (out / "notes.txt").write_text("precious")
    with pytest.raises(ConfigError, match=r"has files that publishing does not write \(notes.txt\)"):
        write_data(learned, ["distill"], out, name="mine-data")
    assert "# renamed" in (out / "README.md").read_text()


def test_a_stage_that_is_named_twice_is_published_once(learned: Path, tmp_path: Path) -> None:
    card = (write_data(learned, ["distill", "distill"], tmp_path / "out", name="out").folder / "README.md").read_text()
    assert card.count('"config_name": "distill"') == 1


def test_every_table_of_an_artifact_opens_in_datasets_and_pandas(learned: Path, tmp_path: Path) -> None:
    """As docs/data.md says."""
    import datasets
    import pandas

    made = tmp_path / "artifacts" / "distill" / "distill0"
    rows = datasets.load_dataset("parquet", data_files=f"{made}/traces/*.parquet", split="train", cache_dir=tmp_path)
    assert rows["reasoning"][:] == ["easy"] * 3
    assert list(pandas.read_parquet(made / "traces").answer) == ["1", "2", "2"]
