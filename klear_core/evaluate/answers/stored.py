"""Read stored answers, whoever sampled them: one record for Klear's evaluations and for files of other tools."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue, ValidationError

from klear_core.artifacts.manifest import MANIFEST, Manifest, read_manifest
from klear_core.artifacts.records import read_shards
from klear_core.artifacts.remote_paths import store_of
from klear_core.config.data_jobs import BenchmarksJob
from klear_core.config.load import explained
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ArtifactError, ConfigError, DataError
from klear_core.evaluate.counts import Decoding
from klear_core.evaluate.sample import TEMPLATES_FOLDER
from klear_core.scores import REPORT_FILE, SAMPLES_FOLDER
from klear_core.types import CustomReference, EvalSample, FinishReason, Outcome, Problem, Reference, Verdict

REJUDGE_FILE = "rejudge.json"
"""Summary in a folder of answers that were judged again; it also marks such a folder."""
ANSWERS_FOLDER = "answers"
"""Shards of `RejudgedAnswer` in such a folder."""
PROBLEMS_FOLDER = "problems"
"""Shards of the `Problem`s of these answers, whose `source` is the benchmark; each is stored once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One stored answer with the problem's reference, and the verdict that is stored with it."""

    benchmark: str
    problem_id: str
    question: str
    reference: Reference
    decoding: Decoding
    sample_idx: int
    response: str
    """The complete model output, think tags included."""
    num_tokens: int | None
    """None if the file does not say."""
    finish_reason: FinishReason | None
    """None if the file does not say."""
    verdict: Verdict | None
    """None if the file has none."""
    template: str = ""
    """Name of the prompt template that the question was asked in; empty for the plain question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RejudgedAnswer:
    """An answer with a new verdict, as it is stored; the earlier verdict is flat because it may be missing."""

    benchmark: str
    problem_id: str
    template: str = ""
    """Name of the prompt template; also empty in folders of versions that did not judge templates again."""
    decoding: Decoding
    sample_idx: int
    response: str
    num_tokens: int | None
    finish_reason: FinishReason | None
    verdict: Verdict
    before_outcome: Outcome | None
    before_score: float | None
    before_detail: str | None

    @property
    def before(self) -> Verdict | None:
        """Return the earlier verdict; None if there was none."""
        if self.before_outcome is None or self.before_score is None:
            return None
        return Verdict(outcome=self.before_outcome, score=self.before_score, detail=self.before_detail or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadRow:
    """A row of a file that could not be read as an answer."""

    where: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerSource:
    """A set of stored answers that can be read from the beginning any number of times, without being held in memory."""

    name: str
    origin: str
    """Folder or file, for people."""
    layout: str
    """Layout of the files, such as `lm-eval`; `klear` for an evaluation of ours."""
    verify: VerifyConfig | None
    """Settings of the judge that made the stored verdicts; None if another program made them."""
    read: Callable[[], Iterator[Generation | UnreadRow]]
    templates: Mapping[str, str] = field(default_factory=dict)
    """Texts of the prompt templates that questions were asked in beside their own wording, by name."""


def in_template(name: str, template: str) -> str:
    """Return a benchmark's or answer's name with that of its prompt template; unchanged for the plain question."""
    return f"{name}, template {template}" if template else name


def is_evaluation(folder: Path) -> bool:
    """Return whether a folder is an evaluation's artifact."""
    return (folder / MANIFEST).is_file() and (folder / REPORT_FILE).is_file()


def evaluation_answers(folder: Path, *, name: str = "") -> AnswerSource:
    """Return the answers of an evaluation's artifact folder, with the references of its benchmarks' artifact."""
    manifest = read_manifest(folder)
    if not is_evaluation(folder):
        raise ArtifactError(f"{folder}: a {manifest.kind} artifact holds no judged answers; name an evaluation")
    # A folder is read shard by shard, so that a lost shard would go unnoticed.
    gone = [file.path for file in manifest.files if not (folder / file.path).is_file()]
    if gone:
        raise ArtifactError(f"{folder}: {gone[0]} is missing, so that fewer answers are here than were scored")
    benchmarks = _benchmarks_of(folder, manifest)
    templates = _templates_of(manifest)
    return AnswerSource(
        name=name or manifest.stage,
        origin=str(folder),
        layout="klear",
        verify=_verify_of(manifest.config.get("verify", {}), folder / MANIFEST),
        read=lambda: _evaluation_rows(folder, benchmarks, tuple(templates)),
        templates=templates,
    )


