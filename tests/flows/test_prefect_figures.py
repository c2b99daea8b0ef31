"""The table of what Prefect does itself, in docs/data/drills.md, has the outcomes that were seen."""

import json
from datetime import datetime
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs" / "data"


def test_the_page_has_the_states_of_each_run_and_when_they_came():
    page = (DATA / "drills.md").read_text()
    raw = json.loads((DATA / "prefect.json").read_text())
    assert len(raw["runs"]) == 6
    for run in raw["runs"]:
        row = next(line for line in page.splitlines() if line.startswith(f"| {run['what']} |"))
        assert f"| {outcome(run, raw['seen_at'])} |" in row


def outcome(run: dict, seen_at: str) -> str:
    """The states that followed, with the seconds after which they came."""
    names = [name for name, _ in run["states"]]
    times = [datetime.fromisoformat(at) for _, at in run["states"]]
    begin = names.index(run["since"])
    later = [
        f"{name} after {(at - times[begin]).total_seconds():.0f} s"
        for name, at in zip(names[begin + 1 :], times[begin + 1 :], strict=True)
    ]
    seconds = (datetime.fromisoformat(seen_at) - times[begin]).total_seconds()
    return ", ".join(later) or f"still {run['since']} after {seconds:.0f} s"
