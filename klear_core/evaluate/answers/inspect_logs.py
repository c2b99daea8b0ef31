"""Read and write the logs of Inspect (`.eval`), which its viewer shows: zip archives of JSON, a member a sample."""

from __future__ import annotations

import json
import struct
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean

from klear_core.data.formats.fields import Fields, RowError, text_at, user_message, value_at
from klear_core.errors import DataError
from klear_core.evaluate.answers.layout_rows import (
    PROGRAM_KEYS,
    AnswerRow,
    StatedAnswer,
    count_in,
    first_text,
    math_reference,
    programming_task,
    row_name,
    score_in,
)
from klear_core.evaluate.answers.stored import AnswerSource, Generation, UnreadRow
from klear_core.types import (
    CodeReference,
    CustomReference,
    Domain,
    FinishReason,
    MathReference,
    Reference,
    UnverifiableReference,
    domain_of,
)

SUFFIX = ".eval"
_ZSTANDARD = 93
"""How Inspect compresses, which Python's zipfile reads from 3.14 on."""
_LOCAL_HEADER = struct.Struct("<26xHH")
"""The end of a member's local header: the lengths of its name and of what follows it."""
_SCORER = "klear"
_OTHER_REFERENCE = "klear_domain"
"""Key in the metadata of our own logs: the domain of a problem whose reference is not of math."""
_GRADES = {"C": 1.0, "I": 0.0}
_ENDS: Mapping[str, FinishReason] = {"stop": "stop", "max_tokens": "length", "model_length": "length"}
_SHOWN_CHARS = 500
"""Characters of a question in the list of samples, for which the viewer loads no sample."""


def samples_of(log: Path) -> Iterator[tuple[str, dict[str, object]]]:
    """Yield place and row of each sample in a log, beside the log's `eval`, as `sample_row` reads it.

    Raise DataError for a file that is no finished log.
    """
    try:
        with zipfile.ZipFile(log) as archive:
            names = set(archive.namelist())
            if "header.json" not in names:
                raise DataError(f"{log}: no header.json in it, so that this is no log of Inspect, or one that runs")
            header = json.loads(_member(archive, log, "header.json"))["eval"]
            for name in sorted(name for name in names if name.startswith("samples/")):
                yield name, {"eval": header, "sample": json.loads(_member(archive, log, name))}
    except DataError:
        raise
    except (zipfile.BadZipFile, KeyError, TypeError, ValueError, OSError) as e:
        raise DataError(f"{log}: cannot be read as a log of Inspect: {e}") from e


def sample_row(fields: Fields) -> AnswerRow:
    """Read a sample of Inspect's log; each stands beside the log's `eval`; see `samples_of`."""
    header, sample = value_at(fields, "eval"), value_at(fields, "sample")
    if not isinstance(sample, Mapping) or not isinstance(header, Mapping):
        raise RowError("wrong_type", "sample", "a sample and `eval` must be objects")
    output = sample.get("output")
    choices = output.get("choices") if isinstance(output, Mapping) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(output, Mapping) or not isinstance(choice, Mapping):
        raise RowError("no_answer", "output.choices", "holds no answer: the sample failed, or was not reached")
    usage = output.get("usage")
    scores = sample.get("scores")
    stated = [*scores.values()] if isinstance(scores, Mapping) else []
    # Of several scorers none is the verdict.
    value = stated[0].get("value") if len(stated) == 1 and isinstance(stated[0], Mapping) else None
    text = _text_of(value_at(choice, "message", "content"))
    num_tokens = count_in(usage.get("output_tokens")) if isinstance(usage, Mapping) else None
    score = _GRADES.get(value) if isinstance(value, str) else score_in(value)
    answer = StatedAnswer(
        text=text,
        num_tokens=num_tokens,
        score=score,
        finish_reason=_ENDS.get(str(choice.get("stop_reason"))),
    )
    name = first_text(sample, "id")
    return AnswerRow(
        question=user_message(sample, "input") if isinstance(sample.get("input"), list) else text_at(sample, "input"),
        reference=_reference_in(sample),
        answers=(answer,),
        problem=name,
        row=row_name("sample", name) and f"sample {name}, epoch {first_text(sample, 'epoch')}",
        model=first_text(header, "model"),
        benchmark=first_text(header, "task"),
    )


def _reference_in(sample: Fields) -> Reference:
    """Return the target, or the tests in the metadata: of a program the target is its solution, or what tests it.

    Our own logs of other references than of math have only a description of them.
    """
    target, metadata = value_at(sample, "target"), sample.get("metadata")
    known = metadata if isinstance(metadata, Mapping) else {}
    if _OTHER_REFERENCE in known:
        return UnverifiableReference(domain=Domain(str(known[_OTHER_REFERENCE])), why="Klear's logs have no tests")
    if PROGRAM_KEYS & known.keys():
        return programming_task({"canonical_solution": target, **known})[1]
    return math_reference(target, "target")


