"""Choose the problems that an RL stage trains on; the others are counted by reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from klear_core.artifacts.ledger import LedgerStep
from klear_core.artifacts.records import read_shards
from klear_core.code_tests import CodeReference
from klear_core.config.rollout import PromptFilterConfig
from klear_core.errors import ConfigError, DataError
from klear_core.scores import read_pass_rates
from klear_core.types import PassRate, Problem, UnverifiableReference


def choose_problems(artifact: Path, domain: str, cfg: PromptFilterConfig) -> tuple[list[Problem], LedgerStep]:
    """Return the problems of this domain that the filter keeps, and a ledger step that counts the others.

    Raise ConfigError if the filter needs pass rates and the artifact has none, DataError if no problem is left.
    """
    # Empty without a filter by pass rate, which then looks none up; None if the artifact has no file of them.
    rates = read_pass_rates(artifact) if cfg.needs_pass_rates else {}
    if rates is None:
        raise ConfigError(
            f"{artifact}: its problems have no pass rates, which rl.prompts.min_pass_rate and max_pass_rate compare: "
            "measure them with --set 'tag_rl={}', or --set 'tag={}' where RL has no prompts of its own"
        )
    num_problems = 0
    chosen: list[Problem] = []
    dropped: Counter[str] = Counter()
    for problem in read_shards(artifact / "problems", Problem):
        num_problems += 1
        reason = drop_reason(problem, domain, cfg, rates)
        if reason:
            dropped[reason] += 1
        else:
            chosen.append(problem)
    if not chosen:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
        raise DataError(
            f"{artifact}: RL can train on none of its {num_problems:,} problems ({reasons}); it needs {domain} "
            "problems with answers or tests that rl.prompts keeps"
        )
    return chosen, LedgerStep(
        step="choose_problems",
        unit="problem",
        num_in=num_problems,
        num_out=len(chosen),
        dropped=dict(sorted(dropped.items())),
    )


def drop_reason(problem: Problem, domain: str, cfg: PromptFilterConfig, rates: Mapping[str, PassRate]) -> str:
    """Return why RL does not train on a problem; empty if it does."""
    # A problem is counted once, under the first reason that holds.
    if problem.domain != domain:
        return "other_domain"
    if isinstance(problem.reference, UnverifiableReference):
        return "unverifiable"
    if isinstance(problem.reference, CodeReference) and problem.reference.num_tests < cfg.min_tests:
        return "few_tests"
    if not cfg.needs_pass_rates:
        return ""
    rate = rates.get(problem.problem_id)
    if rate is None:
        return "no_pass_rate"
    if rate.value < cfg.min_pass_rate:
        return "low_pass_rate"
    return "high_pass_rate" if rate.value > cfg.max_pass_rate else ""