def rejudged_answers(folder: Path, *, which: Literal["before", "after"] = "after", name: str = "") -> AnswerSource:
    """Return answers that were judged again, with their new verdicts, or with those that they had before."""
    stored = json.loads((folder / REJUDGE_FILE).read_text())
    settings = stored["verify_after" if which == "after" else "verify_before"]
    return AnswerSource(
        name=name or stored["name"],
        origin=str(folder),
        layout="klear",
        verify=None if settings is None else _verify_of(settings, folder / REJUDGE_FILE),
        read=lambda: _rejudged_rows(folder, which),
        templates=stored.get("templates", {}),  # absent in folders of versions that judged no answers to templates
    )


def _benchmarks_of(folder: Path, manifest: Manifest) -> Path:
    """Return the artifact folder of the benchmarks that an evaluation was made of."""
    for record in manifest.inputs:
        if record.role == BenchmarksJob.kind:
            ref = store_of(folder).find(record.kind, record.fingerprint)
            if ref is not None:
                return ref.path
            own = f"{record.kind}/{record.fingerprint}"
            raise ArtifactError(f"{folder}: its benchmarks {own} are gone; without them there is no reference")
    raise ArtifactError(f"{folder}: its manifest names no benchmarks, so there is no reference to judge by")


def _templates_of(manifest: Manifest) -> dict[str, str]:
    """Return the prompt templates of an evaluation, as its settings have them."""
    settings = manifest.config.get("evaluate", {})
    templates = settings.get("templates", {}) if isinstance(settings, dict) else {}
    assert isinstance(templates, dict), templates
    return {name: str(text) for name, text in templates.items()}


def _verify_of(settings: JsonValue, where: Path) -> VerifyConfig:
    try:
        return VerifyConfig.model_validate(settings)
    except ValidationError as e:
        raise ConfigError(f"{where}: settings of another version: {explained(e, VerifyConfig)}") from e


def _evaluation_rows(folder: Path, benchmarks: Path, templates: Sequence[str]) -> Iterator[Generation]:
    """Yield the answers to the plain questions, then those to the questions in each template."""
    problems: dict[str, Mapping[str, Problem]] = {}
    for template, sample in _samples(folder, templates):
        if sample.benchmark not in problems:
            found = read_shards(benchmarks / sample.benchmark, Problem)
            problems[sample.benchmark] = {problem.problem_id: problem for problem in found}
        problem = problems[sample.benchmark].get(sample.problem_id)
        if problem is None:
            raise ArtifactError(f"{folder}: problem {sample.problem_id} is not in benchmark {sample.benchmark!r}")
        yield Generation(
            benchmark=sample.benchmark,
            problem_id=sample.problem_id,
            question=problem.question,  # a stored answer to a template has the question in its wording
            reference=problem.reference,
            decoding=sample.decoding,
            sample_idx=sample.sample_idx,
            response=sample.response,
            num_tokens=sample.num_tokens,
            finish_reason=sample.finish_reason,
            verdict=sample.verdict,
            template=template,
        )


def _samples(folder: Path, templates: Sequence[str]) -> Iterator[tuple[str, EvalSample]]:
    for sample in read_shards(folder / SAMPLES_FOLDER, EvalSample):
        yield "", sample
    for template in templates:
        for sample in read_shards(folder / TEMPLATES_FOLDER / template, EvalSample):
            yield template, sample


