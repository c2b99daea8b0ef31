"""Scores of given models carry what is known about their training data: declared, shown by their lineage, or unknown."""

import json
import re
import shlex
from pathlib import Path

import pytest
from manifests import manifest

from klear_core.artifacts.manifest import GivenRecord, Manifest, write_manifest
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import fingerprints_of, input_records, stages_of
from klear_core.pipeline.preflight.checks import problems_with
from klear_core.pipeline.preflight.exposure import GivenContamination, TrainingQuestions, given_contamination

SMOKE = Path(__file__).parents[3] / "configs" / "smoke"


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "aime.jsonl"
    path.write_text(json.dumps({"problem": "1+1?", "answer": "2"}) + "\n")
    return path


def config(root: Path, questions: Path, *overrides: str) -> PipelineConfig:
    benchmarks = f"benchmarks=[{{name='aime', source='{questions}'}}]"
    return load_profile(SMOKE, [f"workspace.root={root / 'ws'}", benchmarks, *overrides])


def made_by(earlier: PipelineConfig, store: Path, **changes_of_curate: object) -> Path:
    """Manifests of an SFT model and all it was made from, as a run with these settings leaves them; the model's folder."""
    stages = {stage.name: stage for stage in stages_of(earlier)}
    ids = fingerprints_of(tuple(stages.values()), earlier.workspace)
    for name in ("benchmarks", "curate", "base", "distill", "sft"):
        stage, own = stages[name], ids[name]
        inputs = input_records(stage.job, {role: ids[i] for role, i in stage.inputs.items()}, earlier.workspace)
        config = stage.job.model_dump(mode="json")
        changes = changes_of_curate if name == "curate" else {}
        folder = store / own.kind / own.fingerprint
        folder.mkdir(parents=True)
        about = manifest(own.kind, own.fingerprint, stage=name, inputs=inputs, result_config=config)
        write_manifest(folder, Manifest.model_validate(about.model_dump() | changes))
    model = store / ids["sft"].kind / ids["sft"].fingerprint / "model"
    model.mkdir()
    return model


def only(found: list[GivenContamination]) -> GivenContamination:
    (exposure,) = found
    return exposure


def test_nothing_is_known_of_a_model_from_elsewhere(tmp_path: Path, questions: Path) -> None:
    found = only(given_contamination(config(tmp_path, questions, f"given.sft={tmp_path}")))
    assert (found.unknown, found.missed, found.scored_by) == (("aime",), (), ("evaluate_sft", "evaluate_rl"))
    assert "is not known to have been compared with aime" in found.warning
    assert not any(p.startswith("given.sft: the training") for p in problems_with(config(tmp_path, questions)))


def test_what_is_declared_is_believed(tmp_path: Path, questions: Path) -> None:
    given = f"given.sft.path={tmp_path}"
    assert given_contamination(config(tmp_path, questions, given, "given.sft.decontaminated_against=['aime']")) == []
    other = config(tmp_path, questions, "given.sft={path='x', decontaminated_against=['math500']}")
    assert only(given_contamination(other)).unknown == ("aime",)


def test_the_declaration_that_a_warning_asks_for_can_be_pasted_and_keeps_what_is_declared(
    tmp_path: Path, questions: Path
) -> None:
    given = (f"given.sft.path={tmp_path}", "given.sft.decontaminated_against=['math500']")
    (option,) = pasted(only(given_contamination(config(tmp_path, questions, *given))).warning)
    assert option == 'given.sft.decontaminated_against=["math500", "aime"]'
    assert given_contamination(config(tmp_path, questions, *given, option)) == []


def pasted(message: str) -> list[str]:
    """The overrides that a message gives as options of the command line."""
    options = re.findall(r"--set (?:'[^']*'|\S+)", message)
    return [shlex.split(option)[1] for option in options]


def test_without_given_models_there_is_nothing_to_say(tmp_path: Path, questions: Path) -> None:
    assert given_contamination(config(tmp_path, questions)) == []
    assert given_contamination(config(tmp_path, questions, "given.distill=traces.jsonl")) == []


def test_a_model_of_an_earlier_run_with_the_same_benchmarks_needs_no_warning(tmp_path: Path, questions: Path) -> None:
    model = made_by(config(tmp_path / "earlier", questions), tmp_path / "store")
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(questions.read_bytes())
    assert given_contamination(config(tmp_path, questions, f"given.sft={model}")) == []
    assert given_contamination(config(tmp_path, copy, f"given.sft={model}")) == []  # the same rows under another name


def test_a_model_of_a_run_without_this_benchmark_is_not_scored_unless_told(tmp_path: Path, questions: Path) -> None:
    model = made_by(config(tmp_path / "earlier", questions), tmp_path / "store")
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"problem": "2+2?", "answer": "4"}) + "\n")
    later = config(tmp_path, other, f"given.sft={model}")
    found = only(given_contamination(later))
    assert (found.missed, found.unknown) == (("aime",), ())
    (refused,) = [problem for problem in problems_with(later) if "given.score_despite" in problem]
    *_, despite = pasted(refused)  # as a shell passes them on
    assert despite == 'given.score_despite=["aime"]'
    told = config(tmp_path, other, f"given.sft={model}", despite)
    assert not [problem for problem in problems_with(told) if "score_despite" in problem]
    assert "was not compared with aime" in only(given_contamination(told)).warning


@pytest.mark.parametrize("names", ["'AIME'", "'aime', 'aime24'", "''"])
def test_permission_to_score_names_benchmarks_that_there_are(tmp_path: Path, questions: Path, names: str) -> None:
    wrong = names.rpartition(" ")[2]
    with pytest.raises(ConfigError, match=f"score_despite: {wrong} is none of the benchmarks, which are: aime"):
        config(tmp_path, questions, f"given.score_despite=[{names}]")


def test_generated_benchmarks_share_no_problem_with_training_whatever_their_seed(
    tmp_path: Path, questions: Path
) -> None:
    model = made_by(config(tmp_path / "earlier", questions), tmp_path / "store")
    later = load_profile(SMOKE, [f"workspace.root={tmp_path / 'ws'}", f"given.sft={model}", "seed=7"])
    assert given_contamination(later) == []


def test_a_lineage_that_leads_to_a_model_from_elsewhere_shows_nothing(tmp_path: Path, questions: Path) -> None:
    foreign = {"given": GivenRecord(origin="x", licence="mit", files=()), "kind": "given_model"}
    model = made_by(config(tmp_path / "earlier", questions), tmp_path / "store", **foreign)
    assert only(given_contamination(config(tmp_path, questions, f"given.sft={model}"))).unknown == ("aime",)


def test_a_lineage_with_a_gap_shows_nothing(tmp_path: Path, questions: Path) -> None:
    model = made_by(config(tmp_path / "earlier", questions), tmp_path / "store")
    (gone,) = (tmp_path / "store" / "curate").iterdir()
    (gone / "manifest.json").unlink()
    assert only(given_contamination(config(tmp_path, questions, f"given.sft={model}"))).unknown == ("aime",)


def test_a_question_is_outside_of_what_was_trained_by_its_parts_or_its_length() -> None:
    trained = TrainingQuestions(
        num_questions=9, tokens=frozenset(["mod", "10", ":", "3", "+4", ",", "*7", "=", "?"]), longest=10
    )
    assert trained.why_unlike("mod 10: 3,+4,*7=?") is None
    assert trained.why_unlike("mod 10: 3,+0,*1=?") == (
        "outside of what was trained: '+0', '*1' are in none of the 9 questions that this model was trained on"
    )
    assert "longer than any" in str(trained.why_unlike("mod 10: 3,+4,*7,+4=?"))
