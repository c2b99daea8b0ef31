"""The figures of long use in docs/data/drills.md are those that `klear bench endurance` measured."""

import json
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs" / "data"


def test_the_page_has_each_measurement_and_says_which_target_was_missed():
    page = (DATA / "drills.md").read_text().splitlines()
    rows = json.loads((DATA / "endurance.json").read_text())["rows"]
    assert len(rows) == 36
    for row in rows:
        missed = "" if row["ok"] else ": missed"
        assert f"| {row['name']} | {row['value']:,} {row['unit']} | {row['target']}{missed} |" in page
