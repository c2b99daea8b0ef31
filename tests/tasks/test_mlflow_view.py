"""MLflow's table of runs has a view with the scores as columns; views of users are left alone."""

import json
from pathlib import Path

import mlflow

from tasks.mlflow_backend import VIEW_PARAMETER, VIEW_TAG, scores_view


def columns(tag: str | None) -> list[str]:
    assert tag is not None
    state = json.loads(json.loads(tag)["state"])
    assert state["selectedColumns"] == [*state["columnOrder"], "attributes.`Source`"]
    assert list(state["columnWidths"]) == state["columnOrder"]
    return state["columnOrder"]


def test_every_score_has_a_column():
    view = scores_view(None, ["score/aime24_avg_at_64", "score/hmmt_avg_at_64"], at_ms=1)
    assert columns(view) == ["metrics.`score/aime24_avg_at_64`", "metrics.`score/hmmt_avg_at_64`"]
    assert json.loads(view or "")["name"] == "Scores"
    assert json.loads(view or "")["createdAt"] == 1


def test_columns_of_another_run_stay_behind_the_new_ones():
    first = scores_view(None, ["score/a", "score/b"], at_ms=1)
    assert columns(scores_view(first, ["score/b", "score/c"], at_ms=2)) == [
        "metrics.`score/c`",
        "metrics.`score/a`",
        "metrics.`score/b`",
    ]


def test_a_view_that_has_the_columns_is_left_as_it_is():
    first = scores_view(None, ["score/a", "score/b"], at_ms=1)
    assert scores_view(first, ["score/b"], at_ms=2) is None


def test_a_view_that_a_user_has_saved_is_left_as_it_is():
    theirs = json.dumps(
        {"name": "Scores", "createdAt": 1, "updatedAt": 2, "state": "deflate;eJyrVkrLz1eyUkpKLFKqBQAdegQ0"}
    )
    assert scores_view(theirs, ["score/a"], at_ms=3) is None
    assert scores_view("not ours", ["score/a"], at_ms=3) is None


def test_the_oldest_columns_go_where_mlflow_takes_no_longer_tag():
    view = None
    for number in range(60):
        view = scores_view(view, [f"score/a_benchmark_with_a_long_name_{number}_avg_at_64"], at_ms=number)
    assert view is not None
    assert len(view) <= 5000
    assert "name_59_" in columns(view)[0]
    assert len(columns(view)) > 15


def test_the_installed_mlflow_knows_such_views():
    scripts = [f.read_text() for f in (Path(mlflow.__file__).parent / "server/js/build/static/js").glob("*.js")]
    prefix, key = VIEW_TAG.rsplit(".", 1)
    name, value = VIEW_PARAMETER.split("=")
    assert key == value
    for part in (
        f'"{prefix}."',
        f'"{name}"',
        '"selectedColumns","columnOrder","columnWidths"',
        "mlflow.experiment_page.saved_views",
    ):
        assert any(part in script for script in scripts), part
