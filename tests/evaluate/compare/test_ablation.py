from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from evaluations import write_scores

from klear_core.errors import ArtifactError
from klear_core.evaluate.compare.ablation import TOKEN_SHARES, RunResult, at_own_rate, read_run, rows_of
from klear_core.evaluate.compare.published import AblationTable, as_markdown
from klear_core.metrics import MetricsFile


def a_run(after: float, *, before: float = 0.6, low: float = 0.01) -> RunResult:
    shares = dict.fromkeys(TOKEN_SHARES, 0.0) | {"A<0, r low": low}
    return RunResult(before=before, after=after, token_shares=shares, max_ratio=3.0, entropy=0.25)


def an_evaluation(folder: Path, *scores: float) -> Path:
    """Of one benchmark a score."""
    folder.mkdir()
    write_scores(folder, *scores)
    return folder


def an_rl_stage(folder: Path, *steps: Mapping[str, float]) -> Path:
    folder.mkdir()
    for number, metrics in enumerate(steps, start=1):
        MetricsFile(folder / "metrics.jsonl").append(metrics, step=number)
    return folder


def trained(low: float, max_ratio: float, entropy: float) -> dict[str, float]:
    shares = dict.fromkeys(TOKEN_SHARES.values(), 0.0)
    return {**shares, "rl/clip/low_frac": low, "rl/ratio/max": max_ratio, "rl/entropy/mean": entropy}


def test_a_run_is_read_from_its_folders_and_steps_without_training_do_not_count(tmp_path: Path) -> None:
    rl = an_rl_stage(tmp_path / "rl", trained(0.02, 2.0, 0.5), trained(0.04, 7.0, 0.3), {"rl/reward/mean": -1.0})
    run = read_run(
        rl=rl, before=an_evaluation(tmp_path / "before", 0.5, 0.7), after=an_evaluation(tmp_path / "after", 0.8, 1.0)
    )
    assert (run.before, run.after) == (pytest.approx(0.6), pytest.approx(0.9))
    assert run.token_shares["A<0, r low"] == pytest.approx(0.03)
    assert (run.max_ratio, run.entropy) == (7.0, 0.3)


def test_a_run_that_trained_on_nothing_is_no_result(tmp_path: Path) -> None:
    rl = an_rl_stage(tmp_path / "rl", {"rl/reward/mean": -1.0})
    with pytest.raises(ArtifactError, match="trained on no token"):
        read_run(rl=rl, before=tmp_path, after=tmp_path)


def test_a_step_without_numbers_is_in_no_mean_and_counted(tmp_path: Path) -> None:
    """The second step is one of an earlier version, which wrote null for all statistics of a step with a skipped update."""
    rl = an_rl_stage(tmp_path / "rl", trained(0.02, 2.0, 0.5))
    old = dict.fromkeys(trained(0, 0, 0)) | {"step": 2, "rl/clip/low_frac": 0.06}
    with (rl / "metrics.jsonl").open("a") as f:
        f.write(json.dumps(old) + "\n")
    MetricsFile(rl / "metrics.jsonl").append({"rl/optim/updates": 0.0}, step=3)
    run = read_run(rl=rl, before=an_evaluation(tmp_path / "before", 0.5), after=an_evaluation(tmp_path / "after", 0.8))
    assert run.token_shares["A<0, r low"] == pytest.approx(0.04)
    assert (run.max_ratio, run.entropy, run.num_steps, run.num_lacking) == (2.0, 0.5, 2, 1)
    runs = {1: run, 2: run.model_copy(update={"num_lacking": 0})}
    table = AblationTable(reference="paper", rows=rows_of({"paper": {2e-4: runs}}, "paper"), failures={})
    assert as_markdown(table).splitlines()[-1] == "- numbers are missing at 1 of 2 steps: paper, lr 0.0002, seed 1"


def test_a_run_whose_updates_were_all_skipped_is_no_result(tmp_path: Path) -> None:
    rl = tmp_path / "rl"
    rl.mkdir()
    (rl / "metrics.jsonl").write_text(json.dumps({"step": 1} | dict.fromkeys(trained(0, 0, 0))) + "\n")
    with pytest.raises(ArtifactError, match="every update was skipped"):
        read_run(rl=rl, before=tmp_path, after=tmp_path)


