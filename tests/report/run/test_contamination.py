"""The shares that stand beside each score: no answer found, and problems in the training data."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from manifests import manifest
from report_runs import laptop_run
from stored_evaluations import given_model

from klear_core.artifacts.manifest import ArtifactRef, InputRecord
from klear_core.artifacts.object_store import ObjectStore
from klear_core.artifacts.store import LocalStore
from klear_core.config.train import TinyModelConfig
from klear_core.data.curation.decontaminate import Leak
from klear_core.data.curation.write import write_leaks
from klear_core.metrics import NullTelemetry
from klear_core.report.run.facts import ScoreWarning, read_facts
from klear_core.report.run.warnings import kept_leaks, num_contaminated, num_overlapping
from klear_core.train.base_model import prepare_base


def leak(question: str, *, is_dropped: bool) -> Leak:
    fields = {"problem_id": "p", "source": "s", "rules": "near", "shared": "x", "prompt": "x", "question": "x"}
    return Leak(benchmark="heldout", question_id=question, is_dropped=is_dropped, num_shared=1, **fields)


def test_questions_with_a_kept_match_are_counted_once_for_models_trained_after_it(tmp_path: Path) -> None:
    facts = read_facts(laptop_run(tmp_path))
    curated = next(stage for stage in facts.stages if stage.name == "curate")
    leaks = [leak("a", is_dropped=True), *[leak("b", is_dropped=False)] * 2, leak("c", is_dropped=False)]
    write_leaks(curated.folder, leaks, rows_per_shard=2)
    kept_leaks.cache_clear()
    found = [num_contaminated(facts, model, "heldout") for model in facts.models]
    assert found == [0, 2, 2]  # base, SFT, RL
    assert num_contaminated(facts, facts.model("rl"), "other") == 0


def test_data_that_was_not_compared_is_not_known_rather_than_zero(tmp_path: Path) -> None:
    facts = read_facts(laptop_run(tmp_path))
    warning = ScoreWarning(where="x", text="x", scored_by=("evaluate_sft",), benchmarks=("heldout",))
    warned = replace(facts, score_warnings=(warning,))
    assert [num_contaminated(warned, model, "heldout") for model in warned.models] == [0, None, 0]


TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)


def trained(store: LocalStore) -> ArtifactRef:
    """Publish a curation that kept a prompt like question b, and a model trained on its problems."""
    with store.create("curate", "c1") as slot:
        write_leaks(slot.workdir, [leak("b", is_dropped=False)], rows_per_shard=2)
        curated = slot.publish(manifest(kind="curate", fingerprint="c1"))
    with store.create("sft", "s1") as slot:
        prepare_base(TINY, seed=0, workdir=slot.workdir, telemetry=NullTelemetry())
        record = InputRecord(kind=curated.kind, fingerprint=curated.fingerprint, role="problems")
        return slot.publish(manifest(kind="sft", fingerprint="s1", inputs=(record,)))


def test_the_data_of_an_earlier_run_counts_for_its_model_that_is_given_to_another(tmp_path: Path) -> None:
    """As `klear evaluate sft` and `given.sft` take it: by its folder."""
    made = trained(LocalStore(tmp_path / "w0" / "artifacts"))
    assert num_overlapping(made.path, ["heldout"]) == {"heldout": 1}
    given = given_model(tmp_path / "w1", made.path / "model", work=tmp_path / "pointer")
    assert num_overlapping(given.path, ["heldout", "other"]) == {"heldout": 1, "other": 0}
    facts = read_facts(laptop_run(tmp_path / "w2" / "artifacts"))
    stages = [replace(stage, folder=given.path) if stage.name == "sft" else stage for stage in facts.stages]
    facts = replace(facts, stages=tuple(stages))
    assert [num_contaminated(facts, model, "heldout") for model in facts.models] == [0, 1, 1]


def test_matches_that_only_another_node_has_are_fetched_and_not_taken_for_none(tmp_path: Path) -> None:
    url = (tmp_path / "shared").as_uri()
    first = ObjectStore(tmp_path / "a" / "artifacts", url)
    made = trained(first)
    model = ObjectStore(tmp_path / "b" / "artifacts", url).find(made.kind, made.fingerprint)
    assert model is not None
    assert not (tmp_path / "b" / "artifacts" / "curate").exists()
    assert num_overlapping(model.path, ["heldout"]) == {"heldout": 1}


def test_matches_that_are_gone_are_not_known(tmp_path: Path) -> None:
    first = ObjectStore(tmp_path / "a" / "artifacts", (tmp_path / "shared").as_uri())
    made = trained(first)
    model = ObjectStore(tmp_path / "b" / "artifacts", (tmp_path / "shared").as_uri()).find(made.kind, made.fingerprint)
    assert model is not None
    first.set_aside("curate", "c1", why="test")  # the other node keeps its manifest
    assert num_overlapping(model.path, ["heldout"]) == {"heldout": None}
    made = trained(LocalStore(tmp_path / "c" / "artifacts"))
    shutil.rmtree(tmp_path / "c" / "artifacts" / "curate")
    assert num_overlapping(made.path, ["heldout"]) == {"heldout": None}
