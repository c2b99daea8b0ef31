"""Prepare the scores from base to final model, by benchmark, for the page and the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from klear_core.config.benchmark_prompts import MATH_PROMPTS, QUESTION
from klear_core.config.evaluate import (
    PLAIN_TEMPLATE,
    HttpEngineConfig,
    ServedModelConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from klear_core.evaluate.compare.published import Agreement, PublishedModel, agreement_with
from klear_core.report.run.claims import Axis, DifferenceRow, Span, axis_of, difference_row
from klear_core.report.run.facts import Facts, ModelFacts
from klear_core.report.run.warnings import chosen_in_run, num_contaminated
from klear_core.scores import NONE, DecodingProfile, EvalReport, Range, Score, number, percent, points, spread_text

# ---- decoding ----
# Describe in words how answers were sampled.


def decoding_text(profile: DecodingProfile) -> str:
    """Describe a profile: `temperature 0.6, top-p 0.95, …, up to 32,768 new tokens; torch engine in float32; …`."""
    s = profile.sampling
    top_p = f"{s.top_p:g}" if s.top_p < 1 else "off"
    top_k = f"{s.top_k}" if s.top_k else "off"
    penalty = f"{s.repetition_penalty:g}" if s.repetition_penalty > 1 else "off"
    rest = f"top-k {top_k}, repetition penalty {penalty}"
    if isinstance(profile.engine, ServedModelConfig):
        # chat requests have neither; vLLM then takes those of the model's generation_config.json
        rest = "top-k and repetition penalty as the server sets them"
    parts = [f"temperature {s.temperature:g}", f"top-p {top_p}", rest, f"up to {s.max_new_tokens:,} new tokens"]
    return f"{', '.join(parts)}; {_engine_text(profile)}; {profile.seed_policy}"


def _asked_text(report: EvalReport) -> str:
    """Describe how a benchmark was asked and its answers sampled; the plain prompt is not mentioned."""
    prompt = "" if report.prompt == "plain" else f"; prompt {report.prompt}"
    return decoding_text(report.decoding) + prompt


def _engine_text(profile: DecodingProfile) -> str:
    match profile.engine:
        case TorchEngineConfig() as engine:
            return f"torch engine in {engine.dtype}"
        case VllmEngineConfig() as engine:
            yarn = f", YaRN factor {engine.yarn_factor:g}" if engine.yarn_factor else ", no YaRN"
            if engine.yarn_original_window:
                yarn += f" over {engine.yarn_original_window:,} positions"
            attention = (
                f" with attention factor {engine.yarn_attention_factor:g}" if engine.yarn_attention_factor else ""
            )
            return f"vLLM in {engine.dtype}{yarn}{attention}"
        case HttpEngineConfig() as engine:
            return f"endpoint serving {engine.model}"
        case ServedModelConfig() as engine:
            addresses = ", ".join(endpoint.base_url for endpoint in engine.runtime.endpoints)
            return f"{engine.model} as served at {addresses}, weights unknown"


# ---- published view ----
# Prepare published scores for comparison with ours.


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published score, and its comparison with each of our models."""

    model: str
    source: str
    score: str
    """The score with its n: `90.5 %, avg@64`."""
    bound: str
    """Largest difference to expect between two runs of one model with this score: `±1.9`."""
    ours: tuple[tuple[str, bool], ...]
    """For each of our models the difference to the published score, and whether two runs of one model may differ so."""


def published_rows(
    published: Sequence[PublishedModel], models: Sequence[ModelFacts], benchmark: str
) -> tuple[PublishedRow, ...]:
    """Return the published scores on a benchmark, in the order of the file."""
    rows = []
    for row in published:
        found = [_agreement(row, model, benchmark) for model in models]
        known = [agreement for agreement in found if agreement]
        if not known:
            continue
        first = known[0]
        rows.append(
            PublishedRow(
                model=row.model,
                source=row.source,
                score=f"{percent(first.published)}, avg@{first.num_samples}",
                bound=f"±{100 * first.bound:.1f}",
                ours=tuple(_cell(agreement) for agreement in found),
            )
        )
    return tuple(rows)


def _agreement(row: PublishedModel, model: ModelFacts, benchmark: str) -> Agreement | None:
    report = model.score(benchmark)
    return agreement_with(row, report) if report else None


def _cell(found: Agreement | None) -> tuple[str, bool]:
    if found is None:
        return NONE, False
    if found.differs:
        return f"{points(found.difference)}, not compared: {'; '.join(found.differs)}", False
    return f"{points(found.difference)}, {'agrees' if found.agrees else 'differs'}", bool(found.agrees)


# ---- scores view ----