def test_a_run_has_collapsed_below_half_of_where_it_started() -> None:
    assert a_run(0.29, before=0.6).has_collapsed
    assert not a_run(0.30, before=0.6).has_collapsed


def test_each_seed_runs_at_the_rate_that_was_best_on_the_others() -> None:
    # Without seed 1 the means are .15 and .9; without seed 2 .15 and .55; without seed 3 .1 and .55: always the higher rate.
    slow = {1: a_run(0.1), 2: a_run(0.1), 3: a_run(0.2)}
    fast = {1: a_run(0.2), 2: a_run(0.9), 3: a_run(0.9)}
    assert at_own_rate({1e-4: slow, 4e-4: fast}) == fast
    # Seed 1 alone speaks for the higher rate: .4 against .5 without one of the others, but .4 against .1 without seed 1 itself.
    slow = {1: a_run(0.4), 2: a_run(0.4), 3: a_run(0.4)}
    fast = {1: a_run(0.9), 2: a_run(0.1), 3: a_run(0.1)}
    assert at_own_rate({1e-4: slow, 4e-4: fast}) == {1: slow[1], 2: fast[2], 3: fast[3]}


def test_of_equally_good_rates_the_smaller_is_taken_and_seeds_that_lack_one_are_left_out() -> None:
    slow, fast = {1: a_run(0.4), 2: a_run(0.4)}, {1: a_run(0.4), 2: a_run(0.4), 3: a_run(0.9)}
    assert at_own_rate({4e-4: fast, 1e-4: slow}) == slow


def test_differences_are_paired_by_seed_at_the_same_rate() -> None:
    paper = {1: a_run(0.3), 2: a_run(0.5), 3: a_run(0.1)}
    other = {3: a_run(0.4), 1: a_run(0.4), 2: a_run(0.7)}
    first, second = rows_of({"paper": {1e-4: paper}, "other": {1e-4: other}}, "paper")
    assert (first.variant, first.difference) == ("paper", None)
    assert second.difference is not None
    assert second.difference.interval is None  # seed 3 of the reference collapsed, from .6 to .1
    assert (second.difference.mean, second.difference.least, second.difference.most) == pytest.approx((0.2, 0.1, 0.3))
    assert second.score.interval is not None
    assert second.score.mean == pytest.approx(0.5)


def test_differences_of_runs_that_hold_have_students_interval() -> None:
    # Differences .1, .2, .3: mean .2, standard deviation .1, t(2) at 97.5 % is 4.3027, half width 4.3027 * .1 / sqrt(3) = .24841
    paper = {1: a_run(0.3), 2: a_run(0.5), 3: a_run(0.4)}
    other = {3: a_run(0.7), 1: a_run(0.4), 2: a_run(0.7)}
    _, second = rows_of({"paper": {1e-4: paper}, "other": {1e-4: other}}, "paper")
    assert second.difference is not None
    assert second.difference.interval is not None
    ends = (second.difference.interval.low, second.difference.interval.high)
    assert ends == pytest.approx((-0.04841, 0.44841), abs=1e-5)


def test_several_rates_have_a_row_each_and_one_at_own_rates() -> None:
    low, high = {1: a_run(0.3), 2: a_run(0.5)}, {1: a_run(0.6), 2: a_run(0.6)}
    rows = rows_of({"paper": {1e-4: low, 4e-4: high}, "other": {1e-4: high, 4e-4: low}}, "paper")
    assert [(row.variant, row.learning_rate, row.score.mean) for row in rows] == [
        ("paper", 1e-4, pytest.approx(0.4)),
        ("other", 1e-4, pytest.approx(0.6)),
        ("paper", 4e-4, pytest.approx(0.6)),
        ("other", 4e-4, pytest.approx(0.4)),
        ("paper", None, pytest.approx(0.6)),
        ("other", None, pytest.approx(0.6)),
    ]


