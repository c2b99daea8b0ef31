"""Describe immutable, content-addressed results of stages, and their ledger.

An artifact is a folder that a stage wrote, with a manifest. It is addressed by its fingerprint: a hash of what it is
made from (kind, code version, settings that change the result, inputs), so that it can be computed before anything has
run.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlparse

from pydantic import Field, JsonValue, ValidationError, model_validator

from klear_core.config.settings import Settings, YieldLimits, result_settings
from klear_core.errors import ArtifactError, DataError

# ---- ledger ----
# Count what entered a step, what left it, and what was dropped by reason; the sums must agree.


class LedgerStep(Settings):
    """One step of a stage. `num_in == num_out + sum(dropped)`, checked on construction."""

    step: str
    """The step as a slug: `dedup`, `judge`, `group_filter`."""
    unit: str
    """The items counted: `problem`, `trace`, `rollout`, `answer`, `row`."""
    num_in: int = Field(ge=0)
    num_out: int = Field(ge=0)
    dropped: dict[str, int] = {}
    """Count by reason slug."""
    noted: dict[str, int] = {}
    """Counts of items that were kept all the same (cut, retried, wrong but kept); not part of the sum."""

    @classmethod
    def of(
        cls, step: str, unit: str, *, num_in: int, dropped: Mapping[str, int], noted: Mapping[str, int] | None = None
    ) -> Self:
        """Return the step in which all items that were not dropped came out."""
        num_out = num_in - sum(dropped.values())
        return cls(step=step, unit=unit, num_in=num_in, num_out=num_out, dropped=dict(dropped), noted=dict(noted or {}))

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        lost = sum(self.dropped.values())
        if self.num_in != self.num_out + lost:
            raise ValueError(
                f"ledger step {self.step!r} does not add up: {self.num_in} in, {self.num_out} out, {lost} dropped"
            )
        return self


@dataclass(slots=True)
class ReasonCounts:
    """Counts what becomes of the items of each step of a stage, by reason; an example of each step can be kept.

    Curation and distillation count what they drop, RL also what it trains on.
    """

    counts: Counter[str] = field(default_factory=Counter)
    """By step and reason: `select/wrong`."""
    examples: dict[str, str] = field(default_factory=dict)
    """First item with an example by step, as its id or place."""

    def count(self, step: str, reason: str, count: int = 1, *, example: str = "") -> None:
        """Count items of a step under this reason."""
        self.counts[f"{step}/{reason}"] += count
        if example:
            self.examples.setdefault(step, example)

    def add(self, later: ReasonCounts) -> None:
        """Add the counts of items that came after those counted so far."""
        self.counts.update(later.counts)
        self.examples = later.examples | self.examples

    def of(self, *steps: str) -> dict[str, int]:
        """Return the counts of these steps by reason, in the order of first counts and without those of zero."""
        found: Counter[str] = Counter()
        for step in steps:
            for name, n in self.counts.items():
                if n and name.startswith(f"{step}/"):
                    found[name.removeprefix(f"{step}/")] += n
        return dict(found)

    def ledger(
        self, units: Mapping[str, str], *, num_in: int, noted: Mapping[str, Mapping[str, int]]
    ) -> tuple[LedgerStep, ...]:
        """Return the ledger of steps that drop what they count, by name with their units; reasons in name order."""
        steps: list[LedgerStep] = []
        for step, unit in units.items():
            dropped = dict(sorted(self.of(step).items()))
            steps.append(LedgerStep.of(step, unit, num_in=num_in, dropped=dropped, noted=noted.get(step, {})))
            num_in = steps[-1].num_out
        return tuple(steps)


class FileRecord(Settings):
    """One file of an artifact, or one that it refers to."""

    path: str
    """Path relative to the artifact or the given folder, with `/`."""
    size: int
    """Size in bytes."""
    sha256: str


class GivenRecord(Settings):
    """The origin of a given result, with its files, checksums and licence."""

    origin: str
    """Folder, or `owner/name@0123456` on the Hub."""
    licence: str
    """Licence that is declared or that its card states; `not stated` otherwise."""
    files: tuple[FileRecord, ...]


class StageSummary(Settings):
    """A stage's summary of its result; it becomes part of the artifact's manifest."""

    counts: dict[str, int | float] = {}
    """The few numbers to see first (problems, tokens, steps, score)."""
    ledger: tuple[LedgerStep, ...] = ()
    seeds: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    """Warnings for the reader of the report (less isolation than asked for, all ratios were 1)."""
    given: GivenRecord | None = None
    """Origin of the result, if the stage took one that exists."""


# ---- manifest ----


MANIFEST = "manifest.json"
MANIFEST_SUM = "manifest.json.sha256"
"""File with the checksum of the manifest; the manifest has those of all other files."""
POINTER = "model.json"
"""File of a model's artifact that only points to a folder of this machine."""


class ArtifactId(Settings):
    """The name of an artifact; enough to depend on it."""

    kind: str
    fingerprint: str


class ArtifactRef(ArtifactId):
    """A reference to a finished artifact; the only thing that travels between tasks."""

    uri: str
    created_at: datetime
    counts: dict[str, int | float] = {}

    @property
    def path(self) -> Path:
        """The artifact's folder, for stores on a file system."""
        return Path(unquote(urlparse(self.uri).path))


