"""docs/tour.md points at code that is there and leaves out none that RL needs; no page links to a missing file."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files(page: Path):
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\((?!https?://)([^)#]+)", prose)
    assert [target for target in targets if not (page.parent / target).exists()] == []


Function = tuple[str, str]
"""A file, and the name in it of a function, a class or (as `Class.method`) a method."""


def files_of_rl() -> dict[str, ast.Module]:
    """Only `rl/` can lead to its own losses, because nothing below imports it; `train/` is what it stands on."""
    files = [file for room in ("rl", "train") for file in sorted((ROOT / "klear_core" / room).glob("*.py"))]
    return {str(file.relative_to(ROOT)): ast.parse(file.read_text()) for file in files}


def definitions(files: dict[str, ast.Module]) -> Iterator[tuple[Function, ast.AST]]:
    for file, tree in files.items():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield (file, node.name), node
            elif isinstance(node, ast.ClassDef):
                yield (file, node.name), ast.Pass()
                for method in node.body:
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
                        yield (file, f"{node.name}.{method.name}"), method


def names_in(file: str, tree: ast.Module) -> dict[str, Function]:
    """What each name of a file means, whether it is imported (anywhere in it) or defined there."""
    names = {
        node.name: (file, node.name)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            path = f"{node.module.replace('.', '/')}.py"
            names |= {alias.name: (path, alias.name) for alias in node.names}
    return names


def calls() -> dict[Function, set[Function]]:
    """Which functions each function names; `x.step` may be that method of any class that its file knows by name."""
    files = files_of_rl()
    known = dict(definitions(files))
    found: dict[Function, set[Function]] = {}
    for (file, name), node in known.items():
        names = names_in(file, files[file])
        used = {names[n.id] for n in ast.walk(node) if isinstance(n, ast.Name) and n.id in names}
        attributes = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}
        used |= {(path, f"{owner}.{attribute}") for path, owner in names.values() for attribute in attributes}
        if isinstance(node, ast.Pass):  # a class: to call it is to call its __init__
            used.add((file, f"{name}.__init__"))
        found[file, name] = used & known.keys()
    return found


def reached(start: Function, edges: dict[Function, set[Function]]) -> set[Function]:
    seen: set[Function] = set()
    ahead = [start]
    while ahead:
        function = ahead.pop()
        if function not in seen:
            seen.add(function)
            ahead += edges.get(function, set())
    return seen


def test_rl_end_to_end_lists_the_file_of_every_function_from_train_rl_to_token_loss():
    edges = calls()
    callers: dict[Function, set[Function]] = {}
    for caller, callees in edges.items():
        for callee in callees:
            callers.setdefault(callee, set()).add(caller)
    start, end = ("klear_core/rl/loop.py", "train_rl"), ("klear_core/rl/losses.py", "token_loss")
    on_the_way = reached(start, edges) & reached(end, callers)
    # If the walk breaks, it finds less: these are on any way.
    assert {name for _, name in on_the_way} >= {
        "train_rl",
        "run_steps",
        "LearnerHandle.step",
        "Learner.step",
        "loss_head",
    }
    needed = {file for function in on_the_way for file, _ in {function, *edges[function]}}
    listed = set(re.findall(r"\]\(\.\./([\w/]+\.py)\)", TOUR.partition("## RL end to end")[2]))
    assert needed <= listed
    assert len(listed) <= 20


# ---- the map ----


MAP = re.findall(r"^( *)(\S+) +(\S.*)$", re.findall(r"```\n(flows/.*?)```", TOUR, re.DOTALL)[0], re.MULTILINE)
ROOMS = {name.rstrip("/"): text for indent, name, text in MAP if indent}


def packages(folder: Path) -> set[str]:
    return {path.parent.name for path in folder.glob("*/__init__.py")}


def test_the_map_has_the_folders_of_the_root():
    on_map = {name.rstrip("/") for indent, name, _ in MAP if not indent}
    tracked = subprocess.run(["git", "ls-files", "*/*"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert on_map == {file.partition("/")[0] for file in tracked.splitlines()} - {".ci"}


def test_the_map_has_the_rooms_of_the_core():
    assert set(ROOMS) - {"(ground)"} == packages(ROOT / "klear_core")
    ground = {file.stem for file in (ROOT / "klear_core").glob("*.py")} - {"__init__"}
    assert set(ROOMS["(ground)"].partition(": ")[2].split()) == ground


@pytest.mark.parametrize("room", sorted(set(ROOMS) - {"(ground)"}))
def test_a_line_of_the_map_has_the_rooms_within(room: str):
    assert set(re.findall(r"(\w+)/", ROOMS[room])) - {"guest"} == packages(ROOT / "klear_core" / room)


# ---- names in the prose ----


PUBLISHED_SCRIPTS = {
    "core_algos.py",
    "dp_actor.py",
    "code_r1_compute.py",
    "benchmarks/inference.py",
    "reward_config.py",
}
"""Files of the code published with the paper."""
FILES = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
MODULES = {file.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for file in FILES}
PROSE = [*PAGES, *sorted((ROOT / "configs").glob("*/README.md")), *sorted((ROOT / "docs" / "data").glob("*.md"))]


def prose_of(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def missing_files(text: str) -> set[str]:
    named = set(re.findall(r"`([\w./]+\.py)`", text)) - PUBLISHED_SCRIPTS
    return {name for name in named if not any(f"/{file}".endswith(f"/{name}") for file in FILES)}


def test_files_that_docstrings_and_comments_name_exist():
    sources = [file for file in FILES if file.startswith(("flows/", "tasks/", "klear_core/"))]
    missing = {file: missing_files((ROOT / file).read_text()) for file in sources}
    assert {file: names for file, names in missing.items() if names} == {}


@pytest.mark.parametrize("page", PROSE, ids=lambda page: "/".join(page.parts[-2:]))
def test_a_file_that_a_page_names_exists(page: Path):
    text = prose_of(page)
    # names that the page itself tells the reader to write
    own = set(re.findall(r"^`([\w/]+\.py)`:$", page.read_text(), re.MULTILINE))
    assert missing_files(text) - own == set()
    folders = set(re.findall(r"`((?:klear_core|flows|tasks|tests|configs|docs|infra)/[\w/]*)`", text))
    assert {folder for folder in folders if not (ROOT / folder).exists()} == set()


@pytest.mark.parametrize("page", PROSE, ids=lambda page: "/".join(page.parts[-2:]))
def test_a_module_that_a_page_names_exists(page: Path):
    named = set(re.findall(r"`(?:python -m )?((?:klear_core|flows|tasks)(?:\.\w+)+)`", prose_of(page)))
    assert {name for name in named if name not in MODULES and name.rpartition(".")[0] not in MODULES} == set()


@pytest.mark.parametrize("page", PROSE, ids=lambda page: "/".join(page.parts[-2:]))
def test_a_link_to_a_section_leads_to_a_heading(page: Path):
    links = re.findall(r"\]\((?!https?://)([^)#\s]*)#([^)\s]+)\)", prose_of(page))
    wrong = [
        (target, anchor) for target, anchor in links if anchor not in anchors(page.parent / target if target else page)
    ]
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
