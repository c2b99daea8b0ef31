from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from evaluations import write_scores
from klear_command import FEW_PROBLEMS, ROOT, start
from manifests import manifest

from flows.ablate import (
    Cell,
    Compared,
    GridOptions,
    ablate_grid,
    plan_runs,
    record_choice,
    records_of,
    require_complete,
    require_distinct_runs,
    run_grid,
)
from klear_core.config.data import ProceduralSource
from klear_core.config.grids import AblationConfig, load_ablation
from klear_core.config.load import load_profile
from klear_core.errors import ConfigError, KlearError, TrainingError
from klear_core.evaluate.compare.ablation import TOKEN_SHARES, RunResult
from klear_core.evaluate.compare.published import AblationTable, as_markdown, read_cells, table_of
from klear_core.pipeline.graph import open_store
from klear_core.pipeline.preflight.checks import require_ready
from klear_core.report.run.warnings import Choice

GRID = AblationConfig(
    profile="smoke",
    overrides=("rl.num_steps=2",),
    variants={"paper": (), "clip": ("rl.loss.kind=clip", "rl.loss.dual_clip=10")},
    reference="paper",
    learning_rates=(1e-4, 2e-4),
    seeds=(1, 2),
)
GRIDS = sorted((ROOT / "configs" / "ablations").glob("*.toml"))
MEASURED = [file for file in GRIDS if load_ablation(file).profile == "laptop" and not load_ablation(file).paper]
OF_PAPER = [file for file in GRIDS if load_ablation(file).paper]


class Runs:
    """Stands for the pipeline: a score by variant and rate, and what was asked for, in order."""

    def __init__(self, scores: dict[tuple[str, float], float], failing: Cell | None = None) -> None:
        self.scores = scores
        self.failing = failing
        self.asked: list[Cell] = []

    def __call__(self, cell: Cell) -> RunResult:
        self.asked.append(cell)
        if cell == self.failing:
            raise TrainingError("stalled")
        score = self.scores[cell.variant, cell.rate] + cell.seed / 100
        return RunResult(before=0.5, after=score, token_shares=dict.fromkeys(TOKEN_SHARES, 0.0), max_ratio=1, entropy=1)


SCORES = {("paper", 1e-4): 0.3, ("paper", 2e-4): 0.1, ("clip", 1e-4): 0.2, ("clip", 2e-4): 0.4}


def cell(variant: str, rate: float, seed: int) -> Cell:
    return Cell(variant=variant, rate=rate, seed=seed)


def test_every_variant_runs_at_every_rate_on_every_seed() -> None:
    runs = Runs(SCORES)
    table = run_grid(GRID, plan_runs(GRID, []), runs)
    assert runs.asked == [cell(v, r, s) for r in (1e-4, 2e-4) for s in (1, 2) for v in ("paper", "clip")]
    assert [(row.variant, row.learning_rate, row.score.mean) for row in table.rows] == [
        ("paper", 1e-4, pytest.approx(0.315)),
        ("clip", 1e-4, pytest.approx(0.215)),
        ("paper", 2e-4, pytest.approx(0.115)),
        ("clip", 2e-4, pytest.approx(0.415)),
        ("paper", None, pytest.approx(0.315)),
        ("clip", None, pytest.approx(0.415)),
    ]


def test_a_variant_with_rates_of_its_own_runs_at_these_alone() -> None:
    grid = GRID.model_copy(update={"learning_rates": (1e-4,), "rates": {"clip": (2e-4,)}})
    runs = Runs(SCORES)
    table = run_grid(grid, plan_runs(grid, []), runs)
    assert runs.asked == [cell(v, r, s) for s in (1, 2) for v, r in (("paper", 1e-4), ("clip", 2e-4))]
    assert [(row.variant, row.learning_rate) for row in table.rows] == [("paper", 1e-4), ("clip", 2e-4)]
    assert table.rows[1].difference is not None
    assert table.rows[1].difference.mean == pytest.approx(0.1)
    assert plan_runs(grid, [])[cell("clip", 2e-4, 1)].config.rl.optim.lr == 2e-4


def test_variants_with_different_numbers_of_rates_run_seed_by_seed() -> None:
    grid = GRID.model_copy(update={"rates": {"clip": (4e-4,)}})
    assert [(c.rate, c.seed, c.variant) for c in plan_runs(grid, [])] == [
        (1e-4, 1, "paper"),
        (4e-4, 1, "clip"),
        (1e-4, 2, "paper"),
        (4e-4, 2, "clip"),
        (2e-4, 1, "paper"),
        (2e-4, 2, "paper"),
    ]


