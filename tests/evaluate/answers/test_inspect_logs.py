"""Inspect's logs as archives: written, read, and read as Inspect writes them."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from stored_evaluations import RIGHT, SILENT, UNJUDGED, WRONG, evaluation, said, sample

from klear_core.errors import DataError
from klear_core.evaluate.answers.inspect_logs import write_logs
from klear_core.evaluate.answers.layouts import foreign_answers
from klear_core.evaluate.answers.stored import AnswerSource, Generation, evaluation_answers
from klear_core.types import CodeReference, StdinCase, StdinTests, UnverifiableReference


def read(source: AnswerSource) -> list[Generation]:
    return [row for row in source.read() if isinstance(row, Generation)]


def test_an_evaluation_s_answers_come_back_from_the_log_that_was_written_of_them(tmp_path: Path) -> None:
    verdicts = ((1, 0, RIGHT), (1, 1, WRONG), (2, 0, UNJUDGED), (2, 1, SILENT))
    samples = [sample(number, i, said(number), verdict) for number, i, verdict in verdicts]
    source = evaluation_answers(evaluation(tmp_path, samples).path)
    (log,) = write_logs(source, tmp_path / "logs")
    assert log.name == "toy_evaluate_rl.eval"
    again = foreign_answers(log)
    assert again.layout == "inspect"
    mine, theirs = read(source), read(again)
    assert [(a.question, a.response, a.num_tokens, a.finish_reason, a.reference) for a in theirs] == [
        (a.question, a.response, a.num_tokens, a.finish_reason, a.reference) for a in mine
    ]
    assert [a.verdict and a.verdict.score for a in theirs] == [1.0, 0.0, None, 0.0]
    with zipfile.ZipFile(log) as archive:
        header = json.loads(archive.read("header.json"))
    # Problem 1 has 1 of 2, problem 2 has 0 of 1: the answer that could not be judged is in no mean.
    assert header["results"]["scores"][0]["metrics"]["accuracy"]["value"] == 0.25
    assert (header["eval"]["dataset"]["samples"], header["eval"]["config"]["epochs"]) == (2, 2)
    num_tokens = sum(answer.num_tokens or 0 for answer in mine)
    assert header["stats"]["model_usage"]["klear/evaluate_rl"]["output_tokens"] == num_tokens > 0


def test_programs_in_our_own_logs_can_be_shown_and_not_judged_as_math(tmp_path: Path) -> None:
    """A log has no tests: its target says how many there are."""
    (row, *_) = read(evaluation_answers(evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)]).path))
    tests = StdinTests(cases=(StdinCase(input="1", output="2"),))
    rows = [replace(row, reference=CodeReference(tests=tests))]
    source = AnswerSource(name="code", origin="here", layout="klear", verify=None, read=lambda: iter(rows))
    (log,) = write_logs(source, tmp_path / "logs")
    (answer,) = read(foreign_answers(log))
    assert isinstance(answer.reference, UnverifiableReference)
    assert (answer.response, answer.verdict and answer.verdict.score) == (row.response, 1.0)


def zstandard(text: str) -> bytes:
    """The text as one frame."""
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(text.encode())
    return sink.getvalue().to_pybytes()


def test_members_that_zstandard_compresses_are_read_with_any_python(tmp_path: Path) -> None:
    """Inspect compresses so; the archive is made by hand, because zipfile writes it only from Python 3.14 on."""
    choice = {"message": {"role": "assistant", "content": "2"}, "stop_reason": "stop"}
    row = {"id": "a", "epoch": 1, "input": "1+1?", "target": "2", "output": {"choices": [choice]}, "scores": {}}
    members = {"header.json": {"eval": {"task": "toy", "model": "m"}}, "samples/a_epoch_1.json": row}
    path, method = tmp_path / "x.eval", (93).to_bytes(2, "little")
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            archive.writestr(name, zstandard(json.dumps(value)))
    raw = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):  # local headers, and the directory
        start = raw.find(mark)
        while start >= 0:
            raw[start + offset : start + offset + 2] = method
            start = raw.find(mark, start + 4)
    path.write_bytes(raw)
    (answer,) = read(foreign_answers(path))
    assert (answer.question, answer.response) == ("1+1?", "2")


def test_an_archive_without_a_header_is_a_log_that_still_runs(tmp_path: Path) -> None:
    path = tmp_path / "x.eval"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("_journal/start.json", "{}")
    with pytest.raises(DataError, match=r"no header\.json in it"):
        foreign_answers(path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read as a log of Inspect"):
        foreign_answers(path)
