"""The views between facts and page: ledgers, curves, examples, settings, lineage, the terminal."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path

import pytest
from report_runs import BROKEN_BY_RL, config, eval_report, laptop_run, stage_folder, with_stage
from rich.console import Console
from snapshot import Snapshots

from klear_core.artifacts.manifest import LedgerStep
from klear_core.config.data import BenchmarkConfig, FileSource
from klear_core.config.evaluate import InlineEvalConfig
from klear_core.config.losses import ClipConfig
from klear_core.config.pipeline import InlineEvalJob, InlineEvalRuntime, PipelineConfig
from klear_core.evaluate.compare.published import PublishedModel
from klear_core.report.charts import Series
from klear_core.report.run import build
from klear_core.report.run.build import RL_CHARTS, SFT_CHARTS, stage_curves
from klear_core.report.run.facts import Facts, ReportInputs, read_facts
from klear_core.report.run.final_table import score_table
from klear_core.report.run.lineage import NODE_WIDTH, lineage_graph
from klear_core.report.run.scores_view import benchmark_views, decoding_text, published_rows
from klear_core.report.run.sections import changed_settings, ledger_flows, stage_ledger, stage_ledgers, stage_times
from klear_core.report.run.shown_answers import pick_examples, product_maps
from klear_core.report.run.warnings import notices
from klear_core.scores import DecodingProfile
from klear_core.train.inline_eval import SCORES
from klear_core.types import Outcome, Verdict


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ReportInputs:
    return laptop_run(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def facts(run: ReportInputs) -> Facts:
    return read_facts(run)


def test_of_a_served_model_it_is_not_said_what_no_request_stated() -> None:
    """vLLM then takes top-k and penalty of generation_config.json: 20 and 1.05 of Qwen's."""
    ours = eval_report("rl")
    engine = {"kind": "served", "model": "r1", "base_url": "http://host/v1"}
    served = DecodingProfile.model_validate(ours.decoding.model_dump() | {"engine": engine})
    assert decoding_text(served).startswith(
        "temperature 1, top-p off, top-k and repetition penalty as the server sets them, up to 96 new tokens; r1 as"
    )
    assert "top-k off, repetition penalty off" in decoding_text(ours.decoding)


def test_every_ledger_row_adds_up_in_counts_and_in_print(facts: Facts) -> None:
    rows = [row for ledger in stage_ledgers(facts.stages, home=Path()) for row in ledger.rows]
    assert len(rows) == 9
    for row in rows:
        assert sum(p.count for p in row.parts) == row.num_in
        assert round(sum(float(p.share.removesuffix("\u00a0%")) for p in row.parts), 6) == 100


def test_drops_are_listed_from_most_to_least(facts: Facts) -> None:
    [groups] = [
        row for ledger in stage_ledgers(facts.stages, home=Path()) for row in ledger.rows if row.step == "group_filter"
    ]
    assert [(p.reason, p.count, p.share) for p in groups.parts] == [
        ("", 1226, "47.9\u00a0%"),
        ("all_right", 1311, "51.2\u00a0%"),
        ("all_wrong", 23, "0.9\u00a0%"),
    ]


def test_a_flow_is_as_high_as_what_is_left_and_each_loss_leaves_it_with_its_count() -> None:
    steps = (
        LedgerStep.of("read", "row", num_in=100, dropped={"no_answer": 10}),
        LedgerStep.of("length", "problem", num_in=90, dropped={}),
        LedgerStep.of("dedup", "problem", num_in=90, dropped={"same": 40, "near": 5}),
        LedgerStep.of("ask", "trace", num_in=180, dropped={}),  # two of each problem, and none is lost
    )
    [flow] = ledger_flows([stage_ledger("curate", steps)])
    assert flow.title == "curate: rows, problems"
    assert [(n.name, n.count, n.height) for n in flow.nodes] == [
        ("read", "100", 72.0),
        ("dedup", "90", 64.8),
        ("went on", "45 (45.0\u00a0%)", 32.4),
    ]
    losses = [band for band in flow.bands if band.label]
    assert [band.label.replace("\u00a0", " ") for band in losses] == [
        "same 40 (44.4 %)", "near 5 (5.6 %)", "no answer 10 (10.0 %)",
    ]  # fmt: skip
    heights = [float(band.path.split("v")[1].partition("C")[0]) for band in losses]
    assert heights == [28.8, 3.6, 7.2]  # 72 for 100
    assert [band.y for band in losses] == sorted(band.y for band in losses)  # no label on another