def test_a_run_has_only_the_stages_that_the_comparison_needs() -> None:
    """In the pipeline's order code RL and the base model's evaluation come before the evaluation after math RL."""
    config = load_profile(ROOT / "configs/desk")
    assert Compared.of(config, "rl").chosen == (
        "benchmarks",
        "curate",
        "base",
        "distill",
        "sft",
        "rl",
        "evaluate_sft",
        "evaluate_rl",
    )


def test_the_models_that_a_grid_puts_first_are_recorded(tmp_path: Path) -> None:
    """`clip` at 2e-4 has the best mean; on seed 1 `paper` at 1e-4 was better."""
    scores = {("paper", 1e-4): 0.3, ("paper", 2e-4): 0.1, ("clip", 1e-4): 0.2, ("clip", 2e-4): 0.4}
    runs = Runs(scores)

    def run(cell: Cell) -> RunResult:
        result = runs(cell)
        lucky = (cell.variant, cell.rate, cell.seed) == ("paper", 1e-4, 1)
        return result.model_copy(update={"after": 0.45}) if lucky else result

    planned = plan_runs(GRID, [f"workspace.root={tmp_path}"])
    table = run_grid(GRID, planned, run, benchmarks=["heldout"])
    record_choice(table, planned, "grid", "klear ablate grid")
    choice = Choice.model_validate_json((tmp_path / "choices" / "grid.json").read_text())
    assert (choice.by, choice.among, choice.benchmarks) == ("klear ablate grid", 8, ("heldout",))
    first = [cell("clip", 2e-4, 1), cell("clip", 2e-4, 2), cell("paper", 1e-4, 1)]
    ids = [planned[c].fingerprints()["rl"] for c in first]
    assert choice.models == tuple(f"rl/{own.fingerprint}" for own in ids)
    assert "- chosen on this benchmark: whatever row is best here was chosen by its score on heldout" in as_markdown(
        table
    )


def test_a_grid_of_one_row_chooses_nothing(tmp_path: Path) -> None:
    alone = GRID.model_copy(update={"variants": {"paper": ()}, "learning_rates": (1e-4,)})
    planned = plan_runs(alone, [f"workspace.root={tmp_path}"])
    table = run_grid(alone, planned, Runs(SCORES), benchmarks=["heldout"])
    record_choice(table, planned, "grid", "klear ablate grid")
    assert not (tmp_path / "choices").exists()
    assert "chosen on" not in as_markdown(table)


def test_a_run_that_fails_is_named_and_the_others_go_on() -> None:
    runs = Runs(SCORES, failing=cell("clip", 2e-4, 1))
    table = run_grid(GRID, plan_runs(GRID, []), runs)
    assert len(runs.asked) == 8
    assert table.failures == {"clip, lr 0.0002, seed 1": "stalled"}
    assert [(row.variant, row.learning_rate) for row in table.rows][2:4] == [("paper", 2e-4), ("paper", None)]


def test_a_grid_with_a_failed_run_ends_in_an_error() -> None:
    with pytest.raises(KlearError, match="1 of 8 runs failed"):
        require_complete(run_grid(GRID, plan_runs(GRID, []), Runs(SCORES, failing=cell("clip", 2e-4, 1))), num_runs=8)
    require_complete(run_grid(GRID, plan_runs(GRID, []), Runs(SCORES)), num_runs=8)


def test_every_run_is_kept_once_with_its_settings() -> None:
    planned = plan_runs(GRID, [])
    records = records_of(run_grid(GRID, planned, Runs(SCORES)), planned)
    assert sorted((r.variant, r.learning_rate, r.seed) for r in records) == sorted(
        (c.variant, c.rate, c.seed) for c in planned
    )
    assert {(r.minibatches_per_step, r.steps) for r in records} == {
        (planned[cell("paper", 1e-4, 1)].config.rl.minibatches_per_step, 2)
    }
    assert [r.collapsed for r in records if (r.variant, r.learning_rate) == ("paper", 2e-4)] == [True, True]


def test_a_run_is_the_profile_with_the_overrides_of_grid_variant_and_command_line() -> None:
    config = plan_runs(GRID, ["workspace.root=elsewhere"])[cell("clip", 2e-4, 2)].config
    assert (config.name, config.seed, config.rl.num_steps, config.workspace.root) == ("smoke", 2, 2, "elsewhere")
    assert (config.rl.loss.kind, config.rl.loss.dual_clip, config.rl.optim.lr) == ("clip", 10, 2e-4)
    assert config.rl.optim.betas == (0.9, 0.95)


