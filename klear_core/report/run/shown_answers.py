"""Pick the answers that the report shows and a question to try, by a stated rule and a seed."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Literal

from klear_core.config.settings import expanded
from klear_core.config.stage import Stage
from klear_core.data.generated.chains import parse_chain
from klear_core.errors import DataError
from klear_core.report.run.facts import Facts, ModelFacts
from klear_core.scores import percent, visible
from klear_core.seeding import seed_for
from klear_core.types import EvalSample

MAX_CHARS = 8_000
"""Characters shown of a text. A note replaces the middle of longer ones, so that the report is small enough to mail."""
FOLD_CHARS = 600
FOLD_LINES = 16
"""Answers with more characters or this many line breaks are folded; their last line stays visible."""

Mark = Literal["right", "wrong", "unscored"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One model's answer as the report shows it."""

    model: str
    mark: Mark
    verdict: str
    num_tokens: int
    was_truncated: bool
    text: str
    is_long: bool
    ending: str
    """The end of the last line that is not blank, at most 100 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One held-out problem with every model's answer, in pipeline order."""

    benchmark: str
    problem_id: str
    difficulty: str
    question: str
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleGroup:
    """Problems with the same change of verdict: the number found, the number compared, and the few shown."""

    title: str
    num_found: int
    num_compared: int
    examples: tuple[Example, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """All groups, and which answers were compared: greedy ones or first samples."""

    decoding: Literal["sampled", "greedy"]
    groups: tuple[ExampleGroup, ...]


_Key = tuple[str, str]
"""Benchmark and problem id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The verdicts on the last two models' answers to a problem."""

    title: str
    marks: tuple[Mark, Mark]
    num_shown: int
    """Number of problems to show."""


def pick_examples(facts: Facts) -> Examples | None:
    """Return a few problems per change of verdict, lowest seed first; None with fewer than two evaluated models.

    Greedy answers, which involve no chance, are compared if all models have some and the last training stage changed a
    verdict; otherwise first samples are.
    """
    if len(facts.models) < 2:
        return None
    greedy = _compared(facts, "greedy")
    if any(group.num_found for group in greedy.groups[:2]):  # the groups fixed and broken
        return greedy
    sampled = _compared(facts, "sampled")
    num_compared = sum(group.num_compared for group in sampled.groups)
    return sampled if num_compared else greedy


def _compared(facts: Facts, decoding: Literal["sampled", "greedy"]) -> Examples:
    answers = [_first_answers(m, decoding) for m in facts.models]
    *earlier, last = answers
    # Every model must have an answer to the problem, because all are shown side by side.
    common = list(last)
    for of_model in earlier:
        common = [key for key in common if key in of_model]
    # a seeded order of problems, the same in every report of this config
    common.sort(key=lambda key: seed_for(facts.config.seed, "report/examples", *key))
    groups = []
    *_, before, after = facts.models
    for change in _changes(before.maker.label, after.maker.label):
        found = [key for key in common if (_mark(earlier[-1][key]), _mark(last[key])) == change.marks]
        shown = tuple(_example(key, facts.models, answers) for key in found[: change.num_shown])
        groups.append(ExampleGroup(title=change.title, num_found=len(found), num_compared=len(common), examples=shown))
    return Examples(decoding=decoding, groups=tuple(groups))


def _changes(before: str, after: str) -> tuple[_Change, ...]:
    """Return the changes of verdict between the last two models, given their labels."""
    return (
        _Change(title=f"Fixed: wrong after {before}, right after {after}", marks=("wrong", "right"), num_shown=3),
        _Change(title=f"Broken: right after {before}, wrong after {after}", marks=("right", "wrong"), num_shown=3),
        _Change(title=f"Still wrong after {after}", marks=("wrong", "wrong"), num_shown=2),
        _Change(title=f"Right after both {before} and {after}", marks=("right", "right"), num_shown=1),
    )


def _first_answers(model: ModelFacts, decoding: str) -> Mapping[_Key, EvalSample]:
    return {(s.benchmark, s.problem_id): s for s in model.samples if s.decoding == decoding and s.sample_idx == 0}


def _mark(sample: EvalSample) -> Mark:
    if not sample.verdict.outcome.counts_for_model:
        return "unscored"
    return "right" if sample.verdict.is_correct else "wrong"


def _example(key: _Key, models: Sequence[ModelFacts], answers: Sequence[Mapping[_Key, EvalSample]]) -> Example:
    last = answers[-1][key]
    return Example(
        benchmark=last.benchmark,
        problem_id=last.problem_id,
        difficulty=last.difficulty,
        question=_shortened(visible(last.question)),
        answers=tuple(
            _answer(model.maker.label, of_model[key]) for model, of_model in zip(models, answers, strict=True)
        ),
    )


def _answer(label: str, sample: EvalSample) -> Answer:
    mark = _mark(sample)
    outcome = sample.verdict.outcome
    verdict = f"score {sample.verdict.score:g}" if outcome == "scored" else outcome.replace("_", " ")
    return Answer(
        model=label,
        mark=mark,
        verdict=verdict,
        num_tokens=sample.num_tokens,
        was_truncated=sample.finish_reason == "length",
        text=_shortened(visible(sample.response)),
        is_long=len(sample.response) > FOLD_CHARS or sample.response.count("\n") >= FOLD_LINES,
        ending=visible(_last_line(sample.response)),
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text[-MAX_CHARS:].splitlines() if line.strip()]
    return lines[-1][-100:] if lines else ""


def _shortened(text: str) -> str:
    """Cut the middle of a text that is too long. Most of what is kept is the end, where the final answer is."""
    if len(text) <= MAX_CHARS:
        return text
    head, tail = MAX_CHARS // 4, MAX_CHARS * 3 // 4
    return f"{text[:head]}\n\n[… {len(text) - head - tail:,} characters left out of this report …]\n\n{text[-tail:]}"


# ---- product ----
# Find the last trained model of a run, and a question to try it with.


_MAX_QUESTION_CHARS = 60
"""Longer questions do not fit on a readable command line."""
_NO_QUESTION = "your question"


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The last trained model of a run."""

    stage: Stage
    """The stage that made it."""
    fingerprint: str
    root: Path
    """Workspace folder as the config names it; a relative path, also of `folder`, starts where the run was started."""
    folder: Path
    """Model folder in Hugging Face format."""
    question: str
    """A short held-out problem, if possible one that the last training stage fixed; else `your question`."""

    def command(self, which: str) -> str:
        """Return the shell command that asks the model the question; `which` names the model in its workspace."""
        where = "" if self.root == Path("runs") else f" --root {shlex.quote(str(self.root))}"
        return f"klear chat {which} {shlex.quote(self.question)}{where}"


def product_of(facts: Facts) -> Product | None:
    """Return the last trained model of a run; None if it trained none."""
    # Given and random models are no product of this run.
    trained = [stage for stage in facts.stages if stage.stage.job.method()]
    if not trained:
        return None
    last = trained[-1]
    root = expanded(facts.config.workspace.root)
    return Product(
        stage=last.stage,
        fingerprint=last.manifest.fingerprint,
        root=root,
        folder=root.joinpath(*last.folder.parts[-3:], "model"),
        question=_question(facts),
    )


def _question(facts: Facts) -> str:
    """Return the shortest question of the first example group that has one which fits."""
    shown = pick_examples(facts)
    for group in shown.groups if shown else ():
        questions = [example.question for example in group.examples]
        fitting = [q for q in questions if len(q) <= _MAX_QUESTION_CHARS and q.isprintable()]
        if fitting:
            return min(fitting, key=len)
    return _NO_QUESTION


# ---- products of chains ----
# Show which products a model gets wrong in chains of + - *, where a teacher may have a systematic mistake.


_PRODUCT = re.compile(r"^(\d)\*(\d)=(\d+)$", re.MULTILINE)
_MIN_PRODUCTS = 100
"""A model that writes fewer has not learned to write steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductMap:
    """The share of right products by value (rows) and factor (columns), of one model's steps."""

    model: str
    num_steps: int
    share: str
    size: int
    """Values and factors are below it."""
    cells: tuple[tuple[int, int, float, str], ...]
    """Factor, value, share of right products, and both counts in words; pairs that never come are left out."""


def product_maps(facts: Facts) -> list[ProductMap]:
    """Return a map for each model that writes products of digits in answers to chains; empty if fewer than two do."""
    maps = []
    for model in facts.models:
        counts: dict[tuple[int, int], list[bool]] = defaultdict(list)
        for sample in model.samples:
            try:
                modulus = parse_chain(sample.question).modulus
            except DataError:
                continue
            for value, factor, result in _PRODUCT.findall(sample.response):
                counts[int(value), int(factor)].append(int(value) * int(factor) % modulus == int(result))
        steps = [is_right for own in counts.values() for is_right in own]
        if len(steps) < _MIN_PRODUCTS:
            continue
        cells = []
        for (value, factor), own in sorted(counts.items()):
            text = f"{value} * {factor}: {sum(own)} of {len(own)} right"
            cells.append((factor, value, fmean(own), text))
        share = percent(fmean(steps))
        size = 1 + max(digit for pair in counts for digit in pair)
        found = ProductMap(model=model.maker.label, num_steps=len(steps), share=share, size=size, cells=tuple(cells))
        maps.append(found)
    return maps if len(maps) > 1 else []