def _rejudged_rows(folder: Path, which: Literal["before", "after"]) -> Iterator[Generation]:
    problems = {(p.source, p.problem_id): p for p in read_shards(folder / PROBLEMS_FOLDER, Problem)}
    for row in read_shards(folder / ANSWERS_FOLDER, RejudgedAnswer):
        problem = problems[row.benchmark, row.problem_id]
        yield Generation(
            benchmark=row.benchmark,
            problem_id=row.problem_id,
            question=problem.question,
            reference=problem.reference,
            decoding=row.decoding,
            sample_idx=row.sample_idx,
            response=row.response,
            num_tokens=row.num_tokens,
            finish_reason=row.finish_reason,
            verdict=row.verdict if which == "after" else row.before,
            template=row.template,
        )


# ---- answer checks ----
# Read stored answers once before work begins: refuse unusable ones, and report smaller faults.


_MAX_TOLD = 5
_NumSamples = Mapping[str, Mapping[str, int]]
"""Numbers of sampled answers by benchmark and problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedAnswers:
    """Faults of a set of answers that is usable nevertheless."""

    num_unread: int
    """Rows that could not be read; they are left out."""
    notes: tuple[str, ...]


def check_answers(
    source: AnswerSource, *, num_samples: int | None = None, judges: Collection[str] | None = None
) -> CheckedAnswers:
    """Read all answers, and return the faults to report before work begins.

    Raise DataError if the files are damaged, no row can be read, or, with `num_samples`, a problem has fewer sampled
    answers; ConfigError if a reference needs a judge that is not among `judges`, which None leaves unchecked.
    """
    unread: list[UnreadRow] = []
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in source.read():
        if isinstance(row, UnreadRow):
            unread.append(row)
            continue
        if judges is not None and isinstance(row.reference, CustomReference) and row.reference.judge not in judges:
            raise ConfigError(
                f"{source.origin}: problem {row.problem_id} needs the judge {row.reference.judge!r}; "
                f"verify.judges has {', '.join(sorted(judges)) or 'none'}"
            )
        counts[in_template(row.benchmark, row.template)][row.problem_id] += row.decoding == "sampled"
    if not counts:
        reasons = "; ".join(f"{row.where}: {row.reason}" for row in unread[:3])
        raise DataError(f"{source.origin}: none of its {len(unread):,} rows could be read: {reasons}")
    if num_samples is not None:
        _require_samples(source, counts, num_samples)
    return CheckedAnswers(num_unread=len(unread), notes=(*_unread_notes(unread), *_uneven_notes(counts)))


def _require_samples(source: AnswerSource, counts: _NumSamples, num_samples: int) -> None:
    short = list(_fewer_than(num_samples, counts))
    if short:
        num_problems = sum(len(problems) for problems in counts.values())
        raise DataError(
            f"{source.origin}: {len(short)} of {num_problems} problems have fewer than the {num_samples} stored "
            f"samples that --samples asks for ({'; '.join(short[:_MAX_TOLD])}): a score of n = {num_samples} cannot be "
            "computed from them; give a smaller n, or complete the answers"
        )


def _fewer_than(num_samples: int, counts: _NumSamples) -> Iterator[str]:
    for benchmark, problems in counts.items():
        for problem_id, count in problems.items():
            if count < num_samples:
                yield f"{benchmark} {problem_id}: {count}"


def _unread_notes(unread: list[UnreadRow]) -> Iterator[str]:
    if unread:
        more = f"; and {len(unread) - _MAX_TOLD:,} more" if len(unread) > _MAX_TOLD else ""
        reasons = "; ".join(f"{row.where}: {row.reason}" for row in unread[:_MAX_TOLD])
        yield f"{len(unread):,} rows are left out: {reasons}{more}"


def _uneven_notes(counts: _NumSamples) -> Iterator[str]:
    for benchmark, problems in counts.items():
        most = max(problems.values())
        short = list(_fewer_than(most, {benchmark: problems}))
        if short:
            yield (
                f"{len(short):,} of {len(problems):,} problems have fewer than {most} samples: "
                f"{'; '.join(short[:_MAX_TOLD])}; --samples {most} refuses such answers"
            )