@pytest.mark.slow
@pytest.mark.parametrize("file", GRIDS, ids=lambda file: file.stem)
def test_every_grid_of_the_repository_can_be_planned(klear, tmp_path: Path, file: Path) -> None:
    cfg = load_ablation(file)
    planned = klear("ablate", file, "--dry-run", "--set", f"workspace.root={tmp_path}")
    num_runs = len(cfg.seeds) * sum(
        len(cfg.rates.get(variant, cfg.learning_rates) or [None]) for variant in cfg.variants
    )
    assert planned.status == 0, planned.err
    is_counted = planned.out.startswith(f"{num_runs} runs; artifacts to make:")
    # One grid takes a model that the commands in its first lines make.
    assert is_counted or (file.stem == "distillation" and "teachers/other: no such file" in planned.out), planned.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", MEASURED, ids=lambda file: file.stem)
def test_a_grid_keeps_the_data_that_it_was_measured_on(file: Path) -> None:
    cfg = load_ablation(file)
    config = next(iter(plan_runs(cfg, []).values())).config
    (benchmark,), (source,) = config.benchmarks, config.curate.sources
    assert isinstance(benchmark.source, ProceduralSource)
    assert isinstance(source, ProceduralSource)
    assert (benchmark.num_samples, benchmark.source.num_problems, benchmark.source.num_operations) == (
        4,
        256,
        (2, 4, 6, 8),
    )
    assert (source.num_problems, source.num_operations) == (8192, (2, 4, 6, 8))


def test_every_ablation_of_the_paper_has_a_grid_with_its_rows() -> None:
    tables = {
        file.stem: paper.source.removeprefix("arXiv 2508.07629, ")
        for file in OF_PAPER
        if (paper := load_ablation(file).paper)
    }
    assert tables == {
        "accuracy_filter": "Table 2",
        "teachers": "Table 3",
        "math_sources": "Table 4",
        "code_sources": "Table 5",
        "lm_coef": "Table 6",
        "clip_losses": "Figure 2",
        "code_reward": "Figure 3",
        "zero_advantage": "Figure 5",
    }


@pytest.mark.parametrize("file", OF_PAPER, ids=lambda file: file.stem)
def test_an_ablation_of_the_paper_runs_at_8b_by_changing_the_profile(file: Path) -> None:
    here, there = load_ablation(file), load_ablation(file, "klear_8b")
    assert (there.profile, there.compare, there.paper and there.paper.source) == (
        "klear_8b",
        here.compare,
        here.paper.source,
    )
    runs = plan_runs(there, [])
    assert {cell.variant for cell in runs} <= here.paper.scores.keys()
    profile = load_profile(ROOT / "configs/klear_8b")
    for cell, run in runs.items():
        assert cell.rate == getattr(profile, there.compare).optim.lr
        assert run.config.model == profile.model
        assert set(there.scored_on) == here.paper.scores[cell.variant].keys()


@pytest.mark.parametrize("file", OF_PAPER, ids=lambda file: file.stem)
def test_an_ablation_of_the_paper_can_start_on_its_small_profile(tmp_path: Path, file: Path) -> None:
    """The last variant reads the most sources."""
    *_, last = plan_runs(load_ablation(file), [f"workspace.root={tmp_path}"]).values()
    require_ready(last.config, last.compared.chosen)


def test_a_grid_without_settings_for_a_profile_is_refused_for_it(klear) -> None:
    refused = klear("ablate", "losses_hot", "--profile", "klear_8b", "--dry-run")
    assert refused.status == 2
    assert "losses_hot.toml: this grid is for laptop, and its overrides" in refused.err


def test_a_dry_run_of_a_grid_whose_files_are_missing_names_the_stages(klear, tmp_path: Path) -> None:
    shown = klear("ablate", "teachers", "--profile", "klear_8b", "--dry-run", "--set", f"workspace.root={tmp_path}")
    assert shown.status == 0, shown.err
    assert shown.out.startswith("6 runs of benchmarks, base, tagger, curate, tag, distill, sft, evaluate_sft; ")
    assert "what is to be made cannot be counted: data/open-thoughts/OpenThoughts3-1.2M: no such file" in shown.out


