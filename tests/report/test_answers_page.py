"""The answer viewer's files."""

from __future__ import annotations

import json
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from stored_evaluations import RIGHT, SILENT, WRONG, evaluation, said, sample

from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.stored import AnswerSource, Generation, evaluation_answers
from klear_core.report.answers import DATA_FOLDER, write_viewer
from klear_core.scores import percent
from klear_core.types import MathReference


def calls(folder: Path, pattern: str) -> Iterator[tuple[str, object]]:
    """The data that each script of the viewer hands over, as a browser would get it."""
    for file in sorted((folder / DATA_FOLDER).glob(pattern)):
        match = re.fullmatch(r"klear(?:Index|Chunk)\((?:\d+,)?(.*)\);\n", file.read_text("ascii"), re.DOTALL)
        assert match, file
        yield file.name, json.loads(match[1])


def index_of(folder: Path) -> dict:
    ((_, index),) = calls(folder, "index.js")
    return index  # type: ignore[return-value]


def texts_of(folder: Path) -> list[str]:
    texts: list[str] = []
    for _, chunk in calls(folder, "0*.js"):
        for text, _detail in chunk["texts"]:  # type: ignore[index]
            texts.append(texts[-1] if text is None else text)
    return texts


def test_every_answer_is_in_a_chunk_in_the_order_of_the_index(tmp_path: Path) -> None:
    before = [sample(1, 0, said(1), RIGHT), sample(2, 0, "cut", SILENT, finish="length")]
    after = [sample(2, 0, said(2), RIGHT), sample(1, 0, "x</script>\u2028", WRONG)]
    sources = [
        evaluation_answers(evaluation(tmp_path / "a", before).path, name="A"),
        evaluation_answers(evaluation(tmp_path / "b", after).path, name="B"),
    ]
    viewer = write_viewer(sources, tmp_path / "out", title="two")
    index = index_of(tmp_path / "out")
    assert (viewer.num_answers, viewer.num_problems) == (4, 2)
    assert index["mark"] == "RWNR"  # problem 1 of A and B, then problem 2
    assert index["cut"] == "0010"
    assert index["source"] == [0, 1, 0, 1]
    assert index["starts"] == [0, 2]
    assert texts_of(tmp_path / "out") == [said(1), "x</script>\u2028", "cut", said(2)]
    page = viewer.page.read_text()
    assert "What is" not in page  # no text of a problem or answer, whatever its length
    assert 'src="answers-data/viewer.js"' in page


def test_one_text_under_two_judgements_is_stored_once(tmp_path: Path) -> None:
    text = said(1) + "long " * 100
    source = evaluation_answers(evaluation(tmp_path / "a", [sample(1, 0, text, RIGHT)]).path)
    write_viewer([source, source], tmp_path / "out", is_one_text=True)
    ((_, chunk),) = calls(tmp_path / "out", "0*.js")
    assert [text for text, _ in chunk["texts"]] == [text, None]  # type: ignore[index]


def test_answers_to_prompt_templates_follow_those_to_the_plain_question(tmp_path: Path) -> None:
    plain = [sample(1, i, said(1), RIGHT) for i in range(2)]
    terse = [sample(1, i, said(2), WRONG) for i in range(2)]
    worded = evaluation_answers(evaluation(tmp_path / "a", plain, worded={"terse": terse}).path, name="A")
    without = evaluation_answers(evaluation(tmp_path / "b", plain).path, name="B")
    write_viewer([worded, without], tmp_path / "out")
    index = index_of(tmp_path / "out")
    assert index["templates"] == ["plain", "terse"]
    assert (index["mark"], index["template"]) == ("RRRRWW", [0, 0, 0, 0, 1, 1])
    assert [source["templates"] for source in index["sources"]] == [{"terse": "terse: {question}"}, {}]
    assert [(row[1], row[2], row[5]) for row in index["shares"]] == [
        ("A", "sampled", percent(1.0)),
        ("A", "sampled, template terse", percent(0.0)),
        ("B", "sampled", percent(1.0)),
    ]
    write_viewer([without], tmp_path / "plain")
    assert (index_of(tmp_path / "plain")["templates"], index_of(tmp_path / "plain")["template"]) == (["plain"], [])


def many(num: int, size: int) -> Iterator[Generation]:
    for i in range(num):
        yield Generation(
            benchmark="big",
            problem_id=f"{i % 50}",
            question=f"question {i % 50}",
            reference=MathReference(answers=("1",)),
            decoding="sampled",
            sample_idx=i // 50,
            response=f"{i} ".ljust(size, "x"),
            num_tokens=size,
            finish_reason="stop",
            verdict=RIGHT if i % 3 else WRONG,
        )


def test_memory_does_not_grow_with_the_texts(tmp_path: Path) -> None:
    num, size = 1500, 20_000
    source = AnswerSource(name="big", origin="here", layout="klear", verify=None, read=lambda: many(num, size))
    tracemalloc.start()
    write_viewer([source], tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 0.2 * num * size
    index = index_of(tmp_path)
    files = list((tmp_path / DATA_FOLDER).glob("0*.js"))
    assert len(files) == len(index["chunkStarts"]) > 50
    assert max(file.stat().st_size for file in files) < 500_000
    # rows came sample by sample, and stand problem by problem
    assert index["starts"] == list(range(0, num, num // 50))


def test_a_page_without_answers_or_over_other_files_is_refused(tmp_path: Path) -> None:
    empty = AnswerSource(name="e", origin="here", layout="rows", verify=None, read=lambda: iter(()))
    with pytest.raises(DataError, match="no answer"):
        write_viewer([empty], tmp_path / "out")
    (tmp_path / DATA_FOLDER).mkdir()
    with pytest.raises(ConfigError, match="was not written by"):
        write_viewer([empty], tmp_path)