def test_variants_at_one_rate_each_are_compared_by_seed_at_these_rates() -> None:
    paper, clip = {1: a_run(0.3), 2: a_run(0.5)}, {2: a_run(0.6), 1: a_run(0.5)}
    rows = rows_of({"paper": {1e-4: paper}, "clip": {2e-4: clip}}, "paper")
    assert [(row.variant, row.learning_rate, row.against_own_rate) for row in rows] == [
        ("paper", 1e-4, False),
        ("clip", 2e-4, True),
    ]
    assert rows[1].difference is not None
    assert (rows[1].difference.least, rows[1].difference.most) == pytest.approx((0.1, 0.2))
    shown = as_markdown(AblationTable(reference="paper", rows=rows, failures={}))
    assert shown.endswith("- clip at lr 0.0002 is compared with paper at its rate, 0.0001\n")


def test_a_rate_without_the_reference_is_compared_with_the_reference_at_its_own_rates() -> None:
    # By seed 2 alone 1e-4 is best for `paper` on seed 1 (.5 against .4), and by seed 1 on seed 2 (.6 against .3).
    paper = {1e-4: {1: a_run(0.6), 2: a_run(0.5)}, 4e-4: {1: a_run(0.3), 2: a_run(0.4)}}
    clip = {2e-4: {1: a_run(0.7), 2: a_run(0.8)}}
    rows = {(row.variant, row.learning_rate): row for row in rows_of({"paper": paper, "clip": clip}, "paper")}
    assert sorted(rate or 0 for _, rate in rows) == [0, 0, 1e-4, 2e-4, 4e-4]
    for rate in (2e-4, None):
        difference = rows["clip", rate].difference
        assert difference is not None
        assert (difference.least, difference.most) == pytest.approx((0.1, 0.3))
    assert not rows["clip", None].against_own_rate
    shown = as_markdown(AblationTable(reference="paper", rows=tuple(rows.values()), failures={}))
    assert "- clip at lr 0.0002 is compared with paper at the rate that was best for it on the other seeds\n" in shown


def test_a_rate_at_which_no_run_of_the_reference_succeeded_has_no_difference_from_another_rate() -> None:
    runs = {1: a_run(0.3), 2: a_run(0.5)}
    rows = rows_of({"paper": {1e-4: runs, 2e-4: {}}, "clip": {1e-4: runs, 2e-4: runs}}, "paper")
    assert [(row.variant, row.learning_rate) for row in rows][:2] == [("paper", 1e-4), ("clip", 1e-4)]
    assert ("clip", 2e-4) not in [(row.variant, row.learning_rate) for row in rows]


def test_a_variant_without_two_seeds_in_common_with_the_reference_has_no_row() -> None:
    rows = rows_of(
        {"paper": {1e-4: {1: a_run(0.3), 2: a_run(0.5)}}, "other": {1e-4: {2: a_run(0.3), 3: a_run(0.5)}}}, "paper"
    )
    assert [row.variant for row in rows] == ["paper"]


def test_scores_are_compared_by_t_without_collapses_and_else_the_collapses_are_and_holm_corrects_all() -> None:
    # Five of five runs of `paper` collapsed at 2e-4, none of `mine`: p = 2/252. At 1e-4 none did, and the differences
    # .01, .02 and .03 have t = .02 / (.01 / sqrt(3)) = 3.464 with 2 degrees: p = 1 - t / sqrt(2 + t^2) = 0.0742.
    fell, stood = ({seed: a_run(after) for seed in range(5)} for after in (0.1, 0.5))
    paper = {seed: a_run(0.5) for seed in range(3)}
    mine = {seed: a_run(0.5 + 0.01 * (seed + 1)) for seed in range(3)}
    rows = rows_of({"paper": {2e-4: fell, 1e-4: paper}, "mine": {2e-4: stood, 1e-4: mine}}, "paper")
    tests = {row.learning_rate: row.test for row in rows if row.variant == "mine" and row.test}
    assert [(tests[rate].by, tests[rate].p) for rate in (2e-4, 1e-4)] == [
        ("collapses", pytest.approx(2 / 252)),
        ("t", pytest.approx(0.0742, abs=1e-4)),
    ]
    assert [tests[rate].corrected for rate in (2e-4, 1e-4)] == [pytest.approx(4 / 252), pytest.approx(tests[1e-4].p)]
    assert tests[None].corrected == tests[None].p  # at own rates: a family of one


