"""Read stored answers once before work begins: refuse unusable ones, and report smaller faults."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from klear_core.errors import ConfigError, DataError
from klear_core.evaluate.generations import AnswerSource, UnreadRow, in_template
from klear_core.types import CustomReference

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
        raise DataError(f"{source.origin}: none of its {len(unread):,} rows could be read: {_told(unread[:3])}")
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
        yield f"{len(unread):,} rows are left out: {_told(unread[:_MAX_TOLD])}{more}"


def _uneven_notes(counts: _NumSamples) -> Iterator[str]:
    for benchmark, problems in counts.items():
        most = max(problems.values())
        short = list(_fewer_than(most, {benchmark: problems}))
        if short:
            yield (
                f"{len(short):,} of {len(problems):,} problems have fewer than {most} samples: "
                f"{'; '.join(short[:_MAX_TOLD])}; --samples {most} refuses such answers"
            )


def _told(unread: list[UnreadRow]) -> str:
    return "; ".join(f"{row.where}: {row.reason}" for row in unread)
