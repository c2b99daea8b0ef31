"""Write the cards of a published model and of its data: scores with intervals, data, licences, and lineage."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from klear_core.evaluate.counts import AnswerCounts, CountsBy, Decoding
from klear_core.report.run.lineage import NO_LICENCE_NEEDED, NOT_STATED, Ancestor, DataSource, data_sources
from klear_core.report.run.scores_view import decoding_text
from klear_core.scores import NBSP, NONE, DecodingProfile, interval_text, number, percent

CONFIDENCE = 0.95
PROFILE_FOLDER = "profile"
"""Folder of the settings of the run that made the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """All that a card says."""

    name: str
    licence: str
    """Licence of the model; empty if none was stated."""
    lineage: Sequence[Ancestor]
    """Sources first; the model itself is the last."""
    sources: Sequence[DataSource]
    counts: CountsBy
    """Counts of its judged answers; empty if it was not evaluated."""
    decoding: Mapping[str, DecodingProfile]
    """Settings of sampling by benchmark."""
    warnings: Sequence[str]
    has_adapter: bool
    has_profile: bool
    gguf_file: str
    """Name of its GGUF file; empty if there is none."""


def model_card(facts: CardFacts) -> str:
    """Return the card in Markdown, with the header that the Hub reads."""
    sections = [
        _header(facts),
        f"# {facts.name}",
        _intro(facts),
        "## Scores",
        _scores_section(facts),
        "## How to use it",
        _usage(facts),
        "## Data",
        _table(["part", "source", "licence"], [[s.what, s.name, s.licence] for s in facts.sources]),
        "### What was kept and dropped",
        _ledger(facts.lineage),
        "## Lineage",
        _lineage(facts.lineage),
        *_notes(facts.lineage),
        "## How to make it again",
        _reproduction(facts),
    ]
    return "\n\n".join(sections) + "\n"


def _header(facts: CardFacts) -> str:
    """Return the YAML header."""
    header: dict[str, object] = {
        "license": _licences(facts.licence),
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["reasoning", "klear"],
    }
    # The Hub reads these as the data that the model was trained on, so benchmarks are not among them.
    datasets = sorted({repo for source in facts.sources for repo in source.datasets})
    if datasets:
        header["datasets"] = datasets
    results = _results(facts)
    if results:
        header["model-index"] = [{"name": facts.name, "results": results}]
    return _yaml(header)


def _yaml(header: Mapping[str, object]) -> str:
    """Return the header of a card; JSON is YAML, so every value is written as JSON."""
    lines = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in header.items()]
    return "\n".join(["---", *lines, "---"])


def _licences(licence: str) -> str | list[str]:
    """Return the licence as the Hub reads it: several are a list, an unknown one is `other`."""
    # `licence_in` joins the licences of a card in this way.
    several = licence.split(", ")
    return several if len(several) > 1 else licence or "other"


def _results(facts: CardFacts) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    for (benchmark, decoding), counts in facts.counts.items():
        score = counts.summary(confidence=CONFIDENCE, decoding=decoding).score
        if decoding == "sampled" and score is not None:
            name = _score_name(counts)
            metric = {"type": "accuracy", "name": name, "value": round(100 * score.value, 2)}
            task = {"type": "text-generation"}
            results.append({"task": task, "dataset": {"name": benchmark, "type": benchmark}, "metrics": [metric]})
    return results


def _intro(facts: CardFacts) -> str:
    model = facts.lineage[-1].manifest
    by = f"the stage `{model.stage}` of [Klear](https://arxiv.org/abs/2508.07629)"
    lines = [f"Made by {by} on {model.created_at:%Y-%m-%d}."]
    if facts.has_adapter:
        lines.append("The weights are merged; the LoRA adapter that was trained is in `adapter/`, in peft's format.")
    if not facts.licence:
        lines.append("No licence of the model was stated: see those of its sources below.")
    lines += [f"**Warning:** {warning}" for warning in facts.warnings]
    return "\n".join(lines)


def _scores_section(facts: CardFacts) -> str:
    if not facts.counts:
        return "This model was not evaluated."
    rows = [_score_row(*key, counts) for key, counts in facts.counts.items()]
    head = ["benchmark", "score", "value", "re-run", "other problems", "problems", "cut off", "no answer", "not judged"]
    table = _table(head, rows)
    decodings = [f"- {benchmark}: {decoding_text(profile)}." for benchmark, profile in facts.decoding.items()]
    said = (
        "avg@n is the share of right answers in n samples per problem, averaged over problems. The two columns after "
        f"the value are {percent(CONFIDENCE, 0)} intervals: re-run, for these problems and other samples (compare "
        "published scores with it); other problems, for a new draw of such problems. Cut off: "
        "the answer ran out of tokens. No answer: the judge found none. Not judged: the judge failed; those are in no "
        "score."
    )
    return "\n".join([table, "", said, "", "Decoding:", "", *decodings])


def _score_row(benchmark: str, decoding: Decoding, counts: AnswerCounts) -> list[str]:
    summary = counts.summary(confidence=CONFIDENCE, decoding=decoding)
    score, num = summary.score, summary.num_answers
    value = percent(score.value) if score else NONE
    rerun = interval_text(score.rerun) if score and score.rerun else NONE
    other = interval_text(score.new_problems) if score else NONE
    name = "greedy" if decoding == "greedy" else _score_name(counts)
    cut = NONE if summary.num_truncated is None else percent(summary.num_truncated / num)
    other_shares = [cut, percent(summary.num_no_answer / num), percent(summary.num_unscored / num)]
    return [benchmark, name, value, rerun, other, f"{summary.num_problems:,}", *other_shares]


