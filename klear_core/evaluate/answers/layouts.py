"""Read files of answers that other programs wrote: one reader for each layout, chosen by the keys of the first row.

| layout | rows |
|---|---|
| `klear` | Klear-Reasoner's published generations: `messages` that end with the assistant's, `meta` or `answer` |
| `lm-eval` | `samples_*.jsonl` of lm-evaluation-harness: `doc`, `target`, `resps` |
| `lighteval` | details in Parquet: `doc` and `model_response`, or `predictions` and `gold` (before version 0.11) |
| `matharena` | outputs by answer (`problem`, `gold_answer`, `answer`), or a file per problem (`messages`) |
| `qwen-math` | Qwen2.5-Math's harness, also SimpleRL's and SkyThought's: `question`, `answer`, `code`, `score` |
| `evalchemy` | `results_*.json` whose `results` have `examples` with `model_outputs` |
| `livecodebench` | `Scenario.codegeneration_*.json`: `output_list`, `code_list`, `graded_list`; without tests |
| `nemo-skills` | `output*.jsonl`: `generation`, `expected_answer`; the files of a folder are samples of one benchmark |
| `inspect` | Inspect's logs, `.eval` or in JSON: `eval`, `samples` |
| `rows` | `id`, `response` and `reference`, as `klear judge` reads them |

Any other file is read by the places of its values (`mapped_rows`). A row that does not fit is returned as `UnreadRow`,
and counted.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from klear_core.config.benchmark_prompts import MATH_PROMPTS, QUESTION
from klear_core.data.formats.code_rows import without_wrapping
from klear_core.data.formats.detect import value_at_place
from klear_core.data.formats.fields import Fields, RowError, best_fit
from klear_core.data.formats.references import has_half_character
from klear_core.data.readers import SUFFIXES, BrokenRow, FileRow, is_array, read_rows, stem_of, whole_text
from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.answers import inspect_logs
from klear_core.evaluate.answers.layout_rows import READERS, SIGNATURES, AnswerRow, Layout
from klear_core.evaluate.answers.mapped_rows import AnswerPlaces, mapped_row, suggested_option
from klear_core.evaluate.answers.stored import AnswerSource, Generation, UnreadRow
from klear_core.types import Outcome, Verdict, domain_of, problem_id_of

LAYOUTS: tuple[Layout, ...] = get_args(Layout)
_READERS = READERS | {"inspect": inspect_logs.sample_row}

_JSON = (".json", ".json.gz", ".json.zst")
_DATE = re.compile(r"_\d{4}-\d{2}-\d{2}T[\d.:-]+$")
"""End of a file's name that says when it was written."""
_SCORES = re.compile(r"results_.*\.json")
"""Name of the file of scores that lm-evaluation-harness and lighteval write beside the answers, evalchemy with them."""
_GRADED = "_eval_all.json"
"""End of the name of LiveCodeBench's file of answers with verdicts."""
_NEMO_PART = re.compile(r"output(?:-rs\d+|-greedy)?(?:_chunk_\d+)?")
"""Name of a file with some of the answers of NeMo-Skills: by seed and chunk."""


def foreign_answers(
    path: Path, *, layout: Layout | None = None, places: AnswerPlaces | None = None, name: str = ""
) -> AnswerSource:
    """Return the answers in a file, or in all data files of a folder; with `places`, those at these places of any rows.

    Raise ConfigError if there is none or a name is not UTF-8, DataError if a file has no row, its layout is not known,
    or files differ in it.
    """
    files = _files_in(path)
    _check_names(files)
    found: Layout | Literal["mapped"]
    if places is None:
        found = _common_layout(files, layout)
        read, rows_at = _READERS[found], ""
    else:
        found, read, rows_at = "mapped", partial(mapped_row, places=places), places.rows
    names = _benchmark_names(files, path, found)
    return AnswerSource(
        name=name or stem_of(path),
        origin=str(path),
        layout=found,
        verify=None,
        read=lambda: _generations(names, found, read, rows_at),
    )


