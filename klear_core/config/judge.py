"""Define judge settings of single stages, which override the common ones of `[verify]`."""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, create_model

from klear_core.config.settings import Settings
from klear_core.config.verify import CodeConfig, VerifyConfig

COMMON = ("sandbox", "limits", "judges")
"""Judge settings that no stage can override: they describe the machine, or define names that references use."""

BENCHMARK_CODE = CodeConfig(max_tests=0, compare="decimal", cpu_s=6.0, recursion_limit=50_000)
"""LiveCodeBench's rules: all tests, lines equal as text or as exact decimals, 6 s a test, and its recursion limit."""
_BENCHMARK_DEFAULTS: dict[str, Any] = {
    "code": BENCHMARK_CODE.model_dump(include={"max_tests", "compare", "cpu_s", "recursion_limit"})
}


def _partial(model: type[Settings], *, without: tuple[str, ...] = ()) -> type[Settings]:
    """Return a class with the same settings, all of which may be left out; None means the common value."""
    fields: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        if name in without:
            continue
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            below = _partial(kind)
            fields[name] = (below, below())
            continue
        # The bounds belong to the value alone: on `kind | None` they would be compared with None, too.
        bounded = Annotated[(kind, *field.metadata)] if field.metadata else kind
        fields[name] = (bounded | types.NoneType, Field(default=None, description=field.description))
    name = model.__name__.removesuffix("Config") + "Overrides"
    doc = f"{model.__doc__} A setting that is left out has the value of `[verify]`."
    return create_model(name, __base__=Settings, __doc__=doc, __module__=__name__, **fields)


if TYPE_CHECKING:
    JudgeOverrides = VerifyConfig  # type checkers cannot see the fields of a class that is made when the module loads
else:
    JudgeOverrides = _partial(VerifyConfig, without=COMMON)


JudgedStage = Literal["distill", "tag", "tag_rl", "rl", "rl_code", "evaluate"]
"""Sections of the stages that judge answers."""


class StageJudges(Settings):
    """Judge settings of single stages, which override `[verify]`; changing one reruns that stage and later ones."""

    distill: JudgeOverrides = JudgeOverrides()
    tag: JudgeOverrides = JudgeOverrides()
    tag_rl: JudgeOverrides = JudgeOverrides()
    """Judging of the answers whose pass rates select the problems of RL."""
    rl: JudgeOverrides = JudgeOverrides()
    rl_code: JudgeOverrides = JudgeOverrides()
    evaluate: JudgeOverrides = JudgeOverrides()
    """Judging of benchmark answers. By default programs are judged as LiveCodeBench does, whatever `[verify]` says."""


def judge_of(stage: JudgedStage, common: VerifyConfig, judges: StageJudges) -> VerifyConfig:
    """Return the complete judge settings of a stage: its own over its defaults over the common ones."""
    own: Settings = getattr(judges, stage)
    settings = common.model_dump()
    # Over the common settings: those are chosen for training, and benchmarks have rules of their own.
    if stage == "evaluate":
        settings = _over(settings, _BENCHMARK_DEFAULTS)
    return VerifyConfig.model_validate(_over(settings, own.model_dump(exclude_none=True)))


def _over(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with the values of `own` in place of its own, table by table."""
    merged = dict(base)
    for key, value in own.items():
        merged[key] = _over(merged[key], value) if isinstance(value, dict) else value
    return merged
