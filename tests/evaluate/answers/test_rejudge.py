"""Stored answers judged again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stored_evaluations import RIGHT, SILENT, WRONG, evaluation, said, sample

from klear_core.config.verify import MathConfig, VerifyConfig
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers.layouts import foreign_answers
from klear_core.evaluate.answers.rejudge import CHANGES_FILE, check_folder, read_summary, rejudge
from klear_core.evaluate.answers.stored import evaluation_answers, rejudged_answers
from klear_core.types import Outcome, Verdict

ONE = VerifyConfig.model_validate({"runtime": {"math_workers": 1}})
BARE = "<think>\nsteps\n</think>\nThe answer is 2."


def test_every_changed_verdict_is_listed_and_the_scores_move_with_them(tmp_path: Path) -> None:
    samples = [sample(1, 0, said(1), RIGHT), sample(2, 0, BARE, RIGHT), sample(3, 0, said(4), WRONG)]
    source = evaluation_answers(evaluation(tmp_path, samples).path)
    strict = ONE.model_copy(update={"math": MathConfig(box="required")})
    summary = rejudge(source, strict, tmp_path / "again")
    (part,) = summary.benchmarks
    assert part.before.score is not None
    assert part.after.score is not None
    assert (part.before.score.value, part.after.score.value) == (pytest.approx(2 / 3), pytest.approx(1 / 3))
    assert part.changes == {"right to no answer": 1}
    (line,) = (tmp_path / "again" / CHANGES_FILE).read_text().splitlines()
    assert json.loads(line)["problem_id"] == f"{2:016x}"
    assert read_summary(tmp_path / "again") == summary


def test_answers_that_broke_the_judge_before_are_listed_as_wrong_now(tmp_path: Path) -> None:
    timed_out = Verdict(outcome=Outcome.TIMED_OUT, score=0.0, detail="not compared within 5 s of CPU time")
    samples = [sample(1, 0, said("9^{9^{9^9}}"), timed_out), sample(2, 0, said(2), RIGHT)]
    quick = ONE.model_copy(update={"math": MathConfig(cpu_s=0.5)})
    (part,) = rejudge(evaluation_answers(evaluation(tmp_path, samples).path), quick, tmp_path / "again").benchmarks
    assert part.changes == {"not judged to wrong": 1}
    assert part.before.score is not None
    assert part.after.score is not None
    assert (part.before.score.value, part.after.score.value) == (1.0, 0.5)


def test_both_judgements_can_be_read_again_with_texts_and_references(tmp_path: Path) -> None:
    samples = [sample(1, i, said(1), SILENT) for i in range(2)]
    source = evaluation_answers(evaluation(tmp_path, samples).path)
    rejudge(source, ONE, tmp_path / "again")
    before = list(rejudged_answers(tmp_path / "again", which="before").read())
    after = list(rejudged_answers(tmp_path / "again").read())
    assert before == list(source.read())
    assert [a.verdict and a.verdict.is_correct for a in after] == [True, True]  # type: ignore[union-attr]


def test_answers_to_prompt_templates_are_judged_again_apart_from_those_to_the_plain_questions(tmp_path: Path) -> None:
    plain = [sample(2, 0, said(2), RIGHT), sample(2, 1, said(3), WRONG)]
    terse = [sample(2, 0, BARE, RIGHT), sample(2, 1, said(2), WRONG)]
    source = evaluation_answers(evaluation(tmp_path, plain, worded={"terse": terse}).path)
    strict = ONE.model_copy(update={"math": MathConfig(box="required")})
    summary = rejudge(source, strict, tmp_path / "again")
    parts = {part.template: (part.before.num_answers, part.changes) for part in summary.benchmarks}
    assert parts == {"": (2, {}), "terse": (2, {"right to no answer": 1, "wrong to right": 1})}
    assert {(c.template, c.sample_idx) for c in summary.first_changes} == {("terse", 0), ("terse", 1)}
    again = rejudged_answers(tmp_path / "again", which="before")
    assert list(again.read()) == list(source.read())
    assert again.templates == source.templates == {"terse": "terse: {question}"}
    # the judge is given the question, not its wording
    assert {row.question for row in again.read()} == {"What is 2?"}


def test_answers_of_a_file_without_verdicts_get_some_and_nothing_changes(tmp_path: Path) -> None:
    row = {"id": "a", "response": said(7), "reference": {"kind": "math", "answers": ["7"]}}
    file = tmp_path / "mine.jsonl"
    file.write_text(json.dumps(row) + "\n{}\n")
    summary = rejudge(foreign_answers(file), ONE, tmp_path / "again")
    (part,) = summary.benchmarks
    assert (part.before.num_without_verdict, part.before.score, sum(part.changes.values())) == (1, None, 0)
    assert part.after.score is not None
    assert part.after.score.value == 1.0
    assert part.difference is None
    assert (summary.num_unread, len(summary.unread)) == (1, 1)


def test_a_folder_of_something_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    source = evaluation_answers(evaluation(tmp_path / "ws", [sample(1, 0, said(1), RIGHT)]).path)
    with pytest.raises(ConfigError, match="name a new folder"):
        rejudge(source, ONE, tmp_path)
    rejudge(source, ONE, tmp_path / "out")
    rejudge(source, ONE, tmp_path / "out")  # its own result may be replaced


def test_the_present_folder_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"--out \.: has no name of its own; name a new folder"):
        check_folder(Path())


def test_a_judge_of_ones_own_that_is_not_there_is_told_before_anything_is_judged(tmp_path: Path) -> None:
    source = evaluation_answers(evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)]).path)
    unbound = VerifyConfig.model_validate({"judges": [{"name": "mine", "function": "nowhere:judge"}]})
    with pytest.raises(ConfigError, match="name = 'mine', function = 'nowhere:judge': no Python file of module"):
        rejudge(source, unbound, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_without_one_answer_leaves_no_folder(tmp_path: Path) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"id": 1}\n')
    with pytest.raises(DataError, match="none of its 1 rows"):
        rejudge(foreign_answers(file, layout="rows"), ONE, tmp_path / "out")
    assert not list(tmp_path.glob("out*"))