def test_the_table_by_hand() -> None:
    # Seed 1 of the reference fell from .6 to .2: no interval of it, nor of differences from it.
    # Scores .4 and .6: mean .5, standard deviation .1414, t(1) at 97.5 % is 12.7: cut at 0 and 1.
    # 1 collapse of 2 leaves a rate of 97 % possible (1 - 0.97^2 = 0.05), none of 2 leaves 78 % (0.22^2 = 0.05).
    runs = {1: a_run(0.2, low=0.01), 2: a_run(0.4, low=0.03)}
    own = {1: a_run(0.4), 2: a_run(0.6)}
    rows = rows_of({"paper": {2e-4: runs}, "mine": {2e-4: own}}, "paper")
    table = AblationTable(reference="paper", rows=rows, failures={"mine, lr 0.0002, seed 3": "stalled"})
    assert as_markdown(table).splitlines() == [
        "| variant | lr | avg@n (range) | 95 % | minus paper (range) | 95 % | p (test) | collapsed (at most) "
        "| A<0, r low | A>0, r high | A>0, r low | A<0, r high | dual clip | max r | entropy |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| paper | 0.0002 | 30.0 (20.0 to 40.0) | none |  |  |  | 1 of 2 (97 %) | 2.00 | 0.00 | 0.00 | 0.00 | 0.00 | 3 | 0.250 |",
        "| mine | 0.0002 | 50.0 (40.0 to 60.0) | 0.0 to 100.0 | +20.0 (+20.0 to +20.0) | none | 1.000 (collapses) | 0 of 2 (78 %) "
        "| 1.00 | 0.00 | 0.00 | 0.00 | 0.00 | 3 | 0.250 |",
        "",
        "- no result: mine, lr 0.0002, seed 3: stalled",
    ]
    assert AblationTable.model_validate_json(table.model_dump_json()) == table


def test_runs_that_counted_informative_groups_show_them_per_million_sampled_tokens(tmp_path: Path) -> None:
    """3 + 2 groups in 20,000 tokens, also of a step that did not train; 250 per million. A run without counts hides the columns."""
    untrained = {"rl/groups/informative": 2.0}
    rl = an_rl_stage(tmp_path / "rl", trained(0.02, 2.0, 0.5) | {"rl/groups/informative": 3.0}, untrained)
    before, after = an_evaluation(tmp_path / "before", 0.5), an_evaluation(tmp_path / "after", 0.8)
    run = read_run(rl=rl, before=before, after=after, sampled_tokens=20_000)
    assert (run.informative_groups, run.sampled_tokens) == (5, 20_000)

    def lines(other: RunResult) -> list[str]:
        rows = rows_of({"paper": {2e-4: {1: run, 2: other}}}, "paper")
        return as_markdown(AblationTable(reference="paper", rows=rows, failures={})).splitlines()

    head, _, row, *_ = lines(run)
    assert head.endswith("| entropy | sampled tokens | informative groups per million |")
    assert row.endswith("| 0.500 | 20,000 | 250 |")
    head, _, row, *_ = lines(run.model_copy(update={"sampled_tokens": None}))
    assert head.endswith("| entropy |")


def test_a_table_of_distillation_and_rl_has_their_steps_and_sampled_tokens() -> None:
    rl = {seed: a_run(0.7).model_copy(update={"num_steps": 16, "sampled_tokens": 4000}) for seed in (1, 2)}
    distilled = RunResult(before=0.6, after=0.2, token_shares={}, num_steps=150, sampled_tokens=5000)
    rows = rows_of({"rl": {1e-4: rl}, "opd": {4e-4: {1: distilled, 2: distilled}}}, "rl")
    head, _, *shown = as_markdown(AblationTable(reference="rl", rows=rows, failures={})).splitlines()
    assert head.endswith("| p (test) | collapsed (at most) | steps | tokens |")
    assert shown[0].endswith("| 0 of 2 (78 %) | 16 | 4,000 |")
    assert shown[1].endswith("| 2 of 2 (100 %) | 150 | 5,000 |")
    assert "- opd at lr 0.0004 is compared with rl at its rate, 0.0001" in shown
