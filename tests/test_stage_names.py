"""A stage is known in one place: no module compares names of stages, but for those that define stages."""

import ast
from collections.abc import Iterator
from pathlib import Path

from klear_core.config.curate import CurateConfig, TagConfig
from klear_core.config.data import BenchmarkConfig, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, PromoteConfig
from klear_core.config.rl import RlConfig
from klear_core.pipeline.graph import stages_of

ROOT = Path(__file__).parents[1]
DEFINE_STAGES = {"klear_core/config/stage.py", "klear_core/pipeline/graph.py"}
NAMES = {
    stage.name
    for stage in stages_of(
        PipelineConfig(
            benchmarks=(BenchmarkConfig(name="b", source=ProceduralSource()),),
            curate_rl=CurateConfig(),
            tag=TagConfig(),
            tag_rl=TagConfig(),
            rl_code=RlConfig(),
            promote=PromoteConfig(),
        )
    )
}


def compared_names(source: str) -> Iterator[tuple[int, str]]:
    """Line and name wherever a stage's name is an operand of a comparison or a case, or a prefix is tested."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Compare(left=left, comparators=others):
                operands = [left, *others]
            case ast.MatchValue(value=value):
                operands = [value]
            case ast.Call(func=ast.Attribute(attr="startswith" | "removeprefix"), args=args):
                operands = args
            case _:
                continue
        constants = [n for operand in operands for n in ast.walk(operand) if isinstance(n, ast.Constant)]
        for constant in constants:
            if constant.value in NAMES or constant.value == "evaluate_":
                yield constant.lineno, str(constant.value)


def test_the_search_finds_comparisons_cases_and_prefixes():
    source = (
        'if name == "rl" or name in ("sft", "x"): pass\nname.startswith("evaluate_")\nmatch name:\n case "base": pass'
    )
    assert sorted(compared_names(source)) == [(1, "rl"), (1, "sft"), (2, "evaluate_"), (4, "base")]


def test_no_other_module_compares_the_names_of_stages():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name!r}"
        for folder in ("klear_core", "tasks", "flows")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if str(path.relative_to(ROOT)) not in DEFINE_STAGES
        for line, name in compared_names(path.read_text())
    ]
    assert found == []
