"""The sources of a published model: what it was trained on, and what was only kept out of its data."""

from __future__ import annotations

import json
from pathlib import Path

from manifests import manifest

from klear_core.artifacts.manifest import GivenRecord
from klear_core.report.cards import CardFacts, model_card
from klear_core.report.run.lineage import Ancestor, data_sources

COMMIT = "0123456" + "0" * 33


def hub(repo: str) -> dict[str, str]:
    return {"kind": "hub", "repo": repo, "revision": COMMIT}


def ancestor(kind: str, config: dict[str, object], given: str = "", stage: str = "") -> Ancestor:
    record = GivenRecord(origin=given, licence="mit", files=()) if given else None
    return Ancestor(folder=Path(kind), manifest=manifest(kind=kind, config=config, given=record, stage=stage or kind))


BENCHMARKS = ancestor("benchmarks", {"sources": {"math500": hub("math/test")}})
MODEL = ancestor("sft", {})


def test_benchmarks_are_kept_out_and_no_training_data_of_the_card(tmp_path: Path) -> None:
    lineage = [BENCHMARKS, ancestor("curate", {"curate": {"sources": [hub("math/train")]}}), MODEL]
    sources = data_sources(lineage)
    assert [(source.what, source.name) for source in sources] == [
        ("benchmark questions, kept out", "math/test@0123456 (Hub)"),
        ("problems", "math/train@0123456 (Hub)"),
    ]
    card = model_card(
        CardFacts(
            name="mine",
            licence="",
            lineage=lineage,
            sources=sources,
            counts={},
            decoding={},
            warnings=(),
            has_adapter=False,
            has_profile=False,
            gguf_file="",
        )
    )
    assert f"datasets: {json.dumps(['math/train'])}" in card.splitlines()


def test_given_rows_are_training_data_and_show_no_folder_of_this_machine() -> None:
    rows = [hub("team/traces"), {"kind": "file", "path": "/home/me/secret/more.jsonl"}]
    given = ancestor("given_traces", {"runtime": {"sources": rows}}, "team/traces@0123456, /home/me/secret", "distill")
    (source,) = data_sources([given, MODEL])
    assert (source.what, source.name) == ("traces", "team/traces@0123456 (Hub), more.jsonl")
    assert (source.licence, source.datasets) == ("mit", ("team/traces",))


def test_a_given_model_is_called_by_its_stage_and_is_no_data_set() -> None:
    given = ancestor("given_model", {"runtime": hub("team/model")}, "team/model@0123456", "teacher")
    (source,) = data_sources([given, MODEL])
    assert (source.what, source.name, source.datasets) == ("teacher", "team/model@0123456", ())
    for config in ({"runtime": {"path": "/home/me/runs/b/model"}}, {"model": {"path": "/home/me/runs/b/model"}}):
        (source,) = data_sources([ancestor("given_model", config, "/home/me/runs/b/model"), MODEL])
        assert source.name == "b/model"