@dataclass(frozen=True, slots=True, kw_only=True)
class Mean:
    """A score as text, and in percent for drawing."""

    value: str
    at: float
    other: Span
    """Interval over other problems of this kind."""
    rerun: Span | None
    """Interval over other samples of these problems; None for greedy answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """One model's scores on one benchmark."""

    tone: int
    """Number of the model's colour."""
    model: str
    avg: Mean
    greedy: Mean | None
    pass_at_k: Mean | None
    """pass@k for the view's `k`; None if no problem has so many judged samples of this model."""
    majority: Mean | None
    """maj@n."""
    stable: tuple[tuple[str, str], ...]
    """Name and value of each G-Pass@k: `all of 16`."""
    partly: str
    """Scores that leave problems out, with the number that each is over: `pass@4 94, maj@4 95`; empty if none does."""
    truncated: str
    no_answer: str
    """Share of samples in which the judge found no answer."""
    contaminated: str
    """Problems that overlap with the model's training data in this run; `not known` if that data was not compared."""
    chosen: str
    """Why the score is marked as one that the model was chosen by; empty if it is not."""
    unscored: str
    has_unscored: bool
    mean_tokens: str
    decoding: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SideBySide:
    """The models' avg@n on one difficulty level or on all of a benchmark."""

    label: str
    num_problems: int
    means: tuple[tuple[int, Mean | None], ...]
    """Pairs of the model's `tone` and score; None if nothing was scored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRow:
    """One model's scores in several prompt templates."""

    tone: int
    model: str
    means: tuple[Mean, ...]
    """Scores in the order of the view's `templates`."""
    spread: str
    """Range and standard deviation over the templates: `61.0 to 64.2, standard deviation 1.3 points`."""
    sampling: str
    """Standard deviation to expect from sampling alone; empty if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchmarkView:
    """All scores and differences on one benchmark."""

    name: str
    age: str
    """The date of its problems, and whether it is after the models' training data; empty if one is unknown."""
    num_problems: int
    num_samples: int
    k: int
    """The k of the column pass@k: n, or less if no problem has n judged samples."""
    confidence: str
    decoding: tuple[str, ...]
    """Decoding profiles: one, or several if the models were decoded differently and their scores are not comparable."""
    rows: tuple[ModelRow, ...]
    difficulties: tuple[SideBySide, ...]
    differences: tuple[DifferenceRow, ...]
    difference_axis: Axis
    published: tuple[PublishedRow, ...]
    templates: tuple[tuple[str, str], ...]
    """Name and text of each prompt template, the plain question first; empty if there is no other."""
    template_rows: tuple[TemplateRow, ...]
    num_compared: int
    """Comparisons of the whole report, for which p-values are corrected."""

    @property
    def models(self) -> tuple[tuple[int, str], ...]:
        """Tone and label of each model."""
        return tuple((row.tone, row.model) for row in self.rows)

    def step_to(self, model: str) -> DifferenceRow | None:
        """Return the change of avg@n to this model from the one evaluated before it, if there is one."""
        names = [row.model for row in self.rows]
        # The first model has none before it; index -1 would take the last.
        before = names[names.index(model) - 1] if names.index(model) else ""
        return next(
            (d for d in self.differences if (d.before, d.after) == (before, model) and d.score != "greedy"), None
        )


def benchmark_views(facts: Facts) -> list[BenchmarkView]:
    """Return one view per benchmark, in config order."""
    return [_view(facts, name) for name in facts.benchmarks]


def overview(facts: Facts) -> list[SideBySide]:
    """Return all models' avg@n per benchmark; empty if there is only one benchmark."""
    if len(facts.benchmarks) < 2:
        return []
    return [_across(facts, name) for name in facts.benchmarks]


def _across(facts: Facts, name: str) -> SideBySide:
    means = []
    num_problems = 0
    for model in facts.models:
        report = model.score(name)
        means.append((model.tone, _mean(report.avg) if report else None))
        num_problems = max(num_problems, report.num_problems if report else 0)
    return SideBySide(label=name, num_problems=num_problems, means=tuple(means))


def _view(facts: Facts, name: str) -> BenchmarkView:
    scored = [(m, report) for m in facts.models if (report := m.score(name)) is not None]
    last = scored[-1][1]
    differences = [d for d in facts.differences if d.scores.benchmark == name]
    axis = axis_of(differences)
    decodings = dict.fromkeys(_asked_text(report) for _, report in scored)
    # A model whose judge failed often may lack the largest k; its cell is then empty.
    k = max(report.pass_at[-1].k for _, report in scored)
    rows = [_row(facts, m, report, k=k) for m, report in scored]
    difference_rows = [difference_row(facts, d, axis, num_samples=last.num_samples) for d in differences]
    models = [model for model, _ in scored]
    template_rows = [_template_row(model, report) for model, report in scored if report.templates]
    return BenchmarkView(
        name=name,
        age=_age(facts, name),
        num_problems=last.num_problems,
        num_samples=last.num_samples,
        k=k,
        confidence=percent(last.confidence, 0),
        decoding=tuple(decodings),
        rows=tuple(rows),
        difficulties=_difficulties(scored),
        differences=tuple(difference_rows),
        difference_axis=axis,
        published=published_rows(facts.published, models, name),
        templates=_templates(last),
        template_rows=tuple(template_rows),
        num_compared=facts.num_compared,
    )


