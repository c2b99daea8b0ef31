from klear_core.config.curate import CurateConfig
from klear_core.config.data import ProceduralSource
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.pipeline.graph import stages_of


def inputs_of(config: PipelineConfig) -> dict[str, dict[str, str]]:
    return {s.name: dict(s.inputs) for s in stages_of(config)}


def test_rl_learns_from_the_curated_problems_unless_it_has_its_own():
    own = PipelineConfig(
        curate_rl=CurateConfig(sources=(ProceduralSource(num_problems=64),)), rl_code=RlConfig(domain="code")
    )
    assert inputs_of(PipelineConfig())["rl"] == {"model": "sft", "problems": "curate"}
    assert inputs_of(own)["rl"] == {"model": "sft", "problems": "curate_rl"}
    assert inputs_of(own)["rl_code"] == {"model": "rl", "problems": "curate_rl"}
    assert inputs_of(own)["distill"] == {"problems": "curate"}


def test_every_model_is_evaluated_and_the_report_reads_everything():
    graph = inputs_of(PipelineConfig(rl_code=RlConfig(domain="code")))
    assert [name for name in graph if name.startswith("evaluate")] == [
        "evaluate_base",
        "evaluate_sft",
        "evaluate_rl",
        "evaluate_rl_code",
    ]
    assert set(graph["report"]) == set(graph) - {"report"}


def test_stages_come_after_what_they_are_made_from():
    seen: set[str] = set()
    for stage in stages_of(PipelineConfig(curate_rl=CurateConfig(), rl_code=RlConfig())):
        assert set(stage.inputs.values()) <= seen
        seen.add(stage.name)