def test_a_profile_takes_the_settings_of_the_one_that_it_extends(klear, tmp_path: Path) -> None:
    in_workspace = ("--dry-run", "--set", f"workspace.root={tmp_path}")
    shown = klear("ablate", "clip_losses", "--profile", "node_8", *in_workspace)
    assert shown.out.startswith("6 runs; artifacts to make: benchmarks 2, base 1, "), shown.err


def test_a_grid_of_sft_is_compared_with_the_papers_rows_beside_it(tmp_path: Path, capsys) -> None:
    file = tmp_path / "small.toml"
    file.write_text(
        """
        profile = "smoke"
        compare = "sft"
        reference = "a"
        seeds = [1, 2, 3, 4, 5, 6]
        scored_on = ["heldout"]
        [variants]
        a = []
        b = ["distill.teacher.slip_rate=0.5"]
        [paper]
        source = "arXiv 0, Table 1"
        about = "at 8B"
        scores = { a = { aime24 = 40 }, b = { aime24 = 35.5 } }
        """
    )
    options = GridOptions(file=file, profile=None, overrides=(f"workspace.root={tmp_path / 'ws'}",), is_dry_run=False)
    for c, run in plan_runs(load_ablation(file), options.overrides).items():
        store = open_store(run.config.workspace)
        for own in run.fingerprints().values():
            with store.create(own.kind, own.fingerprint) as slot:
                if slot.ref is not None:
                    continue  # shared by both variants
                if own.kind == "evaluate":
                    write_scores(slot.workdir, {"a": 0.5, "b": 0.3}[c.variant] + c.seed / 100, names=["heldout"])
                counts = {"steps": 30, "tokens": 5000}
                slot.publish(manifest(own.kind, own.fingerprint, counts=counts))
    ablate_grid(options)
    assert "12 runs; artifacts to make: none" in capsys.readouterr().out
    folder = tmp_path / "ws" / "ablations"
    shown = (folder / "small.md").read_text()
    assert (
        "| b | 0.004 | 33.5 (31.0 to 36.0) | 31.5 to 35.5 | -20.0 (-20.0 to -20.0) | -20.0 to -20.0 | 0.031 (t) | 30 | 5,000 |"
        in shown
    )
    assert (
        "| b | 33.5 (31.0 to 36.0) | a | -20.0 (-20.0 to -20.0) | -20.0 to -20.0 | 0.031 | 35.5 | -4.5 | same in 1 of 1 |"
        in shown
    )
    table = AblationTable.model_validate_json((folder / "small.json").read_text())
    assert table.beside is not None
    assert table.beside.rows[1].paper_difference == {"aime24": -4.5}
    assert table_of(read_cells(folder / "small.jsonl"), "a").rows == table.rows


def test_a_grid_of_sft_ends_at_its_evaluation_and_one_of_code_rl_starts_from_math_rl() -> None:
    config = load_profile(ROOT / "configs/desk")
    up_to_sft = ("benchmarks", "curate", "base", "distill", "sft")
    assert Compared.of(config, "sft").chosen == (*up_to_sft, "evaluate_sft")
    of_code = Compared.of(config, "rl_code")
    assert of_code.chosen == (*up_to_sft, "rl", "rl_code", "evaluate_rl", "evaluate_rl_code")
    assert (of_code.before, of_code.after) == ("evaluate_rl", "evaluate_rl_code")
    with pytest.raises(ConfigError, match="compare = 'rl_code': profile laptop trains only sft, rl"):
        Compared.of(load_profile(ROOT / "configs/laptop"), "rl_code")


def test_last_models_of_different_stages_are_compared_from_the_model_of_sft() -> None:
    grid = load_ablation(ROOT / "configs/ablations/distillation.toml")
    runs = {cell.variant: run for cell, run in plan_runs(grid, []).items()}
    found = {name: (run.compared.model, run.compared.before, run.compared.after) for name, run in runs.items()}
    assert found["opd"] == ("opd", "evaluate_sft", "evaluate_opd")
    assert found["rl"] == found["opd_rl"] == ("rl", "evaluate_sft", "evaluate_rl")
    assert (runs["opd"].rate, runs["opd_rl"].rate) == (4e-4, 1.5e-4)
    assert not {"opd", "opd_rollouts"} & set(runs["rl"].compared.chosen)


def test_last_models_have_no_common_rate() -> None:
    for rates in ({"learning_rates": (1e-4,)}, {"rates": {"a": (1e-4,)}}):
        with pytest.raises(ValueError, match="leave out learning_rates and rates"):
            AblationConfig(profile="smoke", compare="last", variants={"a": ()}, reference="a", seeds=(1, 2), **rates)


