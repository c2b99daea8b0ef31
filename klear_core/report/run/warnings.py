"""Warn of what a reader must know before trusting a run's numbers: failures, overlaps, scores used to choose."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from klear_core.artifacts.manifest import OUTSIDE_KINDS
from klear_core.artifacts.model_files import origin_of
from klear_core.artifacts.remote_paths import store_of
from klear_core.config.data_jobs import GivenModelJob
from klear_core.config.distill import HttpTeacherConfig, LocalTeacherConfig
from klear_core.config.opd import GivenTeacher, OpdTeacherConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import Settings
from klear_core.config.train import GivenModelFacts, HubModelConfig, PublishedModel
from klear_core.errors import ArtifactError
from klear_core.report.run.lineage import Ancestor, ancestors, pointed_artifact

if TYPE_CHECKING:
    from klear_core.report.run.facts import Facts, MissingStage, ModelFacts, StageFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One line at the top of the page. A failure means a missing result, a warning a less reliable one."""

    level: Literal["failure", "warning"]
    where: str
    text: str


def notices(facts: Facts) -> list[Notice]:
    """Return failures first, then warnings, each in pipeline order."""
    return [
        *_missing(facts),
        *_stage_notes(facts),
        *_lacking(facts),
        *_code_state(facts),
        *_unscored(facts),
        *_score_warnings(facts),
        *_teacher_warnings(facts),
    ]


def _missing(facts: Facts) -> list[Notice]:
    """Report missing stages: those with an error failed, the others were not reached."""
    found = [
        Notice(level="failure", where=m.name, text=f"This stage failed: {m.trouble}")
        for m in facts.missing
        if m.trouble
    ]
    not_run = ", ".join(m.name for m in facts.missing if not m.trouble)
    if not_run:
        found.append(Notice(level="failure", where="not run", text=f"No result of {not_run}."))
    return found


def _stage_notes(facts: Facts) -> list[Notice]:
    return [Notice(level="warning", where=s.name, text=note) for s in facts.stages for note in s.manifest.notes]


def _lacking(facts: Facts) -> list[Notice]:
    """Warn of steps where a metric is null: files of earlier versions have null where an update was skipped."""
    found = []
    stages: tuple[StageFacts | MissingStage, ...] = (*facts.stages, *facts.missing)
    for stage in stages:
        steps = {step for series in stage.metrics for step in series.steps}
        names: list[str] = []
        steps_without: set[int] = set()
        for series in stage.metrics:
            without = [t for t, v in zip(series.steps, series.values, strict=True) if v is None]
            # A step counts once, however many of its metrics are missing.
            steps_without |= {*without}
            if without:
                names.append(series.name)
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            text = (
                f"{len(steps_without):,} of {len(steps):,} steps have no number for {', '.join(names[:3])}{more}: "
                f"they are in no curve or mean."
            )
            found.append(Notice(level="warning", where=stage.name, text=text))
    return found


def _code_state(facts: Facts) -> list[Notice]:
    found = []
    dirty = [s.name for s in facts.stages if s.manifest.git_dirty]
    if dirty:
        where = "all stages" if len(dirty) == len(facts.stages) else ", ".join(dirty)
        text = f"Built from code with uncommitted changes ({where}): the commit alone does not reproduce it."
        found.append(Notice(level="warning", where="code", text=text))
    commits = {s.manifest.git_commit for s in facts.stages if s.manifest.git_commit}
    if len(commits) > 1:
        text = f"Stages were built by {len(commits)} different commits; the table of stages says which."
        found.append(Notice(level="warning", where="code", text=text))
    return found


def _unscored(facts: Facts) -> list[Notice]:
    """Warn of problems that are missing from a mean because none of their samples could be judged."""
    return [
        Notice(
            level="warning",
            where=m.stage.name,
            text=f"{len(r.unscored_problems):,} of {r.num_problems:,} problems of {r.benchmark} "
            f"could not be judged at all; "
            f"the score of {m.maker.label} leaves them out.",
        )
        for m in facts.models
        for r in m.scores
        if r.unscored_problems
    ]


def _score_warnings(facts: Facts) -> list[Notice]:
    return [Notice(level="warning", where=w.where, text=w.text) for w in facts.score_warnings]


def _teacher_warnings(facts: Facts) -> list[Notice]:
    return [Notice(level="warning", where="teacher", text=note) for note in teacher_notes(facts.config)]


def teacher_notes(config: PipelineConfig) -> Iterator[str]:
    """Yield a warning for each teacher of on-policy distillation that is not known to be the teacher of the SFT traces.

    With another one the gradient has a bias that no training removes (arXiv 2604.13010, teacher consistency).
    """
    teachers: dict[str, OpdTeacherConfig | None] = {}
    given = config.given
    if config.opd and not (given.rl or given.rl_code or given.evaluate):
        teachers |= {"opd.teacher": config.opd.teacher, "opd.code_teacher": config.opd.code_teacher}
    is_rl_left = not given.rl or config.rl_code is not None
    if is_rl_left and not (given.rl_code or given.evaluate):
        teachers["rl_teacher"] = config.rl_teacher
    for key, teacher in teachers.items():
        if teacher:
            source = teacher.source
            note = _teacher_note(config, key, source.model.as_model() if isinstance(source, GivenTeacher) else None)
            yield from [note] if note else []