def _text_of(content: object) -> str:
    """Return an answer of one text, or of parts; reasoning that came apart from it stands in think tags before it."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("no_answer", "output.choices.0.message.content", "holds no text")
    parts = [part for part in content if isinstance(part, Mapping)]  # none: the model answered nothing
    thoughts = [str(part["reasoning"]) for part in parts if part.get("type") == "reasoning" and part.get("reasoning")]
    texts = [str(part["text"]) for part in parts if part.get("type") == "text" and part.get("text")]
    thought = "\n\n".join(thoughts)
    return (f"<think>\n{thought}\n</think>\n\n" if thought else "") + "\n\n".join(texts)


def _member(archive: zipfile.ZipFile, log: Path, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.compress_type != _ZSTANDARD:
        return archive.read(name)
    import pyarrow as pa

    with log.open("rb") as file:
        file.seek(info.header_offset)
        file.seek(sum(_LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))), 1)
        packed = file.read(info.compress_size)
    return bytes(pa.CompressedInputStream(pa.BufferReader(packed), "zstd").read())


def write_logs(source: AnswerSource, folder: Path) -> list[Path]:
    """Write a log for each benchmark, template and decoding of a source; return their paths.

    Raise DataError if a row of the source cannot be read, because a log would lack it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs: dict[str, _Log] = {}
    with ExitStack() as opened:  # closes what is open if a row cannot be read; only finished logs get their name
        for row in source.read():
            if isinstance(row, UnreadRow):
                raise DataError(f"{row.where}: {row.reason}")
            task = "-".join(filter(None, (row.benchmark, row.template, "" if row.decoding == "sampled" else "greedy")))
            if task not in logs:
                path = folder / f"{task}_{source.name}{SUFFIX}".replace("/", "_")
                logs[task] = _Log(task, source, path)
                opened.enter_context(logs[task].archive)
            logs[task].add(row)
        return [log.finish() for log in logs.values()]


class _Log:
    """A log that is being written, sample by sample."""

    def __init__(self, task: str, source: AnswerSource, path: Path) -> None:
        self._task, self._source, self._path = task, source, path
        self._temporary = path.with_name(path.name + ".tmp")
        self._summaries: list[dict[str, object]] = []
        self._scores: dict[str, list[float]] = defaultdict(list)
        self._num_tokens = 0
        self.archive = zipfile.ZipFile(self._temporary, "w", compression=zipfile.ZIP_DEFLATED)

    def add(self, row: Generation) -> None:
        """Write one answer as a sample."""
        sample = _sample(row, self._source.name)
        self.archive.writestr(f"samples/{row.problem_id}_epoch_{row.sample_idx + 1}.json", json.dumps(sample))
        shown = {key: sample[key] for key in ("id", "epoch", "target", "scores", "model_usage", "metadata")}
        self._summaries.append(shown | {"input": row.question[:_SHOWN_CHARS]})
        self._num_tokens += row.num_tokens or 0
        scores = self._scores[row.problem_id]
        if row.verdict is not None and row.verdict.outcome.counts_for_model:
            scores.append(row.verdict.score)

    def finish(self) -> Path:
        """Write the list of samples and the header, and give the log its name."""
        means = [fmean(scores) for scores in self._scores.values() if scores]
        metrics = {"accuracy": {"name": "accuracy", "value": fmean(means)}} if means else {}
        when = datetime.now(UTC).isoformat()
        spec = {
            "eval_id": self._path.stem,
            "run_id": Path(self._source.origin).name,
            "task_id": self._task,
            "created": when,
            "task": self._task,
            "dataset": {"name": self._task, "samples": len(self._scores), "sample_ids": list(self._scores)},
            "model": _model(self._source.name),
            "config": {"epochs": max(int(str(summary["epoch"])) for summary in self._summaries)},
            "metadata": {"origin": self._source.origin},
        }
        num = len(self._summaries)
        scores = [{"name": _SCORER, "scorer": _SCORER, "metrics": metrics}]
        header = {
            "version": 2,
            "status": "success",
            "eval": spec,
            "results": {"total_samples": num, "completed_samples": num, "scores": scores},
            "stats": {
                "started_at": when,
                "completed_at": when,
                "model_usage": _usage(self._source.name, self._num_tokens),
            },
        }
        self.archive.writestr("_journal/start.json", json.dumps({"version": 2, "eval": spec, "plan": {}}))
        self.archive.writestr("summaries.json", json.dumps(self._summaries))
        self.archive.writestr("header.json", json.dumps(header))
        self.archive.close()
        self._temporary.replace(self._path)
        return self._path


def _sample(row: Generation, model: str) -> dict[str, object]:
    answer = {"role": "assistant", "content": row.response, "source": "generate"}
    choice = {"message": answer, "stop_reason": "max_tokens" if row.finish_reason == "length" else "stop"}
    usage = _usage(model, row.num_tokens or 0)
    verdict = row.verdict
    # A verdict that says nothing about the model stands in the metadata, and is no score.
    score = {}
    if verdict is not None and verdict.outcome.counts_for_model:
        value = {0.0: "I", 1.0: "C"}.get(verdict.score, verdict.score)
        score = {_SCORER: {"value": value, "explanation": verdict.detail}}
    metadata = {"outcome": str(verdict.outcome)} if verdict else {}
    if not isinstance(row.reference, MathReference):
        metadata[_OTHER_REFERENCE] = str(domain_of(row.reference))  # the target is no reference then
    return {
        "id": row.problem_id,
        "epoch": row.sample_idx + 1,
        "input": row.question,
        "target": _target(row.reference),
        "messages": [{"role": "user", "content": row.question, "source": "input"}, answer],
        "output": {"model": _model(model), "choices": [choice], "usage": usage[_model(model)]},
        "model_usage": usage,
        "scores": score,
        "metadata": metadata,
    }


def _model(name: str) -> str:
    return f"klear/{name}"


def _usage(name: str, num_tokens: int) -> dict[str, dict[str, int]]:
    return {_model(name): {"input_tokens": 0, "output_tokens": num_tokens, "total_tokens": num_tokens}}


def _target(reference: Reference) -> str | Sequence[str]:
    match reference:
        case MathReference(answers=answers):
            return answers[0] if len(answers) == 1 else answers
        case CodeReference():
            return f"{reference.num_tests} tests ({reference.test_kind})"
        case CustomReference(value_json=value):
            return value
        case UnverifiableReference():
            return ""