def test_rare_reasons_share_a_band() -> None:
    dropped = {f"reason_{i}": 10 - i for i in range(7)}
    [flow] = ledger_flows([stage_ledger("curate", [LedgerStep.of("read", "row", num_in=100, dropped=dropped)])])
    labels = [band.label.replace("\u00a0", " ") for band in flow.bands if band.label]
    assert labels[-1] == "3 other reasons 15 (15.0 %)"
    assert len(labels) == 5


def test_a_reused_stage_costs_this_run_nothing(facts: Facts) -> None:
    sft = next(stage for stage in facts.stages if stage.name == "sft")
    times = stage_times(
        [
            replace(sft, num_gpus=8, manifest=sft.manifest.model_copy(update={"wall_s": 1800.0})),
            replace(sft, num_gpus=8, manifest=sft.manifest.model_copy(update={"wall_s": 3600.0}), was_reused=True),
        ],
        price=2.5,
    )
    assert [(s.fraction, s.gpu_hours, s.price) for s in times.stages] == [(0.5, "4.00", "10.00"), (1.0, "", "")]
    assert (times.gpu_hours, times.price) == ("4.00", "10.00")


def test_steps_without_a_number_are_counted_in_a_notice(run: ReportInputs, tmp_path: Path) -> None:
    """A file of an earlier version, with null in two of its three steps."""
    assert not any("have no number" in n.text for n in notices(read_facts(run)))
    rows = [
        {"rl/loss/mean": None, "rl/ratio/max": 1.0},
        {"rl/loss/mean": 0.1, "rl/ratio/max": None},
        {"rl/loss/mean": 0.2, "rl/ratio/max": 3},
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": t} | row) + "\n" for t, row in enumerate(rows, start=1))
    )
    broken = with_stage(run, stage_folder("rl", None, workdir=tmp_path, trouble="out of disk"))
    found = read_facts(broken)
    (notice,) = [n for n in notices(found) if "have no number" in n.text]
    assert (notice.level, notice.where) == ("warning", "rl")
    assert notice.text == "2 of 3 steps have no number for rl/loss/mean, rl/ratio/max: they are in no curve or mean."
    (of_rl,) = [s for s in stage_curves(found.missing) if s.stage == "rl"]
    assert {line.metric for chart in of_rl.charts for line in chart.lines} == {"rl/ratio/max"}
    Console(file=io.StringIO()).print(score_table(read_facts(broken)))


def test_no_logged_metric_is_left_out(facts: Facts) -> None:
    for stage, of_stage in zip([s for s in facts.stages if s.metrics], stage_curves(facts.stages), strict=True):
        drawn = {line.metric for chart in of_stage.charts for line in chart.lines} | {m.name for m in of_stage.others}
        assert drawn == {s.name for s in stage.metrics}


def test_what_the_charts_name_is_what_the_stages_log() -> None:
    core = Path(build.__file__).parents[2]
    for stage, specs in (("sft", SFT_CHARTS), ("rl", RL_CHARTS)):
        source = "".join(path.read_text() for path in sorted((core / stage).glob("*.py")))
        points = {f"eval/{name}" for name in SCORES}
        charted = {m for spec in specs for m, _ in spec.metrics}
        assert [m for m in charted - points if f'"{stage}/{m}"' not in source] == []
        assert "eval/avg" in charted & points


def test_phases_share_out_the_time(facts: Facts) -> None:
    [phases] = [c.phases for c in stage_curves(facts.stages) if c.phases]
    assert [p.name for p in phases] == ["waiting for answers", "learning", "handing over weights"]
    assert sum(p.fraction for p in phases) == pytest.approx(1)


