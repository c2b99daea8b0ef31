"""Look up the questions of OpenCodeReasoning, whose rows name a data set, a split and a row instead of the question."""

from __future__ import annotations

from collections.abc import Mapping

from klear_core.config.data import FileSource, QuestionSet
from klear_core.data.code_schemas import CODE_SCHEMAS
from klear_core.data.datafiles import DataFile, NoSuchSplitError, data_files
from klear_core.data.fields import Fields, RowError, Schema, text_at, value_at
from klear_core.data.rowfiles import BrokenRow, read_rows

ELSEWHERE = "-"
"""Value in place of a question whose licence forbids a copy."""

_QUESTION_KEYS = ("input", "question")
"""Columns of the question in the first and the second release."""
_FORMATS = {"taco": "apps", "apps": "apps", "code_contests": "code_contests", "open-r1/codeforces": "codeforces"}
"""Row formats of the data sets."""
_COLUMNS = frozenset(["question", "starter_code", "description", "input_format", "output_format", "examples", "note"])
"""Columns from which the questions of these formats are made. Columns of tests, which take gigabytes, are not read."""
_MOST_DIGITS = 18
"""Digits of the number of a row, at most."""
_STAND_IN = "a question that is looked up later"


class QuestionTables:
    """The questions of the data sets that a source's `lookup` names; a split is read when a row first refers to it.

    They are worded as if their data set were a source itself, so that the same problem from both is an exact copy.
    """

    def __init__(self, paths: Mapping[QuestionSet, str]) -> None:
        self._paths = dict[str, str](paths.items())
        self._questions: dict[tuple[str, str], list[str]] = {}
        self._missing: dict[tuple[str, str], str] = {}
        """Splits that the data sets lack, and why they are not found."""

    def completed(self, fields: Fields) -> Fields:
        """Return the row with its question, if `lookup` has its data set. Raise RowError if the question is missing."""
        key = self._key_to_fill(fields)
        return {**fields, key: self._question_of(fields)} if key else fields

    def checked(self, fields: Fields) -> Fields:
        """Return the row with a stand-in for its question, after a check that the files which hold it exist."""
        key = self._key_to_fill(fields)
        if not key:
            return fields
        self._files_of(*_place(fields))
        return {**fields, key: _STAND_IN}

    def _key_to_fill(self, fields: Fields) -> str:
        if str(fields.get("dataset")) not in self._paths:
            return ""
        return next((key for key in _QUESTION_KEYS if fields.get(key) == ELSEWHERE), "")

    def _question_of(self, fields: Fields) -> str:
        place, index = _place(fields), _index(fields)
        if place not in self._questions:
            self._questions[place] = self._read(*place)
        questions = self._questions[place]
        where = f"split {place[1]!r} of {place[0]} in {self._paths[place[0]]}"
        if index >= len(questions):
            raise RowError("question_not_found", "index", f"{index}, but {where} has {len(questions)} rows")
        if not questions[index]:
            raise RowError("question_not_found", "index", f"row {index} of {where} has no question")
        return questions[index]

    def _read(self, name: str, split: str) -> list[str]:
        """Return the questions by row, from 0; empty where a row has none or cannot be read."""
        schema = next(schema for schema in CODE_SCHEMAS if schema.name == _FORMATS[name])
        questions: list[str] = []
        for file in self._files_of(name, split):
            for row in read_rows(file.path, label=file.label, columns=_COLUMNS):
                questions.append("" if isinstance(row, BrokenRow) else _question_in(row.fields, schema))
        return questions

    def _files_of(self, name: str, split: str) -> list[DataFile]:
        """Return the files of a split. Raise RowError if the data set has none."""
        place = name, split
        if place not in self._missing:
            try:
                return data_files(FileSource(path=self._paths[name], split=split))
            except NoSuchSplitError as e:
                self._missing[place] = str(e)
        raise RowError("question_not_found", "split", self._missing[place])


def _place(fields: Fields) -> tuple[str, str]:
    return text_at(fields, "dataset"), text_at(fields, "split")


def _index(fields: Fields) -> int:
    """Return the number of the row in its split, from 0; it is published as text."""
    index = str(value_at(fields, "index"))
    if not index.isdecimal() or len(index) > _MOST_DIGITS:
        raise RowError("wrong_type", "index", f"expected the number of a row, found {index[:60]!r}")
    return int(index)


def _question_in(fields: Fields, schema: Schema) -> str:
    try:
        return schema.question(fields)
    except RowError:
        return ""
