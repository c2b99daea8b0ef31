import random
from collections import Counter

import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.data import CurateConfig, FileSource, SelectConfig
from klear_core.data.candidates import DroppedRow
from klear_core.data.curate import curate
from klear_core.data.selection import Pool, check_selection, left_out, mix, select_problems, sources_to_read
from klear_core.data.sources import source_name
from klear_core.errors import ConfigError
from klear_core.metrics import NullTelemetry
from klear_core.types import Problem

SIZES = {"one": 100, "two": 60, "three": 10}


def pool_of(sizes=SIZES, *, order_seed=0):
    items = [(f"{source}-{i}", source, f"question {i} of {source}") for source, n in sizes.items() for i in range(n)]
    random.Random(order_seed).shuffle(items)
    ids, sources, questions = (list(column) for column in zip(*items, strict=True))
    return Pool(problem_ids=ids, sources=sources, questions=lambda: questions)


def selected(cfg, pool, *, seed=0):
    selection = select_problems(cfg, pool, seed=seed)
    drops = [selection.drop_of(i) for i in range(len(pool.problem_ids))]
    kept = {name for name, drop in zip(pool.problem_ids, drops, strict=True) if drop is None}
    return kept, [drop for drop in drops if drop is not None], selection


def by_source(ids):
    return Counter(name.split("-")[0] for name in ids)


@pytest.mark.parametrize(
    ("cfg", "kept", "reason"),
    [
        (SelectConfig(caps={"one": 7, "three": 50}), {"one": 7, "two": 60, "three": 10}, "over_cap"),
        (SelectConfig(weights={"one": 2, "two": 2, "three": 1}), {"one": 20, "two": 20, "three": 10}, "over_weight"),
        (
            SelectConfig(weights={"one": 0.3, "two": 0.1, "three": 0.1}),
            {"one": 30, "two": 10, "three": 10},
            "over_weight",
        ),
        (
            SelectConfig(weights={"one": 3, "two": 1, "three": 1}, num_problems=20, method="random"),
            {"one": 12, "two": 4, "three": 4},
            "not_drawn",
        ),
    ],
)
def test_sources_are_capped_and_weighted(cfg, kept, reason):
    ids, drops, selection = selected(cfg, pool_of())
    assert by_source(ids) == kept == selection.kept
    assert {(drop.step, drop.reason) for drop in drops} == {("select", reason)}
    assert len(ids) + len(drops) == 170
    assert not selection.notes


def test_caps_come_before_weights():
    cfg = SelectConfig(caps={"one": 10}, weights={"one": 1, "two": 1, "three": 1})
    ids, drops, _ = selected(cfg, pool_of())
    assert by_source(ids) == {"one": 10, "two": 10, "three": 10}
    assert Counter(drop.reason for drop in drops) == {"over_cap": 90, "over_weight": 50}


def test_a_draw_depends_on_the_ids_and_the_seed_alone():
    cfg = SelectConfig(caps={"one": 30}, num_problems=40, method="random")
    first = selected(cfg, pool_of())[0]
    assert first == selected(cfg, pool_of(order_seed=5))[0]
    assert first != selected(cfg, pool_of(), seed=1)[0]
    assert (
        selected(SelectConfig(num_problems=20, method="random"), pool_of())[0]
        <= first | selected(SelectConfig(num_problems=40, method="random"), pool_of())[0]
    )


def test_a_larger_cap_keeps_all_that_a_smaller_one_kept():
    small = selected(SelectConfig(caps={"one": 10}), pool_of())[0]
    assert small < selected(SelectConfig(caps={"one": 11}), pool_of())[0]


def test_a_source_of_which_nothing_is_left_does_not_empty_the_mix():
    cfg = SelectConfig(weights={"one": 1, "two": 1, "gone": 5})
    ids, _, selection = selected(cfg, pool_of({"one": 8, "two": 5}))
    assert by_source(ids) == {"one": 5, "two": 5}
    assert selection.notes == ("source gone: no problem was left to select, so its weight had no effect",)


def test_a_size_that_cannot_be_reached_is_noted():
    ids, drops, selection = selected(SelectConfig(num_problems=500), pool_of())
    assert (len(ids), drops) == (170, [])
    assert "allow 170 problems only" in selection.notes[0]


def test_nothing_is_selected_from_nothing():
    pool = Pool(problem_ids=[], sources=[], questions=list)
    assert select_problems(SelectConfig(num_problems=3, caps={"one": 2}), pool, seed=0).kept == {}


