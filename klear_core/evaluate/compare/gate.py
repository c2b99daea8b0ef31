"""Gate one stored evaluation against another by a policy of one's own, for checks in CI.

The parts of the champion's rule (`promotion.py`) are applied by tiers: a benchmark is critical, supporting or advisory.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from klear_core.artifacts.manifest import read_manifest
from klear_core.config.load import explained
from klear_core.config.pipeline import DEFAULT_MARGIN
from klear_core.config.settings import Settings
from klear_core.errors import ConfigError
from klear_core.evaluate.compare.paired import PairedComparison, compare_sampled, compare_together, read_evaluation
from klear_core.evaluate.compare.promotion import Check, better, comparable, non_inferior
from klear_core.evaluate.stats.significance import confidence_at
from klear_core.scores import p_value, points

Tier = Literal["critical", "supporting", "advisory"]
GateVerdict = Literal["passed", "failed", "inconclusive"]
Margin = Annotated[float, Field(ge=0, le=100)]


class GatePolicy(Settings):
    """Rules that a new evaluation must pass against an old one; a TOML file has these keys."""

    margin: Margin = DEFAULT_MARGIN
    """Points that a critical benchmark may lose, by the lower end of the paired interval over other problems."""
    margins: dict[str, Margin] = {}
    """Margin of single benchmarks, in place of `margin`."""
    tiers: dict[str, Tier] = {}
    """Tier of single benchmarks. `critical`, the default: a loss of the margin must be excluded. `supporting`: no loss
    may be shown. `advisory`: is reported, and decides nothing."""
    gain: bool = False
    """Whether a gain must be shown on a benchmark that is not advisory, or on all of these together."""
    looks: tuple[Annotated[float, Field(ge=0.1, le=1)], ...] = (1.0,)
    """Shares of the planned samples at which this gate is asked, the last 1. Several share the error of one."""

    @model_validator(mode="after")
    def _looks_grow(self) -> Self:
        if self.looks[-1:] != (1.0,) or list(self.looks) != sorted(set(self.looks)):
            raise ValueError(f"looks {list(self.looks)} must grow to 1")
        return self


class GateResult(Settings):
    """The verdict on a new evaluation, with its checks."""

    verdict: GateVerdict
    """`inconclusive` if no check failed for good, but the data cannot decide all of them."""
    checks: tuple[Check, ...]
    comparisons: tuple[PairedComparison, ...]
    """Paired differences, new minus old; empty if the two cannot be compared."""
    look: int = 1
    """Number of the look that this verdict has spent, from 1."""


def read_policy(file: Path) -> GatePolicy:
    """Return the policy in a TOML file. Raise ConfigError, with the key and the value, if it cannot be used."""
    try:
        return GatePolicy.model_validate(tomllib.loads(file.read_text(encoding="utf-8-sig")))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read: {e}") from e
    except ValidationError as e:
        raise ConfigError(f"{file}: {explained(e, GatePolicy)}") from e


def take_look(policy: GatePolicy, new: Path, old: Path, *, record: Path) -> int:
    """Return the number of the present look at two models, and spend it in the folder `record`.

    Looks are counted for two models and a policy: new samples are the next look, and the same evaluations the same one
    again. Raise ConfigError if all looks are spent. A policy with one look records nothing.
    """
    num_looks = len(policy.looks)
    if num_looks == 1:
        return 1
    pair = f"{old.name} {new.name}"
    question = [_model_of(old), _model_of(new), policy.model_dump(mode="json")]
    folder = record / hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:20]
    folder.mkdir(parents=True, exist_ok=True)
    for look in range(1, num_looks + 1):
        file = folder / f"look_{look}"
        try:
            with file.open("x") as spent:  # fails if it exists: of two processes one has this look
                spent.write(pair)
        except FileExistsError:
            if file.read_text() != pair:
                continue
        return look
    raise ConfigError(
        f"all {num_looks} looks of this policy at these two models are spent, by the evaluations in {folder}"
    )


def _model_of(evaluation: Path) -> str:
    """Return the model of an evaluation, or the evaluation where its manifest names none."""
    models = [record for record in read_manifest(evaluation).inputs if record.role == "model"]
    return f"{models[0].kind}/{models[0].fingerprint}" if models else evaluation.name


def gate(policy: GatePolicy, new: Path, old: Path, *, take: Callable[[], int] = lambda: 1) -> GateResult:
    """Gate the evaluation in the folder `new` against that in `old`, at the look of the policy that `take` returns.

    What cannot be asked takes none. Scores that cannot be compared fail. Raise ConfigError if both are one evaluation,
    which is no comparison, or if the policy names a benchmark that they lack.
    """
    if new.resolve() == old.resolve():
        raise ConfigError(f"both are the same evaluation, {new.name[:8]}: there is nothing to compare")
    found, before = read_evaluation(new), read_evaluation(old)
    unknown = sorted((policy.tiers.keys() | policy.margins.keys()) - found.reports.keys())
    if unknown:
        there = ", ".join(sorted(found.reports))
        raise ConfigError(f"the policy names {', '.join(map(repr, unknown))}, but the benchmarks are {there}")
    look = take()
    checks = comparable(found, before, is_="first evaluation")
    comparisons: tuple[PairedComparison, ...] = ()
    if all(check.is_passed for check in checks):
        level = _level(policy, look)
        comparisons = compare_sampled(before, found, level=level)
        checks += [_check(policy, comparison) for comparison in comparisons]
        if policy.gain:
            counted = [c for c in comparisons if policy.tiers.get(c.benchmark) != "advisory"]
            together = compare_together(before, found, [c.benchmark for c in counted], level=level)
            checks.append(better(counted, together, {}))
    failed = [check for check in checks if not check.is_passed]
    verdict: GateVerdict = "passed"
    if failed:
        is_inconclusive = all(check.is_inconclusive for check in failed)
        verdict = "inconclusive" if is_inconclusive else "failed"
    return GateResult(verdict=verdict, checks=tuple(checks), comparisons=comparisons, look=look)


def _level(policy: GatePolicy, look: int) -> Callable[[float], float]:
    """Return the function that gives the confidence level of a look."""
    return lambda confidence: confidence_at(look, policy.looks, confidence=confidence)


def _check(policy: GatePolicy, c: PairedComparison) -> Check:
    match policy.tiers.get(c.benchmark, "critical"):
        case "critical":
            return non_inferior(c, margin=policy.margins.get(c.benchmark, policy.margin), setting="margins")
        case "supporting":
            text = f"{points(c.difference)} points, {p_value(c.p_corrected)}; must not be shown to be worse"
            return Check(rule="not worse", benchmark=c.benchmark, is_passed=not c.is_worse, text=text)
        case "advisory":
            text = f"{points(c.difference)} points, {p_value(c.p_corrected)}"
            return Check(rule="reported", benchmark=c.benchmark, is_passed=True, text=text)