def test_examples_follow_the_rule(facts: Facts) -> None:
    examples = pick_examples(facts)
    assert examples is not None
    assert examples.decoding == "greedy"
    fixed, broken, still, both = examples.groups
    assert sum(g.num_found for g in examples.groups) == 40
    assert {tuple(a.mark for a in e.answers) for e in fixed.examples} == {("wrong", "wrong", "right")}
    assert [e.problem_id for e in broken.examples] == [f"{BROKEN_BY_RL:016x}"]
    assert {tuple(a.mark for a in e.answers[1:]) for e in still.examples} == {("wrong", "wrong")}
    assert len(both.examples) == 1


def test_sampled_answers_are_shown_where_greedy_ones_did_not_change(facts: Facts) -> None:
    right = Verdict(outcome=Outcome.SCORED, score=1.0)
    models = tuple(
        replace(m, samples=tuple(replace(s, verdict=right) if s.decoding == "greedy" else s for s in m.samples))
        for m in facts.models
    )
    examples = pick_examples(replace(facts, models=models))
    assert examples is not None
    assert examples.decoding == "sampled"
    assert examples.groups[0].num_found > 0


def test_the_choice_of_examples_depends_on_the_seed_alone(facts: Facts) -> None:
    shuffled = replace(facts, models=tuple(replace(m, samples=m.samples[::-1]) for m in facts.models))
    assert pick_examples(shuffled) == pick_examples(facts)
    other = replace(facts, config=facts.config.model_copy(update={"seed": 4}))
    assert pick_examples(other) != pick_examples(facts)


def test_an_unjudged_answer_is_neither_right_nor_wrong(facts: Facts) -> None:
    last = facts.models[-1]
    failed = tuple(replace(s, verdict=replace(s.verdict, outcome=Outcome.JUDGE_FAILED)) for s in last.samples)
    examples = pick_examples(replace(facts, models=(*facts.models[:-1], replace(last, samples=failed))))
    assert examples is not None
    assert [g.num_found for g in examples.groups] == [0, 0, 0, 0]


def test_a_default_config_differs_in_nothing() -> None:
    assert changed_settings(PipelineConfig()) == []


def test_changed_settings_are_exactly_those_that_differ() -> None:
    changed = {s.key: (s.default, s.value) for s in changed_settings(config())}
    assert changed["seed"] == ("0", "3")
    assert changed["benchmarks.0.source.split"] == ('"train"', '"heldout"')
    assert "benchmarks.0.num_samples" not in changed  # 4 is the default
    assert not any(key.startswith("rl.") for key in changed)


def test_another_kind_of_setting_shows_its_kind_and_what_it_needs() -> None:
    base = PipelineConfig()
    curate = base.curate.model_copy(update={"sources": (FileSource(path="problems.jsonl"),)})
    rl = base.rl.model_copy(update={"loss": ClipConfig()})
    changed = {s.key: s.value for s in changed_settings(base.model_copy(update={"curate": curate, "rl": rl}))}
    assert changed == {
        "curate.sources.0.kind": '"file"',
        "curate.sources.0.path": '"problems.jsonl"',
        "rl.loss.kind": '"clip"',
    }


def test_inputs_stand_left_of_what_was_made_from_them(facts: Facts) -> None:
    graph = lineage_graph(facts.stages)
    x_of = {n.fingerprint: n.x for n in graph.nodes}
    for stage in facts.stages:
        for parent in stage.manifest.inputs:
            assert x_of[parent.fingerprint[:10]] + NODE_WIDTH < x_of[stage.manifest.fingerprint[:10]]
    assert len(graph.edges) == sum(len(s.manifest.inputs) for s in facts.stages)


def test_no_two_boxes_of_the_graph_overlap(facts: Facts) -> None:
    graph = lineage_graph(facts.stages)
    columns: dict[float, list[float]] = {}
    for node in graph.nodes:
        columns.setdefault(node.x, []).append(node.y)
    assert all(below - above >= 46 for ys in columns.values() for above, below in pairwise(sorted(ys)))


def test_a_graph_of_nothing_is_empty() -> None:
    assert lineage_graph(()).nodes == ()


def test_uncommitted_code_is_noticed(facts: Facts) -> None:
    dirty = tuple(
        replace(s, manifest=s.manifest.model_copy(update={"git_dirty": s.name == "sft"})) for s in facts.stages
    )
    assert any("uncommitted changes (sft)" in n.text for n in notices(replace(facts, stages=dirty)))