def test_shares_are_exact_to_less_than_one_item():
    for seed in range(200):
        draw = random.Random(seed)
        available = {name: draw.randrange(1, 50) for name in "abcd"}
        weights = {name: draw.choice([0.1, 0.3, 1, 2.5, 7]) for name in "abcd"}
        counts = mix(available, weights)
        size, total = sum(counts.values()), sum(weights.values())
        for name, count in counts.items():
            assert count <= available[name]
            assert abs(count - size * weights[name] / total) < 1
        # one item more would ask one source for more than it has
        assert any((size + 1) * weights[name] / total > available[name] - 1e-9 for name in "abcd")


def source(tmp_path, name, num_rows):
    path = tmp_path / f"{name}.jsonl"
    rows = [
        f'{{"problem": "{name} question number {i}: add {i} and {i * i + 7}.", "answer": "{i}"}}\n'
        for i in range(num_rows)
    ]
    path.write_text("".join(rows))
    return FileSource(path=str(path))


def test_the_best_sources_are_read_and_the_others_are_not(tmp_path):
    good, bad, best = (source(tmp_path, name, 3) for name in ("good", "bad", "best"))
    quality = {"good": 2.0, "bad": 1.0, "best": 3.0}
    cfg = CurateConfig(sources=(good, bad, best), select=SelectConfig(top_k_sources=2, quality=quality))
    assert [source_name(s) for s in sources_to_read(cfg)] == ["good", "best"]
    assert left_out(cfg) == ["source bad is left out by select.top_k_sources = 2"]
    in_order = CurateConfig(sources=(good, bad, best), select=SelectConfig(top_k_sources=1))
    assert sources_to_read(in_order) == (good,)
    assert sources_to_read(CurateConfig(sources=(good, bad))) == (good, bad)


@pytest.mark.parametrize(
    ("select", "complaint"),
    [
        (SelectConfig(caps={"gsm": 3}), "select.caps: 'gsm' is none of the sources, which are: a, b"),
        (SelectConfig(weights={"a": 1}), "select.weights: has no value for source 'b'"),
        (SelectConfig(quality={"b": 1}, top_k_sources=1), "select.quality: has no value for source 'a'"),
    ],
)
def test_a_selection_that_does_not_fit_the_sources_is_refused(tmp_path, select, complaint):
    cfg = CurateConfig(sources=(source(tmp_path, "a", 2), source(tmp_path, "b", 2)), select=select)
    with pytest.raises(ConfigError, match=complaint):
        check_selection(cfg)


def test_weights_are_needed_of_the_sources_that_are_read_alone(tmp_path):
    sources = (source(tmp_path, "a", 2), source(tmp_path, "b", 2))
    check_selection(CurateConfig(sources=sources, select=SelectConfig(top_k_sources=1, weights={"a": 1})))


def test_curation_drops_what_is_not_selected_and_its_ledger_adds_up(tmp_path):
    sources = (source(tmp_path, "one", 9), source(tmp_path, "two", 4), source(tmp_path, "three", 5))
    select = SelectConfig(top_k_sources=2, caps={"one": 6}, num_problems=7, method="random")
    cfg = CurateConfig(sources=sources, select=select)
    (tmp_path / "none").mkdir()
    summary = curate(cfg, benchmarks=tmp_path / "none", seed=0, workdir=tmp_path / "out", telemetry=NullTelemetry())
    problems = list(read_shards(tmp_path / "out" / "problems", Problem))
    dropped = list(read_shards(tmp_path / "out" / "dropped", DroppedRow))
    assert Counter(drop.reason for drop in dropped) == {"over_cap": 3, "not_drawn": 3}
    assert {p.problem_id for p in problems}.isdisjoint(drop.problem_id for drop in dropped)
    step = next(step for step in summary.ledger if step.step == "select")
    assert (step.num_in, step.num_out, step.dropped) == (13, 7, {"over_cap": 3, "not_drawn": 3})
    kept = Counter(p.source for p in problems)
    assert step.noted == {"kept_of_one": kept["one"], "kept_of_two": kept["two"]}
    decontaminate = next(step for step in summary.ledger if step.step == "decontaminate")
    assert decontaminate.noted["kept_of_one"] == 9
    assert "source three is left out by select.top_k_sources = 2" in summary.notes