def _teacher_note(config: PipelineConfig, key: str, model: PublishedModel | None) -> str:
    """Return the warning of a teacher, None being one that is trained here; empty if it made the traces, or learned
    them, too."""
    if model is None and config.given.sft is None:
        return ""
    name, traces = origin_of(model) if model else "trained on other traces, those of distill", config.distill.teacher
    if config.given.sft is not None or config.given.distill is not None:
        made_by = "whoever made the given traces, which nothing here tells"
        if config.given.sft is not None:
            made_by = "whoever made the traces of the given SFT model, which nothing here tells"
    elif isinstance(traces, LocalTeacherConfig):
        if traces.model is not None and traces.model.as_model() == model:
            return ""
        made_by = origin_of(traces.model.as_model()) if traces.model else "the base model"
    elif isinstance(traces, HttpTeacherConfig):
        # By the name after the organisation: servers are free in what they call a model.
        if isinstance(model, HubModelConfig) and _plain(traces.model) == _plain(model.repo):
            return ""
        made_by = traces.model
    else:
        made_by = f"the {traces.kind} teacher, a program"
    return (
        f"{key} is {name}, and the SFT traces are by {made_by}: with another teacher than that of the traces the "
        "gradient of on-policy distillation is biased, however long it trains (arXiv 2604.13010)"
    )


def _plain(name: str) -> str:
    return name.rpartition("/")[2].lower()


# ---- contamination ----
# Count the benchmark problems that overlap with a model's training data, as the curations behind it found them.


_LEAKS = "leaks"
"""Folder of a curation's artifact with every prompt that any rule matches with a benchmark question."""


def num_contaminated(facts: Facts, model: ModelFacts, benchmark: str) -> int | None:
    """Return the number of a benchmark's problems that overlap with a kept training prompt by any rule.

    None if some training data of the model was not compared with the benchmark. Prompts that the configured rules match
    were dropped, so only matches by the other rules count.
    """
    num_seen = 0
    for warning in facts.score_warnings:
        if model.stage.name in warning.scored_by:
            if benchmark in warning.benchmarks:
                return None
            num_seen = max(num_seen, warning.questions_seen.get(benchmark, 0))
    questions: set[str] = set()
    for stage in stages_behind(facts, model.maker.name):
        questions |= kept_leaks(stage.folder).get(benchmark, frozenset())
        # The run has no stages behind a given model; if an earlier run made it, that run's curation counts.
        for leaks in _leaks_behind_given(stage.folder):
            questions |= leaks.get(benchmark, frozenset())
    return max(num_seen, len(questions))


@cache
def kept_leaks(artifact: Path) -> Mapping[str, frozenset[str]]:
    """Return the ids of questions with a match that was kept, by benchmark; empty for artifacts without leaks."""
    folder = artifact / _LEAKS
    if not folder.is_dir():
        return {}
    import pyarrow.dataset as ds

    # a shard without rows may have no columns
    shards = [file for file in sorted(folder.glob("*.parquet")) if ds.dataset(file).schema.names]
    found: dict[str, set[str]] = defaultdict(set)
    for file in shards:
        table = ds.dataset(file).to_table(columns=["benchmark", "question_id"], filter=~ds.field("is_dropped"))
        for row in table.to_pylist():
            found[row["benchmark"]].add(row["question_id"])
    return {benchmark: frozenset(ids) for benchmark, ids in found.items()}


def stages_behind(facts: Facts, maker: str) -> list[StageFacts]:
    """Return the stage that made a model and all stages of the run that it depends on."""
    by_fingerprint = {stage.manifest.fingerprint: stage for stage in facts.stages}
    ahead = [stage for stage in facts.stages if stage.name == maker]
    found: dict[str, StageFacts] = {}
    # By fingerprint and not by stage name: only stages whose result the model was made from count.
    while ahead:
        stage = ahead.pop()
        found[stage.name] = stage
        inputs = [by_fingerprint.get(record.fingerprint) for record in stage.manifest.inputs]
        ahead += [other for other in inputs if other is not None and other.name not in found]
    return list(found.values())


def num_overlapping(model: Path, benchmarks: Iterable[str]) -> dict[str, int | None]:
    """Return the number of each benchmark's problems that overlap with a model's training data by any rule.

    None if some of the data behind the model, or its list of matches, is gone.
    """
    found: dict[str, int | None] = {}
    for benchmark in benchmarks:
        questions = _questions_behind(model, benchmark)
        found[benchmark] = None if questions is None else len(questions)
    return found


def _questions_behind(model: Path, benchmark: str) -> frozenset[str] | None:
    """Return the ids of a benchmark's questions with a kept match in any data behind a model; None if not known."""
    questions: set[str] = set()
    for leaks in _leaks_behind(model):
        if leaks is None:
            return None
        questions |= leaks.get(benchmark, frozenset())
    return frozenset(questions)


