"""The tables of docs/data/ablations.md are what the single runs beside them say; run this file to write them anew."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from pathlib import Path
from statistics import mean

import pytest

from flows.ablate import plan_runs
from klear_core.config.grids import AblationConfig, load_ablation
from klear_core.config.rl import RlConfig
from klear_core.evaluate.compare.published import as_markdown, read_cells, table_of
from klear_core.evaluate.stats.intervals import seed_spread
from klear_core.evaluate.stats.significance import fisher_exact_p

ROOT = Path(__file__).parents[3]
MEASURED = sorted((ROOT / "docs" / "data").glob("*.jsonl"))
DATA = [file for file in MEASURED if "variant" in json.loads(file.read_text().partition("\n")[0])]
"""Runs of grids; other measurements have tests of their own."""
TABLES = ROOT / "docs" / "data" / "ablations.md"
PUBLISHED = dict(re.findall(r"^## ([\w.]+)\n\n((?:\|.*\n)+)", TABLES.read_text(), re.MULTILINE))


def grid_of(file: Path) -> AblationConfig:
    """Return the grid of a file of runs: GRID.jsonl, or GRID.PROFILE.jsonl on another profile than the grid's own."""
    name, _, profile = file.stem.partition(".")
    return load_ablation(ROOT / "configs" / "ablations" / f"{name}.toml", profile or None)


def table(file: Path) -> str:
    cfg = grid_of(file)
    return (
        as_markdown(table_of(read_cells(file), cfg.reference, cfg.references)).partition("\n\n")[0].rstrip("\n") + "\n"
    )


def test_every_file_of_runs_has_its_table() -> None:
    assert list(PUBLISHED) == [file.stem for file in DATA]
    assert DATA


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_a_published_table_is_computed_from_its_runs(file: Path) -> None:
    assert PUBLISHED[file.stem] == table(file)


@pytest.mark.parametrize("file", DATA, ids=lambda file: file.stem)
def test_the_runs_are_those_of_the_grid_each_once(file: Path) -> None:
    cfg = grid_of(file)
    records = read_cells(file)
    planned = plan_runs(cfg, []).items()
    asked = {(cell.variant, cell.rate, cell.seed): run.training for cell, run in planned}
    assert sorted((r.variant, r.learning_rate, r.seed) for r in records) == sorted(asked)
    for r in records:
        training = asked[r.variant, r.learning_rate, r.seed]
        if isinstance(training, RlConfig):  # the number of SFT's updates follows from its data
            assert (r.minibatches_per_step, r.steps) == (training.minibatches_per_step, training.num_steps)
        assert r.collapsed == r.result.has_collapsed
        assert r.result.commit


def test_collapses_on_stale_samples_that_plan_warns_of_are_those_of_the_runs() -> None:
    """GPPO's plain form collapses at the rate at which M2PO, CE-GPPO and the learner's log-probs do not."""
    runs = [
        run
        for name in ("stale", "stale_others", "stale_old_logps")
        for run in read_cells(ROOT / f"docs/data/{name}.jsonl")
    ]
    collapsed = Counter(r.variant for r in runs if r.collapsed)
    at_half_the_rate = {"gppo_16": 1}
    reused = {"sampler_4": 3, "sampler_16": 8}
    assert collapsed == {"gppo_16_hot": 8, "gppo_4": 3, **at_half_the_rate, **reused}
    compared = {"gppo_4", "gppo_16_hot", "m2po_4", "m2po_16", "ce_gppo_16", "learner_4", "learner_16"}
    assert {(r.variant, r.learning_rate) for r in runs if r.variant in compared} == {(v, 2.5e-5) for v in compared}
    of_smol = read_cells(ROOT / "docs/data/stale_smol.jsonl")
    assert Counter((run.variant, run.collapsed) for run in of_smol) == {("gppo_8", True): 3, ("m2po_8", False): 3}
    assert fisher_exact_p((8, 0), (8, 8)) == pytest.approx(2 / math.comb(16, 8))