def _score_name(counts: AnswerCounts) -> str:
    # Not whole if problems have different numbers of answers.
    num_samples = counts.num_answers / len(counts.problems)
    return f"avg@{num_samples:g}"


def _usage(facts: CardFacts) -> str:
    return "\n".join(
        [
            "```python",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            'folder = "."  # this folder, or its name on the Hub',
            "tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)",
            'messages = [{"role": "user", "content": "your question"}]',
            "inputs = tokenizer.apply_chat_template(",
            '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True',
            ")",
            "print(tokenizer.decode(model.generate(**inputs)[0]))",
            "```",
            "",
            f"{_sampling_line(facts)}There is no system prompt.",
            *([_GGUF_USAGE.format(file=facts.gguf_file)] if facts.gguf_file else []),
        ]
    )


def _sampling_line(facts: CardFacts) -> str:
    """Say of which scores `generation_config.json` has the sampling: of the first benchmark's, as `publish` writes."""
    samplings = {benchmark: profile.sampling for benchmark, profile in facts.decoding.items()}
    if not samplings:
        return ""
    written = next(iter(samplings.values()))
    same = [benchmark for benchmark, sampling in samplings.items() if sampling == written]
    which = "above" if len(same) == len(samplings) else f"on {', '.join(same)}"
    return f"`generation_config.json` has the sampling of the scores {which}. "


_GGUF_USAGE = """
`{file}` is the same model for llama.cpp (`llama-cli -m {file}`) and, by a Modelfile with the line `FROM ./{file}`, for
Ollama."""


def _ledger(lineage: Sequence[Ancestor]) -> str:
    rows = []
    for ancestor in lineage:
        for step in ancestor.manifest.ledger:
            dropped = ", ".join(f"{reason.replace('_', ' ')} {n:,}" for reason, n in step.dropped.items())
            rows.append(
                [
                    ancestor.manifest.stage,
                    step.step,
                    step.unit,
                    f"{step.num_in:,}",
                    f"{step.num_out:,}",
                    dropped or NONE,
                ]
            )
    return _table(["stage", "step", "unit", "in", "out", "dropped"], rows) if rows else "No ledger."


def _lineage(lineage: Sequence[Ancestor]) -> str:
    rows = []
    for ancestor in lineage:
        manifest = ancestor.manifest
        commit = manifest.git_commit[:12] if manifest.git_commit else NONE
        dirty = " (with changes)" if manifest.git_dirty else ""
        counts = ", ".join(f"{name} {number(value)}" for name, value in list(manifest.counts.items())[:4])
        rows.append([manifest.stage, f"`{manifest.kind}/{manifest.fingerprint}`", commit + dirty, counts])
    return _table(["stage", "artifact", "commit", "counts"], rows)


def _notes(lineage: Sequence[Ancestor]) -> list[str]:
    """Return a section of what the stages noted, such as that the first weights had been quantised; none without."""
    notes = [f"- `{ancestor.manifest.stage}`: {note}" for ancestor in lineage for note in ancestor.manifest.notes]
    return ["### Notes", "\n".join(notes)] if notes else []


def _reproduction(facts: CardFacts) -> str:
    model = facts.lineage[-1].manifest
    commit = model.git_commit or "the version of Klear named by its release"
    versions = ", ".join(f"{name} {version}" for name, version in model.versions.items())
    lines = [f"Code: commit `{commit}`. Versions: {versions or NONE}."]
    if facts.has_profile:
        lines += ["", "```", f"klear run {PROFILE_FOLDER} --until {model.stage}", "```", ""]
        lines.append("The folder has every setting of the run. Paths of local files are those of the run's machine.")
    else:
        lines.append("The run's report is not in the workspace, so that its settings cannot be given as one profile.")
    lines.append("`klear/` holds the manifest of every artifact above, with its settings, inputs and checksums.")
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    rendered = []
    for line in lines:
        cells = [" ".join(cell.replace(NBSP, " ").replace("|", "\\|").split()) for cell in line]
        rendered.append(f"| {' | '.join(cells)} |")
    return "\n".join(rendered)


def data_card(name: str, configs: Sequence[Mapping[str, str]], lineage: Sequence[Ancestor]) -> str:
    """Return the card of a published data set, whose `configs` are its parts, in Markdown."""
    sources = data_sources(lineage)
    licences = dict.fromkeys(s.licence for s in sources if s.licence not in (NOT_STATED, NO_LICENCE_NEEDED))
    header = {"license": _licences(", ".join(licences)), "tags": ["reasoning", "klear"], "configs": configs}
    load = f'datasets.load_dataset("FOLDER OR NAME ON THE HUB", "{configs[0]["config_name"]}", split="train")'
    sections = [
        _yaml(header),
        f"# {name}",
        "Problems and traces that a model of [Klear](https://arxiv.org/abs/2508.07629) learned from.",
        f"```python\n{load}\n```",
        "## Sources",
        _table(["part", "source", "licence"], [[s.what, s.name, s.licence] for s in sources]),
        "## What was kept and dropped",
        _ledger(lineage),
        "## Lineage",
        _lineage(lineage),
    ]
    return "\n\n".join(sections) + "\n"