def test_a_teacher_other_than_that_of_the_traces_is_warned_of(facts: Facts) -> None:
    """What `klear plan` says of it (tests/pipeline/test_opd_graph.py), for who reads the scores."""
    assert not [n for n in notices(facts) if n.where == "teacher"]
    distilled = PipelineConfig.model_validate(
        {"opd": {"teacher": {"source": {"kind": "given", "model": {"path": "t"}}}}}
    )
    (notice,) = [n for n in notices(replace(facts, config=distilled)) if n.where == "teacher"]
    assert notice.text.startswith("opd.teacher is t, and the SFT traces are by the procedural teacher")


def test_unlike_decoding_profiles_are_both_shown(facts: Facts) -> None:
    first = facts.models[0]
    [score] = first.scores
    sampling = score.decoding.sampling.model_copy(update={"temperature": 0.6})
    unlike = score.model_copy(update={"decoding": score.decoding.model_copy(update={"sampling": sampling})})
    [view] = benchmark_views(replace(facts, models=(replace(first, scores=(unlike,)), *facts.models[1:])))
    assert len(view.decoding) == 2
    asked = replace(first, scores=(score.model_copy(update={"prompt": "boxed"}),))
    [view] = benchmark_views(replace(facts, models=(asked, *facts.models[1:])))
    assert view.decoding == (f"{view.decoding[1]}; prompt boxed", view.decoding[1])


@pytest.mark.parametrize("width", [80, 120])
def test_what_the_terminal_says(run: ReportInputs, width: int, snapshot: Snapshots) -> None:
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    console.print(score_table(read_facts(run)))
    snapshot(f"scores_{width}", console.export_text().replace("\u00a0", " "))


def test_scores_that_leave_problems_out_say_over_how_many_they_are(facts: Facts) -> None:
    """Two of the 256 problems lost a sample to the judge, so that pass@4 cannot be computed for them."""
    last = facts.models[-1]
    [report] = last.scores
    [*others, four] = report.pass_at
    fewer = four.model_copy(update={"score": four.score.model_copy(update={"num_problems": 254})})
    partly = replace(last, scores=(report.model_copy(update={"pass_at": (*others, fewer)}),))
    some = replace(facts, models=(*facts.models[:-1], partly))
    [view] = benchmark_views(some)
    assert [row.partly for row in view.rows] == ["", "", "pass@4 254"]
    console = Console(width=120, record=True, force_terminal=False, file=io.StringIO())
    console.print(score_table(some))
    assert "RL: scores over fewer than all 256 problems: pass@4 254" in console.export_text()


def test_a_column_has_one_k_for_all_models(facts: Facts) -> None:
    """No problem has four judged samples of the last model: it has no pass@4, and its pass@2 is not shown as one."""
    last = facts.models[-1]
    [report] = last.scores
    fewer = replace(last, scores=(report.model_copy(update={"pass_at": report.pass_at[:-1]}),))
    [view] = benchmark_views(replace(facts, models=(*facts.models[:-1], fewer)))
    assert view.k == 4
    assert [row.pass_at_k is None for row in view.rows] == [False, False, True]


def test_a_part_of_a_run_shows_its_scores_and_claims_nothing(run: ReportInputs) -> None:
    part = replace(run, stages=tuple(s for s in run.stages if s.stage.scored_model_stage == "base"), differences=())
    console = Console(width=80, record=True, force_terminal=False, file=io.StringIO())
    console.print(score_table(read_facts(part), with_claims=False))
    text = console.export_text()
    assert "Base" in text
    assert "avg@" in text
    assert "nothing is claimed" not in text


def test_settings_with_dates_are_shown_among_those_that_differ() -> None:
    live = BenchmarkConfig.model_validate({"known": "lcb_v6", "source": "live.jsonl"})
    cfg = PipelineConfig(benchmarks=(live,), data_until=date(2024, 12, 31))
    shown = {setting.key: setting.value for setting in changed_settings(cfg)}
    assert shown["data_until"] == '"2024-12-31"'
    assert shown["benchmarks.0.window.start"] == '"2025-02-01"'