def _templates(report: EvalReport) -> tuple[tuple[str, str], ...]:
    if not report.templates:
        return ()
    text = report.prompt if QUESTION in report.prompt else MATH_PROMPTS.get(report.prompt, "the benchmark's own prompt")
    first = (PLAIN_TEMPLATE, QUESTION) if report.prompt == "plain" else (report.prompt, text)
    return (first, *((template.name, template.text) for template in report.templates))


def _template_row(model: ModelFacts, report: EvalReport) -> TemplateRow:
    spread = report.template_spread
    assert spread is not None, report.benchmark
    sampling = "" if spread.sampling_std is None else f"{100 * spread.sampling_std:.1f}"
    return TemplateRow(
        tone=model.tone,
        model=model.maker.label,
        means=(_mean(report.avg), *(_mean(template.avg) for template in report.templates)),
        spread=spread_text(spread),
        sampling=sampling,
    )


def _age(facts: Facts, name: str) -> str:
    """Say when a benchmark was published, and whether that was after the data of the models."""
    published = next((b.published_on for b in facts.config.benchmarks if b.name == name), None)
    until = facts.config.data_until
    if published is None or until is None:
        return f"Published on {published}." if published else ""
    if published > until:
        return f"Fresh: published on {published}, after the models' data, which ends on {until}."
    return f"Not fresh: published on {published}, and the models' data ends on {until}."


def _row(facts: Facts, model: ModelFacts, report: EvalReport, *, k: int) -> ModelRow:
    num_answers = report.num_problems * report.num_samples
    num_unscored = sum(report.unscored.values())
    reasons = ", ".join(f"{n:,} {outcome.replace('_', ' ')}" for outcome, n in report.unscored.items())
    unscored = f"{num_unscored:,} of {num_answers:,}"
    if num_unscored:
        unscored += f" ({reasons})"
    pass_at_k = next((p.score for p in report.pass_at if p.k == k), None)
    stable = [(_share_text(s.threshold, s.k), percent(s.score.value)) for s in report.stable_pass]
    return ModelRow(
        tone=model.tone,
        model=model.maker.label,
        avg=_mean(report.avg),
        greedy=_mean_if_any(report.greedy),
        pass_at_k=_mean_if_any(pass_at_k),
        majority=_mean_if_any(report.majority),
        stable=tuple(stable),
        partly=_partly(report, pass_at_k, k=k),
        truncated=percent(report.truncated_frac),
        no_answer=NONE if report.no_answer_frac is None else percent(report.no_answer_frac),
        contaminated=_contaminated(facts, model, report),
        chosen=chosen_in_run(facts, model).get(report.benchmark, ""),
        unscored=unscored,
        has_unscored=num_unscored > 0,
        mean_tokens=number(round(report.mean_tokens)),
        decoding=_asked_text(report),
    )


def _partly(report: EvalReport, pass_at_k: Score | None, *, k: int) -> str:
    """Name the scores that are over fewer than all problems."""
    n = report.num_samples
    scores = [(f"avg@{n}", report.avg), ("greedy", report.greedy), (f"pass@{k}", pass_at_k)]
    scores += [(f"maj@{n}", report.majority), *((f"G-Pass@{s.k}", s.score) for s in report.stable_pass[:1])]
    named = [f"{name} {s.num_problems:,}" for name, s in scores if s and s.num_problems < report.num_problems]
    return ", ".join(named)


def _contaminated(facts: Facts, model: ModelFacts, report: EvalReport) -> str:
    num = num_contaminated(facts, model, report.benchmark)
    return "not known" if num is None else f"{num:,} of {report.num_problems:,}"


def _mean(score: Score) -> Mean:
    rerun = _score_span(score.rerun) if score.rerun else None
    return Mean(
        value=percent(score.value), at=round(score.value * 100, 2), other=_score_span(score.new_problems), rerun=rerun
    )


def _score_span(ends: Range) -> Span:
    low, high = ends.low * 100, ends.high * 100
    return Span(text=f"{low:.1f} to {high:.1f}", low=round(low, 2), high=round(high, 2))


def _share_text(threshold: float, k: int) -> str:
    """Describe how many of k samples must be right: `12 of 16`."""
    return f"{math.ceil(threshold * k - 1e-9)} of {k}"


def _difficulties(scored: list[tuple[ModelFacts, EvalReport]]) -> tuple[SideBySide, ...]:
    levels = scored[-1][1].by_difficulty
    if len(levels) < 2:
        return ()
    rows = []
    for level in levels:
        means = [(model.tone, _mean_at(report, level.difficulty)) for model, report in scored]
        rows.append(SideBySide(label=level.difficulty, num_problems=level.num_problems, means=tuple(means)))
    return tuple(rows)


def _mean_at(report: EvalReport, difficulty: str) -> Mean | None:
    for level in report.by_difficulty:
        if level.difficulty == difficulty:
            return _mean_if_any(level.avg)
    return None


def _mean_if_any(score: Score | None) -> Mean | None:
    return None if score is None else _mean(score)
