"""docs/tour.md points at code that is there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
LINKS = re.findall(r"\[`([^`]+)`\]\(\.\./([\w/]+\.py)\)", TOUR)


def test_the_tour_has_links():
    assert len(LINKS) > 20


@pytest.mark.parametrize(("name", "path"), sorted(set(LINKS)))
def test_a_link_of_the_tour_leads_to_what_it_names(name: str, path: str):
    file = ROOT / path
    assert file.is_file()
    if name.endswith(".py"):
        assert path.endswith(name)
    else:
        tree = ast.parse(file.read_text())
        assert name in {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