def test_the_published_reward_loses_on_each_seed_what_the_safe_one_gains() -> None:
    runs = {(r.variant, r.seed): r for r in read_cells(ROOT / "docs/data/smol_rewards.jsonl")}
    assert Counter(variant for variant, seed in runs if runs[variant, seed].collapsed) == {"published": 4}
    change = {key: run.result.after - (run.result.before or 0) for key, run in runs.items()}
    gains = [change[variant, seed] for variant, seed in runs if variant == "safe"]
    assert max(change[variant, seed] for variant, seed in runs if variant == "published") < 0 < min(gains)
    found = seed_spread(gains, has_collapsed=False, bounds=(-1, 1))
    assert found.interval is not None
    shown = [f"{100 * value:.1f}" for value in (found.mean, found.interval.low, found.interval.high)]
    assert "{} points on average ({} to {})".format(*shown) in (ROOT / "docs/data/grids.md").read_text()
    assert fisher_exact_p((4, 0), (5, 5)) == pytest.approx(1 / 21)


def test_every_run_of_the_last_grid_of_stale_samples_ends_above_its_sft_model() -> None:
    runs = read_cells(ROOT / "docs/data/stale_more.jsonl")
    assert len({(run.variant, run.seed) for run in runs}) == 12 * 8
    assert not [run for run in runs if run.collapsed or run.result.after <= (run.result.before or 0)]


def test_the_page_of_distillation_has_the_scores_of_its_runs_by_seed() -> None:
    """The teachers' scores, its last column, are of evaluations that are not kept."""
    page = (ROOT / "docs/data/opd.md").read_text()
    runs = read_cells(ROOT / "docs/data/distillation.jsonl")
    for seed in load_ablation(ROOT / "configs/ablations/distillation.toml").seeds:
        of_seed = {r.variant: r.result for r in runs if r.seed == seed}
        (before,) = {result.before for result in of_seed.values()}
        after = [of_seed[name].after for name in ("rl", "opd", "opd_rl", "opd_other", "opd_other_rl")]
        assert before is not None
        assert f"\n| {seed} | " + " | ".join(f"{100 * score:.1f}" for score in (before, *after)) + " | " in page


def test_the_difference_at_own_rates_is_computed_from_the_runs() -> None:
    """Rates were chosen on other seeds: 1e-4 for the paper's loss, 2e-4 for clipping."""
    paper = {r.seed: r.result.after for r in read_cells(ROOT / "docs/data/rates.jsonl") if r.learning_rate == 1e-4}
    clip = {
        r.seed: r.result.after for r in read_cells(ROOT / "docs/data/clip_at_its_rate.jsonl") if r.variant == "clip"
    }
    found = seed_spread([clip[seed] - paper[seed] for seed in paper], has_collapsed=False, bounds=(-1, 1))
    assert found.interval is not None
    value, low, high = (f"{100 * x:+.1f}" for x in (found.mean, found.interval.low, found.interval.high))
    assert f"`clip` minus `paper` {value} ({low} to {high})" in (ROOT / "docs" / "data" / "grids.md").read_text()


def test_the_share_below_the_range_is_small_in_runs_that_do_not_collapse() -> None:
    """docs/ablations.md. Each run counts once: some are in two files."""
    found = {}
    for file in DATA:
        for run in read_cells(file):
            low = run.result.token_shares.get("A<0, r low")
            is_older = file.stem.startswith("stale") and not run.variant.endswith("_1")
            if low is not None and not is_older and "gspo" not in run.variant:
                found[run.seed, run.learning_rate, low, run.result.after] = (run.collapsed, low > 0.01)
    assert Counter(found.values()) == {
        (False, False): 416,
        (False, True): 2,
        (True, True): 41,
        (True, False): 10,
    }


def test_the_curriculum_finds_one_per_cent_more_informative_groups_and_gains_no_more() -> None:
    """docs/data/grids.md."""
    groups, points = defaultdict(list), defaultdict(list)
    for run in read_cells(ROOT / "docs/data/curriculum.jsonl"):
        found = run.result
        megatokens = found.sampled_tokens / 1e6
        groups[run.variant].append(found.informative_groups / megatokens)
        points[run.variant].append(100 * (found.after - found.before) / megatokens)
    assert {name: round(mean(values)) for name, values in groups.items()} == {
        "curriculum": 1151,
        "filtered": 1136,
        "oversampled": 1152,
        "uniform": 1139,
    }
    assert {name: round(mean(values), 1) for name, values in points.items()} == {
        "curriculum": 6.1,
        "filtered": 6.5,
        "oversampled": 4.9,
        "uniform": 6.6,
    }


if __name__ == "__main__":
    preamble, _, _ = TABLES.read_text().partition("\n## ")
    TABLES.write_text(preamble + "".join(f"\n## {file.stem}\n\n{table(file)}" for file in DATA))