@pytest.mark.parametrize(
    ("published", "until", "expected"),
    [
        (None, date(2025, 1, 1), ""),
        (date(2025, 2, 6), None, "Published on 2025-02-06."),
        (
            date(2025, 2, 6),
            date(2025, 2, 6),
            "Not fresh: published on 2025-02-06, and the models' data ends on 2025-02-06.",
        ),
        (
            date(2025, 2, 6),
            date(2025, 2, 5),
            "Fresh: published on 2025-02-06, after the models' data, which ends on 2025-02-05.",
        ),
    ],
)
def test_a_benchmark_newer_than_the_models_data_is_named_as_fresh(
    facts: Facts, published: date | None, until: date | None, expected: str
) -> None:
    benchmarks = tuple(b.model_copy(update={"published": published}) for b in facts.config.benchmarks)
    dated = facts.config.model_copy(update={"benchmarks": benchmarks, "data_until": until})
    assert benchmark_views(replace(facts, config=dated))[0].age == expected


def test_the_curve_of_scores_says_which_reported_benchmark_its_problems_are_from(facts: Facts) -> None:
    points = [("rl/eval/avg", 0.5), ("rl/eval/avg_rerun_low", 0.4), ("rl/eval/avg_rerun_high", 0.6)]
    scores = tuple(Series(name=name, steps=(0, 10), values=(0.1, value)) for name, value in points)
    rl = next(stage for stage in facts.stages if stage.name == "rl")
    job = InlineEvalJob.of(InlineEvalConfig(benchmark="heldout", num_problems=8), facts.config, has_engines=True)
    runtime = InlineEvalRuntime(curve=job).model_dump(mode="json")
    manifest = rl.manifest.model_copy(update={"config": {**rl.manifest.config, "runtime": runtime}})
    (drawn,) = stage_curves([replace(rl, manifest=manifest, metrics=scores)])
    (chart,) = drawn.charts
    assert [line.label for line in chart.lines] == ["score", "re-run, low", "re-run, high"]
    assert (
        "8 problems of heldout, whose score is reported: a checkpoint that is chosen by this curve is chosen"
        in chart.note
    )
    (plain,) = stage_curves([replace(rl, metrics=scores)])
    assert "chosen" not in plain.charts[0].note


def test_published_scores_stand_beside_ours(facts: Facts) -> None:
    paper = PublishedModel(model="paper", source="T1", scores={"aime24": 97.0}, num_samples={"aime24": 64})
    models = []
    for model in facts.models:
        scores = tuple(s.model_copy(update={"benchmark": "aime24", "num_problems": 30}) for s in model.scores)
        models.append(replace(model, scores=scores))
    (row,) = published_rows([paper], models, "aime24")
    assert (row.score, row.bound) == ("97.0\u00a0%, avg@64", "±3.1")
    assert [text for text, _ in row.ours] == ["\u221297.0, differs", "\u221229.9, differs", "+0.8, differs"]
    assert published_rows([paper], facts.models, "heldout") == ()


def test_products_of_chains_show_the_column_that_a_model_gets_wrong(facts: Facts) -> None:
    """7 * 3 = 21, and 1 modulo 10; this SFT model writes 2, as a teacher taught it, and RL has it right."""
    told = {"base": "~~q", "sft": "4*2=8\n7*3=2", "rl": "4*2=8\n7*3=1"}

    def answered(name: str) -> dict[str, str]:
        return {"question": "mod 10: 4,*2,-1,*3=?", "response": f"<think>\n{told[name]}\n</think>"}

    models = tuple(
        replace(m, samples=tuple(replace(s, **answered(m.maker.name)) for s in m.samples)) for m in facts.models
    )
    sft, rl = product_maps(replace(facts, models=models))
    # 40 problems, each with a greedy and a first sampled answer; the base model writes no step.
    assert [(one.num_steps, one.share.replace("\u00a0", " "), one.size) for one in (sft, rl)] == [
        (160, "50.0 %", 8),
        (160, "100.0 %", 8),
    ]
    assert sft.cells == ((2, 4, 1.0, "4 * 2: 80 of 80 right"), (3, 7, 0.0, "7 * 3: 0 of 80 right"))
    assert product_maps(facts) == []  # its questions are no chains