OUTSIDE_KINDS = ("file", "hub")
"""Kinds of inputs that are no artifacts: local files by their content, repositories of the Hub by their commit."""


class InputRecord(ArtifactId):
    """One input of an artifact, by its role (`model`, `traces`, the path of a local file, or the name of a repository
    of the Hub)."""

    role: str


class Manifest(Settings):
    """All that is recorded about an artifact, to explain it years later, except its content."""

    kind: str
    fingerprint: str
    stage: str
    """The name of the stage in the pipeline that built it (`evaluate_rl`)."""
    code_version: int
    config: dict[str, JsonValue]
    """All settings of the stage."""
    result_config: dict[str, JsonValue]
    """The settings that are part of the fingerprint."""
    inputs: tuple[InputRecord, ...]
    git_commit: str | None
    """None if the code does not come from a git checkout."""
    git_dirty: bool
    versions: dict[str, str]
    """Python and the libraries that matter."""
    seeds: dict[str, int]
    counts: dict[str, int | float]
    ledger: tuple[LedgerStep, ...]
    notes: tuple[str, ...]
    mlflow_run_id: str | None
    created_at: datetime
    attempts: int
    """Builds that were started, including those that were killed."""
    wall_s: float
    """Seconds that the last attempt took."""
    given: GivenRecord | None = None
    """Origin, licence and checksums of a result that was given; None if the stage made it."""
    files: tuple[FileRecord, ...] = ()
    """Filled in by the store."""


def fingerprint(kind: str, version: int, settings: Settings, inputs: Sequence[ArtifactId]) -> str:
    """Return 20 hex digits over everything an artifact is made from.

    `runtime` settings do not count; the order of inputs does.
    """
    # The roles of inputs are left out: that of a file is its path, and the same content may be elsewhere.
    recipe = {
        "kind": kind,
        "version": version,
        "settings": result_settings(settings),
        "inputs": [[i.kind, i.fingerprint] for i in inputs],
    }
    # sorted keys and fixed separators: equal recipes must give equal text
    text = json.dumps(recipe, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of an artifact's folder. ArtifactError if it is missing, altered or not a manifest."""
    path = folder / MANIFEST
    try:
        content = path.read_bytes()
        expected = (folder / MANIFEST_SUM).read_text().split()[:1]
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError) as e:
        raise ArtifactError(f"{path}: missing or unreadable, so this is not a finished artifact ({e})") from e
    if expected != [hashlib.sha256(content).hexdigest()]:
        raise ArtifactError(f"{path}: altered (its SHA-256 is not the one in {MANIFEST_SUM})")
    return parse_manifest(content, str(path))


def lineage_folder(root: Path, own: ArtifactId) -> Path:
    """Return where a store below `root` keeps the manifest of an ancestor whose files are on other nodes."""
    return root / ".lineage" / own.kind / own.fingerprint


def manifest_folder(root: Path, own: ArtifactId) -> Path | None:
    """Return the folder that holds an artifact's manifest, with or without its files; None if neither is here."""
    for folder in (root / own.kind / own.fingerprint, lineage_folder(root, own)):
        if folder.is_dir():
            return folder
    return None


def parse_manifest(content: bytes, place: str) -> Manifest:
    """Return the manifest in `content`. ArtifactError, which names its `place`, if it is not one."""
    try:
        return Manifest.model_validate_json(content)
    except ValidationError as e:
        raise ArtifactError(f"{place}: not a manifest of this version of Klear: {e}") from e


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its checksum, in the format of `sha256sum`."""
    content = (manifest.model_dump_json(indent=2) + "\n").encode()
    (folder / MANIFEST).write_bytes(content)
    (folder / MANIFEST_SUM).write_text(f"{hashlib.sha256(content).hexdigest()}  {MANIFEST}\n")


# ---- yield ----
# Stop a stage that would lose almost all of its input, and warn of one that loses much.


def check_yield(
    step: LedgerStep, what: str, floor: YieldLimits, *, key: str, remedy: str, example: str = ""
) -> tuple[str, ...]:
    """Return a warning if the share that a step kept is below `floor.warn_below`; see `yield_text`.

    DataError if nothing is left, whatever the floor, or less than `floor.stop_below`. `key` is the floor's place in the
    settings.
    """
    text, frac = yield_text(step, what, example=example), step.num_out / max(step.num_in, 1)
    # Also with `stop_below = 0`: nothing can be made from nothing.
    if step.num_out == 0:
        raise DataError(f"{text}. {remedy}")
    if frac < floor.stop_below:
        raise DataError(
            f"{text}; that is {frac:.1%}, less than {key}.stop_below = {floor.stop_below:g}. "
            f"{remedy}, or lower that setting"
        )
    if frac < floor.warn_below:
        return (f"{text}; that is {frac:.1%}, less than {key}.warn_below = {floor.warn_below:g}",)
    return ()


def yield_text(step: LedgerStep, what: str, *, example: str = "") -> str:
    """Return how much a step kept and why the rest was lost: `8 of 10 rows can be used; lost: 2 not_json`.

    `what` names the items, `example` a lost one with its id or place.
    """
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in sorted(step.dropped.items(), key=lambda item: -item[1]))
    lost = f"; lost: {reasons}" if reasons else ""
    first = f"; the first: {example}" if example else ""
    return f"{step.num_out:,} of {step.num_in:,} {what}{lost}{first}"
