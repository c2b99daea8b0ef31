"""A view of MLflow's table of runs that begins with the scores, for its menu Views and for a link.

MLflow has no setting for the columns that the table shows at first. It keeps a view that users share as a tag of the
experiment, and a URL that names the view opens it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

VIEW_TAG = "mlflow.sharedViewState.scores"
VIEW_PARAMETER = "viewStateShareKey=scores"

_MAX_CHARS = 5000
"""MLflow's limit of a tag's value; some 30 columns."""
_WIDTH_PX = 190
"""Enough for `score/longer_avg_at_64`; by default MLflow cuts names after some ten characters."""


def scores_view(tag: str | None, metrics: Collection[str], *, at_ms: int) -> str | None:
    """Return the new value of VIEW_TAG, where `tag` is the present one: columns for these metrics, then earlier ones.

    None if nothing must change: the columns are there, or a user has saved a view of their own under this name.
    """
    known = _columns(tag)
    if known is None:
        return None
    wanted = [f"metrics.`{name}`" for name in metrics]
    missing = [column for column in wanted if column not in known]
    if not missing:
        return None
    columns = [*missing, *known]
    while len(view := _view(columns, at_ms)) > _MAX_CHARS:
        columns.pop()
    return view


def _view(columns: Sequence[str], at_ms: int) -> str:
    state = {
        "selectedColumns": [*columns, "attributes.`Source`"],
        "columnOrder": columns,
        "columnWidths": dict.fromkeys(columns, _WIDTH_PX),
    }
    return json.dumps({"name": "Scores", "createdAt": at_ms, "state": json.dumps(state)})


def _columns(tag: str | None) -> list[str] | None:
    """Return the score columns of a view that `scores_view` made; None for another, which MLflow has compressed."""
    if tag is None:
        return []
    try:
        return list(json.loads(json.loads(tag)["state"])["columnOrder"])
    except (ValueError, KeyError, TypeError):
        return None
