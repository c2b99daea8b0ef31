from __future__ import annotations

import re
from pathlib import Path

import pytest
from evaluate_fakes import RIGHT, WRONG, make_problem, make_sample

from klear_core.config.evaluate import EvaluateConfig
from klear_core.config.load import load_profile
from klear_core.errors import ConfigError
from klear_core.evaluate.compare.published import (
    SIZES,
    PublishedModel,
    agreement_with,
    read_published,
    rerun_bound,
)
from klear_core.evaluate.counts import tally
from klear_core.evaluate.score import make_report
from klear_core.scores import EvalReport

CONFIGS = Path(__file__).parents[3] / "configs"
PAPER = PublishedModel(model="paper", source="T1", scores={"aime24": 90.0}, num_samples={"aime24": 64})


def aime24(num_right: int, *, num_problems: int = 30, num_samples: int = 8) -> EvalReport:
    """Every problem has the same number of right answers."""
    samples = [
        make_sample(i, j, RIGHT if j < num_right else WRONG, benchmark="aime24")
        for i in range(num_problems)
        for j in range(num_samples)
    ]
    counts = tally(samples, [make_problem(i) for i in range(num_problems)])
    return make_report(counts, EvaluateConfig(), benchmark="aime24", num_samples=num_samples, seed=0)


def test_two_runs_of_the_papers_model_differ_by_at_most_1_9_points() -> None:
    """1.96 * sqrt(2 * 0.905 * 0.095 / 1920) = 0.0185."""
    assert rerun_bound(0.905, 30, 64, 64, confidence=0.95) == pytest.approx(0.0185, abs=5e-5)


@pytest.mark.parametrize(("num_right", "agrees"), [(7, True), (4, False), (8, False)])
def test_a_score_agrees_if_a_rerun_may_differ_so_much(num_right: int, agrees: bool) -> None:
    """7 of 8 is 87.5 %, 2.5 points below; the noise of 240 answers is 2.1 points, that of the paper's 1,920 0.7."""
    found = agreement_with(PAPER, aime24(num_right))
    assert found is not None
    assert found.agrees == agrees
    assert found.difference == pytest.approx(num_right / 8 - 0.9)


def test_another_number_of_problems_is_another_benchmark() -> None:
    assert agreement_with(PAPER, aime24(7, num_problems=29)) is None


def test_every_published_score_has_its_n_and_its_source() -> None:
    models = read_published(CONFIGS / "published.toml")
    assert {"Klear-Reasoner-8B, RL, 32K", "Klear-Reasoner-8B, RL, 64K (YaRN 2.5)"} <= {m.model for m in models}
    assert all(model.source and set(model.num_samples) == set(model.scores) for model in models)


def test_every_score_in_the_readme_of_qwen3_06b_is_shown_beside_a_run() -> None:
    rows = re.findall(r"^\|.*\| ([\d.]+) % \|", (CONFIGS / "qwen3_06b" / "README.md").read_text(), re.MULTILINE)
    models = read_published(CONFIGS / "published.toml")
    assert len(rows) == 8
    assert sorted(map(float, rows)) == sorted(m.scores["math500"] for m in models if "rasbt" in m.source)


def test_the_papers_benchmarks_have_the_names_and_sizes_of_the_published_ones() -> None:
    for benchmark in load_profile(CONFIGS / "klear_8b").benchmarks:
        assert SIZES[benchmark.name] == benchmark.expected_rows


def test_a_wrong_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "published.toml"
    file.write_text('[[score]]\nmodel = "m"\nsource = "s"\nscores = { aime24 = 90 }\nnum_samples = {}\n')
    with pytest.raises(ConfigError, match=r"published\.toml: .*m: scores and num_samples name different benchmarks"):
        read_published(file)


@pytest.mark.parametrize("n", [0, -1])
def test_a_published_score_of_no_samples_is_refused(tmp_path: Path, n: int) -> None:
    file = tmp_path / "published.toml"
    file.write_text(
        f'[[score]]\nmodel = "m"\nsource = "s"\nscores = {{ aime24 = 90 }}\nnum_samples = {{ aime24 = {n} }}\n'
    )
    with pytest.raises(ConfigError, match=r"published\.toml: .*num_samples\.aime24.*greater than or equal to 1"):
        read_published(file)


@pytest.mark.parametrize(
    ("stated", "differs"),
    [
        ({"prompts": {"aime24": "boxed"}}, ("prompt boxed, here plain",)),
        ({"sampling": {"max_new_tokens": 65536}}, ("max_new_tokens 65536, here 32768",)),
        ({"prompts": {"aime25": "boxed"}, "sampling": {"temperature": 0.6}}, ()),
        ({"harness": "lighteval"}, ("harness lighteval, here Klear's judge",)),
    ],
)
def test_the_verdict_is_withheld_where_the_source_states_something_else(stated: dict, differs: tuple[str, ...]) -> None:
    found = agreement_with(PAPER.model_copy(update=stated), aime24(7))
    assert found is not None
    assert found.differs == differs
    assert (found.agrees is None) == bool(differs)


def test_what_a_server_sets_itself_is_not_taken_for_what_the_source_states() -> None:
    engine = {"kind": "served", "model": "r1", "base_url": "http://host/v1"}
    ours = aime24(7)
    decoding = type(ours.decoding).model_validate(ours.decoding.model_dump() | {"engine": engine})
    found = agreement_with(
        PAPER.model_copy(update={"sampling": {"top_k": 0}}), ours.model_copy(update={"decoding": decoding})
    )
    assert found is not None
    assert (found.agrees, found.differs) == (None, ("top_k 0, here as the server sets it",))
