import random
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from klear_core.artifacts.records import read_shards
from klear_core.config.curate import CurateConfig, HashedEmbedding, SelectConfig, SentenceEmbedding
from klear_core.config.data import FileSource
from klear_core.data.candidates import Candidate, DroppedRow
from klear_core.data.curation.curate import curate
from klear_core.data.curation.selection import (
    Pool,
    check_embedding,
    check_selection,
    embed,
    left_out,
    mix,
    select_problems,
    sources_to_read,
)
from klear_core.data.sources import read_source, source_name
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
    assert by_source(ids) == kept
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
    assert select_problems(SelectConfig(num_problems=3, caps={"one": 2}), pool, seed=0).notes == (
        "select.num_problems = 3, but sources and weights allow 0 problems only",
    )


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


SHARED = Path(__file__).parents[4] / "shared" / "data"
MATH = ("math-deepscaler-math/math.json", "math-deepscaler-aime/aime.json")


def real_pool(size):
    """Return real questions of two sources."""
    if not SHARED.is_dir():
        pytest.skip(f"the published sets are not beside the checkout ({SHARED})")
    rows = [row for path in MATH for row in read_source(FileSource(path=str(SHARED / path), limit=size // 2), seed=0)]
    found = {row.problem_id: row for row in rows if isinstance(row, Candidate)}
    questions = [row.question for row in found.values()]
    return Pool(problem_ids=list(found), sources=[row.source for row in found.values()], questions=lambda: questions)


def test_k_center_covers_real_questions_better_than_a_draw():
    pool = real_pool(2500)
    # distances are in an embedding four times as long as that of the choice
    vectors = embed(HashedEmbedding(dimensions=1024), pool.questions, np.arange(len(pool.sources))).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    def distances_to(chosen):
        is_chosen = np.array([name in chosen for name in pool.problem_ids])
        assert is_chosen.sum() == 300
        nearest = (vectors @ vectors[is_chosen].T).max(axis=1)
        return np.sqrt(np.maximum(0, 2 - 2 * nearest))

    draws = [selected(SelectConfig(num_problems=300, method="random"), pool, seed=seed)[0] for seed in range(5)]
    drawn = [distances_to(draw) for draw in draws]
    chosen = distances_to(selected(SelectConfig(num_problems=300), pool)[0])
    assert chosen.max() < min(draw.max() for draw in drawn)
    assert chosen.mean() < min(draw.mean() for draw in drawn)
    plain = distances_to(selected(SelectConfig(num_problems=300, refine_steps=0), pool)[0])
    assert plain.max() < min(draw.max() for draw in drawn)


def test_k_center_depends_on_the_ids_and_the_seed_alone():
    cfg = SelectConfig(num_problems=40)
    first, drops, _ = selected(cfg, pool_of())
    assert first == selected(cfg, pool_of(order_seed=5))[0]
    assert len(first) == 40
    assert {drop.reason for drop in drops} == {"not_a_center"}
    assert all(drop.matched_id in first for drop in drops)


def test_k_center_keeps_the_shares_of_sources():
    cfg = SelectConfig(num_problems=20, weights={"one": 3, "two": 1, "three": 1}, caps={"two": 30})
    ids, drops, _ = selected(cfg, pool_of())
    assert by_source(ids) == {"one": 12, "two": 4, "three": 4}
    assert Counter(drop.reason for drop in drops) == {"over_cap": 30, "not_a_center": 120}


def test_a_dropped_problem_names_the_nearest_one_that_stays():
    questions = ["find the sum of two primes", "a train leaves the station at noon", "find the sum of three primes"]
    pool = Pool(problem_ids=["a", "b", "c"], sources=["s"] * 3, questions=lambda: questions)
    for seed in range(4):
        _, (drop,), _ = selected(SelectConfig(num_problems=2), pool, seed=seed)
        assert {drop.problem_id, drop.matched_id} == {"a", "c"}


def test_questions_without_a_word_have_a_vector():
    vectors = embed(HashedEmbedding(dimensions=16), lambda: ["?", "", "find x"], np.array([2, 0, 1]))
    assert vectors.any(axis=1).all()


def test_a_model_or_a_library_that_is_not_there_is_refused_at_once():
    if find_spec("sentence_transformers") is None:
        with pytest.raises(ConfigError, match=r"pip install 'klear\[embed\]'"):
            check_embedding(SentenceEmbedding(model="all-MiniLM"))
        return
    with pytest.raises(ConfigError, match="'all-MiniLM' is no folder"):
        check_embedding(SentenceEmbedding(model="all-MiniLM"))