def test_without_learning_rates_a_run_has_that_of_its_settings() -> None:
    grid = AblationConfig(
        profile="smoke",
        compare="sft",
        variants={"as_is": (), "slow": ("sft.optim.lr=1e-3",)},
        reference="as_is",
        seeds=(1, 2),
    )
    assert list(plan_runs(grid, [])) == [cell(v, r, s) for s in (1, 2) for v, r in (("as_is", 4e-3), ("slow", 1e-3))]


def test_rates_and_seeds_of_a_grid_are_not_overridden() -> None:
    for override in ("rl.optim.lr=3e-4", "seed=3"):
        with pytest.raises(ConfigError, match="the grid's own seeds and learning rates may not be overridden"):
            plan_runs(GRID, [override])


@pytest.mark.parametrize("override", ["seed=7", "rl.optim.lr = 1e-3"])
def test_a_variant_does_not_set_what_the_grid_sets(override: str) -> None:
    grid = GRID.model_copy(update={"variants": {"paper": (), "clip": (override,)}})
    with pytest.raises(ConfigError, match=f"clip: '{override}' has no effect: seeds and learning_rates of the grid"):
        plan_runs(grid, [])


@pytest.mark.parametrize("override", ["rl.num_steps=2", "rl_code.num_steps=9"])
def test_a_variant_that_changes_nothing_is_refused(tmp_path: Path, override: str) -> None:
    grid = GRID.model_copy(update={"variants": {"paper": (), "same": (override,)}})
    runs = plan_runs(grid, [f"workspace.root={tmp_path}"])
    with pytest.raises(ConfigError, match="variants 'paper' and 'same' are the same runs: none of the settings"):
        require_distinct_runs(runs)
    require_distinct_runs(plan_runs(GRID, [f"workspace.root={tmp_path}"]))


def test_a_score_on_a_benchmark_that_a_profile_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="scored_on: 'aime24' is none of the benchmarks heldout"):
        plan_runs(GRID.model_copy(update={"scored_on": ("aime24",)}), [])


def test_a_variant_that_is_not_valid_ends_it_before_anything_runs(klear, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'profile = "smoke"\nreference = "a"\nlearning_rates = [1e-4]\nseeds = [1, 2]\n[variants]\na = []\nb = ["rl.loss.esp_low=0.1"]\n'
    )
    ended = klear("ablate", file, "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    assert "rl.loss.esp_low: unknown key; did you mean eps_low?" in ended.err
    assert not (tmp_path / "ws").exists()


def test_every_run_of_a_grid_is_checked_before_the_first_is_begun(klear, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(
        'profile = "smoke"\nreference = "a"\nlearning_rates = [1e-4]\nseeds = [1, 2]\n'
        "[variants]\na = []\nb = ['curate.sources=[\"no/such.jsonl\"]']\n"
    )
    ended = klear("ablate", file, "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    assert re.search(r"b, lr 0\.0001, seed 1: .*\n.*no/such\.jsonl: no such file", ended.err), ended.err
    assert not (tmp_path / "ws").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_grid_leaves_a_table_and_then_has_nothing_left_to_make(klear, fresh: Path, tmp_path: Path) -> None:
    small = [
        "sft.max_steps=5",
        "rl.num_steps=1",
        "rl.rollout.groups_per_step=4",
        "rl.group_filter.zero_advantage=off",
        *FEW_PROBLEMS,
    ]
    file = tmp_path / "small.toml"
    file.write_text(
        f"""
        profile = "smoke"
        overrides = {json.dumps(small)}
        reference = "paper"
        learning_rates = [1e-4]
        seeds = [1, 2]
        [variants]
        paper = []
        """
    )
    in_workspace = ("--set", f"workspace.root={fresh}")
    ablate = start("ablate", file, *in_workspace, log=tmp_path / "log")
    try:
        assert ablate.process.wait(timeout=1500) == 0, ablate.output
    finally:
        ablate.end()
    table = AblationTable.model_validate_json((fresh / "ablations" / "small.json").read_text())
    assert [(row.variant, sorted(row.runs)) for row in table.rows] == [("paper", [1, 2])]
    assert not table.failures
    records = read_cells(fresh / "ablations" / "small.jsonl")
    assert table_of(records, "paper").rows == table.rows
    assert klear("ablate", file, "--dry-run", *in_workspace).out == "2 runs; artifacts to make: none\n"