def _leaks_behind(model: Path) -> Iterator[Mapping[str, frozenset[str]] | None]:
    """Yield the kept matches of each artifact that a model is made from, those of earlier runs included.

    None stands for an artifact of which they are not known.
    """
    lineage = ancestors(model)
    found = {(ancestor.manifest.kind, ancestor.manifest.fingerprint) for ancestor in lineage}
    for ancestor in lineage:
        # `ancestors` leaves out artifacts without a manifest here: nothing is known of the data behind them.
        inputs = [record for record in ancestor.manifest.inputs if record.kind not in OUTSIDE_KINDS]
        if any((record.kind, record.fingerprint) not in found for record in inputs):
            yield None
        yield _leaks_of(ancestor, model)
        yield from _leaks_behind_given(ancestor.folder)


def _leaks_behind_given(artifact: Path) -> Iterator[Mapping[str, frozenset[str]]]:
    """Yield the kept matches behind a given model, as far as they are known; nothing for any other artifact.

    Whether its data was compared at all is no matter of these: the user may declare it (`given_contamination`).
    """
    pointed = pointed_artifact(artifact)
    for leaks in _leaks_behind(pointed) if pointed else ():
        if leaks is not None:
            yield leaks


def _leaks_of(ancestor: Ancestor, model: Path) -> Mapping[str, frozenset[str]] | None:
    """Return the kept matches of one artifact of the model's store; None if it has some that are gone."""
    own = ancestor.manifest
    if (ancestor.folder / _LEAKS).is_dir() or not any(file.path.startswith(f"{_LEAKS}/") for file in own.files):
        return kept_leaks(ancestor.folder)
    # With a shared store, this node may have the manifest alone: no folder does not mean no matches.
    fetched = store_of(model).find(own.kind, own.fingerprint)
    return None if fetched is None else kept_leaks(fetched.path)


# ---- chosen ----
# Mark scores that a model was chosen by. The best of several scores is biased upwards, the more so the more there are.
#
# In Klear only `klear ablate` chooses by scores; it leaves a record in the workspace. For models from elsewhere the
# user declares it (`given.*.chosen_on`). Models that are trained from a chosen model are marked as well.


_FOLDER = "choices"
"""Folder of the records, in the workspace."""
_DECLARED = "declared as chosen by this score; a score that a model is chosen by is too high"


class Choice(Settings):
    """Models that a comparison of several by their scores puts first."""

    by: str
    """The command that compared them: `klear ablate losses_hot`."""
    among: int = Field(ge=2)
    """Models that were compared."""
    benchmarks: tuple[str, ...]
    """Benchmarks whose scores decided."""
    models: tuple[str, ...]
    """Artifacts of the models, `kind/fingerprint`."""

    @property
    def sentence(self) -> str:
        """The choice in words."""
        first = f"first among {self.among} models that were compared by this score ({self.by})"
        return f"{first}; a score that a model is chosen by is too high"


def write_choice(root: Path, name: str, choice: Choice) -> None:
    """Write the record to a workspace; a later one of the same name replaces it."""
    file = root / _FOLDER / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(choice.model_dump_json(indent=2) + "\n")
    temporary.replace(file)


def chosen_on(model: Path) -> dict[str, str]:
    """Return why a model's scores are marked, by benchmark, from its artifact and those that it is made from."""
    choices = list(_choices(model.absolute().parents[2] / _FOLDER))
    reasons: dict[str, str] = {}
    for ancestor in ancestors(model):
        manifest = ancestor.manifest
        for choice in choices:
            if f"{manifest.kind}/{manifest.fingerprint}" in choice.models:
                reasons |= dict.fromkeys(choice.benchmarks, choice.sentence)
        if manifest.kind == GivenModelJob.kind:
            declared: Any = manifest.config.get("runtime", {})
            reasons |= dict.fromkeys(declared.get("chosen_on", ()), _DECLARED)
        pointed = pointed_artifact(ancestor.folder)
        if pointed is not None:
            reasons |= chosen_on(pointed)
    return reasons


def chosen_in_run(facts: Facts, model: ModelFacts) -> dict[str, str]:
    """Return why the scores of a run's model are marked, by benchmark; what the run's settings declare counts too."""
    reasons: dict[str, str] = {}
    for stage in stages_behind(facts, model.maker.name):
        if stage.stage.name == model.maker.name:
            reasons |= chosen_on(stage.folder)
        declared = stage.stage.job.given_facts()
        if isinstance(declared, GivenModelFacts):
            reasons |= dict.fromkeys(declared.chosen_on, _DECLARED)
    return reasons


def _choices(folder: Path) -> Iterator[Choice]:
    for file in sorted(folder.glob("*.json")):
        try:
            yield Choice.model_validate_json(file.read_bytes())
        except ValidationError as e:
            raise ArtifactError(f"{file}: not a record of a choice: {e}") from e