def _files_in(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = {f for f in path.rglob("*") if f.is_file() and f.name.endswith((*SUFFIXES, inspect_logs.SUFFIX))}
    # LiveCodeBench's runner writes its answers twice: alone, and again with their verdicts.
    graded = [f for f in found if f.name.endswith(_GRADED)]
    again = {f.with_name(f.name.removesuffix(_GRADED) + end) for f in graded for end in (".json", "_eval.json")}
    files = sorted(f for f in found - again if not _SCORES.fullmatch(f.name) or _holds_answers(f))
    if not files:
        raise ConfigError(f"{path}: no such file, or a folder without data files ({', '.join(SUFFIXES)}, .eval)")
    return files


def _holds_answers(scores: Path) -> bool:
    """Return whether a file of scores has the answers in it, too, as evalchemy's; not, if it is damaged."""
    first = next(_rows(scores), None)
    return isinstance(first, FileRow) and "example" in first.fields


def _check_names(files: Sequence[Path]) -> None:
    """Raise ConfigError for a name that is not text: it stands on the page and in the record of what was judged."""
    for file in files:
        try:
            str(file).encode()
        except UnicodeEncodeError as e:
            raise ConfigError(f"{str(file)!a}: the name is not UTF-8; rename the file, or link to it") from e


def _common_layout(files: Sequence[Path], wanted: Layout | None) -> Layout:
    layouts = {file: _layout_of(file, wanted) for file in files}
    first = files[0]
    for file, layout in layouts.items():
        if layout != layouts[first]:
            raise DataError(
                f"{file}: has the layout {layout}, but {first} has {layouts[first]}; give one of them at a time"
            )
    return layouts[first]


def _layout_of(file: Path, wanted: Layout | None) -> Layout:
    """Return the layout of a file's first row that can be read; of such a file it is `wanted`, if that is given."""
    broken = ""
    for row in _rows(file):
        if isinstance(row, BrokenRow):
            broken = broken or f"; the first, {row.where}: {row.reason}: {row.detail}"
            continue
        found = wanted or best_fit(row.fields, SIGNATURES, where=str(file), remedy="choose one with --layout")
        if found is not None:
            return found
        if _SCORES.fullmatch(file.name) and isinstance(row.fields.get("results"), Mapping):
            raise DataError(f"{file}: holds scores and no answers; name the files of samples or details beside it")
        raise DataError(
            f"{file}: a row with the keys {sorted(row.fields)[:12]} fits none of the layouts {', '.join(LAYOUTS)}. "
            f"Choose one with --layout, or say where the values are: {suggested_option(row.fields)}"
        )
    raise DataError(f"{file}: has no row that can be read{broken}")


def _benchmark_names(files: Sequence[Path], root: Path, layout: Layout | Literal["mapped"]) -> dict[Path, str]:
    """Return the name of each file's benchmark.

    Files of one benchmark are runs of several models, or of one at several times: their names have the folder, or the
    rest of the file's name, too. But MathArena has a file for each problem of a benchmark, NeMo-Skills for each seed.
    """
    names = {file: _benchmark_name(file, root, layout) for file in files}
    if layout in ("matharena", "nemo-skills"):
        return names
    files_of = Counter(names.values())
    folders_of = Counter((names[file], file.parent) for file in files)
    distinct = {}
    for file, name in names.items():
        is_alone_here = folders_of[name, file.parent] == 1
        place = file.parent if is_alone_here else file.with_name(stem_of(file))
        distinct[file] = name if files_of[name] == 1 else f"{name}, {place.relative_to(root)}"
    return distinct


def _benchmark_name(file: Path, root: Path, layout: Layout | Literal["mapped"]) -> str:
    """Return the task that a file's name states: `samples_gsm8k_2026-01-31T10-00-00.0.jsonl` is `gsm8k`."""
    stem = _DATE.sub("", stem_of(file))
    match layout:
        case "lm-eval":
            return stem.removeprefix("samples_")
        case "lighteval":
            return stem.removeprefix("details_")
        case "evalchemy" | "inspect":
            return ""  # their rows say it
        case "matharena" | "nemo-skills" if stem.isdecimal() or _NEMO_PART.fullmatch(stem):  # a part of a benchmark
            is_below = root in file.parent.parents
            return str(file.parent.relative_to(root)) if is_below else file.parent.name
        case _:
            return stem


def _rows(file: Path, rows_at: str = "") -> Iterator[FileRow | BrokenRow]:
    """Yield the rows of a file; a `.json` file that is one object is one row, compressed or not, or holds a list.

    The list is at `rows_at`, or where evalchemy and Inspect have it.
    """
    if file.name.endswith(inspect_logs.SUFFIX):
        yield from (FileRow(where=f"{file}:{place}", fields=row) for place, row in inspect_logs.samples_of(file))
        return
    if file.name.endswith(_JSON) and not is_array(file):
        try:
            value = json.loads(whole_text(file))
        except (ValueError, RecursionError, OSError):
            value = None  # several objects: lines of JSON under another suffix; or damaged, which `read_rows` reports
        if isinstance(value, dict):
            listed = _listed_at(value, rows_at) if rows_at else list(_listed(value)) or [("", value)]
            for place, fields in listed:
                yield FileRow(where=f"{file}:{place}" if place else str(file), fields=fields)
            return
    yield from read_rows(file)


def _listed_at(value: Mapping[str, object], place: str) -> list[tuple[str, dict[str, object]]]:
    try:
        rows = value_at_place(value, place)
    except RowError as e:
        raise DataError(f"--fields rows={place}: {e}") from e
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise DataError(f"--fields rows={place}: is not a list of objects")
    return [(f"{place}.{i}", row) for i, row in enumerate(rows)]


def _listed(value: Mapping[str, object]) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield place and row of what evalchemy's file of scores and Inspect's log hold in lists; nothing for others."""
    results, samples = value.get("results"), value.get("samples")
    for task, result in results.items() if isinstance(results, Mapping) else ():
        examples = result.get("examples") if isinstance(result, Mapping) else None
        for i, example in enumerate(examples if isinstance(examples, list) else []):
            if isinstance(example, Mapping) and {"model_outputs", "model_output"} & example.keys():
                yield f"results.{task}.examples.{i}", {"task": task, "example": example}
    if isinstance(samples, list) and isinstance(value.get("eval"), Mapping):
        for i, sample in enumerate(samples):
            yield f"samples.{i}", {"eval": value["eval"], "sample": sample}


@dataclass(slots=True)
class _Seen:
    """Content of earlier rows; a row that repeats or contradicts one is not read."""

    num_answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By benchmark and problem."""
    rows: dict[tuple[str, ...], str] = field(default_factory=dict)
    """Places of named rows, by benchmark, question and name."""
    namesakes: dict[tuple[str, str], str] = field(default_factory=dict)
    """The file's name for the first problem with a question, by benchmark and question."""
    references: dict[tuple[str, str], tuple[bytes, str]] = field(default_factory=dict)
    """Digest of each problem's reference, and the place that states it; tests of programs may be large."""

    def problem_of(self, row: AnswerRow, benchmark: str, where: str) -> str:
        """Return the id of the row's problem. Raise DataError if the row repeats or contradicts an earlier one."""
        question_id = problem_id_of(row.question, domain_of(row.reference)) if row.question else row.problem
        problem_id = question_id
        if not question_id:
            raise DataError("has neither a question nor an id")
        if row.row:
            earlier = self.rows.setdefault((benchmark, question_id, row.row), where)
            if earlier != where:
                raise DataError(f"{row.row} is in {earlier} already")
            # one question may be asked twice, with other choices or in another task: these are two problems
            if self.namesakes.setdefault((benchmark, question_id), row.problem) != row.problem:
                problem_id = f"{question_id}-{row.problem}"
        digest = hashlib.blake2b(repr(row.reference).encode("utf-8", "replace"), digest_size=16).digest()
        known, earlier = self.references.setdefault((benchmark, problem_id), (digest, where))
        if known != digest:
            raise DataError(f"has another reference than {earlier}, which has the same problem {problem_id}")
        return problem_id


def _generations(
    names: Mapping[Path, str],
    layout: Layout | Literal["mapped"],
    read: Callable[[Fields], AnswerRow],
    rows_at: str,
) -> Iterator[Generation | UnreadRow]:
    """Yield the answers of all files. Answers to one problem that come in several rows are numbered in their order."""
    seen = _Seen()
    for file, benchmark in names.items():
        first_filter: object = None
        for raw in _rows(file, rows_at):
            if isinstance(raw, BrokenRow):
                yield UnreadRow(where=raw.where, reason=f"{raw.reason}: {raw.detail}")
                continue
            if layout == "lm-eval" and "filter" in raw.fields:
                # the harness repeats each answer for every filter that it scored
                first_filter = first_filter or raw.fields["filter"]
                if raw.fields["filter"] != first_filter:
                    continue
            try:
                row = read(raw.fields)
                row = replace(row, question=bare_question(row.question))
                _require_whole_characters(row)
                of = f"{row.benchmark}{benchmark}" + (f", {row.model}" if row.model else "")
                problem_id = seen.problem_of(row, of, raw.where)
            except (RowError, DataError) as e:
                yield UnreadRow(where=raw.where, reason=str(e))
                continue
            yield from _numbered(row, of, problem_id, seen)


def bare_question(prompt: str) -> str:
    """Return the question of a prompt without the instructions of a known harness or source; unchanged if it has none.

    By it a problem is the same one in every program's files, and in our own evaluations.
    """
    for pattern in _PROMPTS:
        if found := pattern.fullmatch(prompt.strip()):
            prompt = found[1]
            break
    return without_wrapping(prompt) or prompt


def _prompt_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern of the prompts that a template makes; one that is filled as Python's formats loses braces."""
    before, after = map(_any_braces, template.split(QUESTION))
    return re.compile(rf"{before}\s*(.+?)\s*{after}", re.DOTALL)


def _any_braces(text: str) -> str:
    """Return a pattern of a text with any white space between its words and any number of each brace."""
    pattern = r"\s+".join(re.escape(word) for word in text.split())
    return re.sub(r"(?:\\{)+|(?:\\})+", lambda braces: f"{braces[0][:2]}+", pattern)


_PROMPTS = tuple(
    _prompt_pattern(template)
    for template in (
        *MATH_PROMPTS.values(),
        "Question: {question} Answer:",  # lm-evaluation-harness: GSM8K, AIME; lighteval: GSM8K
        "Problem: {question} Answer:",  # lm-evaluation-harness: MATH
        "Problem: {question} Mark your solution with \\boxed Answer:",  # evalchemy
    )[::-1]  # the longest of those with one opening first
)


def _require_whole_characters(row: AnswerRow) -> None:
    """Raise DataError if a text has half of a surrogate pair, which texts inside of a row's texts can escape."""
    texts = (row.question, *(answer.text for answer in row.answers))
    try:
        "".join(texts).encode()
    except UnicodeEncodeError as e:
        raise DataError(f"has half a character: {e}") from e
    if has_half_character(row.reference):
        raise DataError("its reference has half a character")


def _numbered(row: AnswerRow, benchmark: str, problem_id: str, seen: _Seen) -> Iterator[Generation]:
    for answer in row.answers:
        index = seen.num_answers[benchmark, problem_id]
        seen.num_answers[benchmark, problem_id] += 1
        verdict = None
        if answer.score is not None:
            verdict = Verdict(outcome=Outcome.SCORED, score=answer.score, detail="stated by the file")
        yield Generation(
            benchmark=benchmark,
            problem_id=problem_id,
            question=row.question,
            reference=row.reference,
            decoding="sampled",
            sample_idx=index,
            response=answer.text,
            num_tokens=answer.num_tokens,
            finish_reason=answer.finish_reason,
            verdict=verdict,
        )
