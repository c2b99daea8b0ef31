"""Contradictions between settings are found before anything is made."""

from klear_core.config.data import CurateConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.sft import SftConfig
from klear_core.config.train import TrainRuntime
from klear_core.estimate import estimate
from klear_core.preflight import problems_with


def test_a_context_that_the_heads_do_not_fit_is_named_with_what_is_allowed() -> None:
    config = PipelineConfig(name="x", sft=SftConfig(runtime=TrainRuntime(num_workers=3, context_parallel=3)))
    wanted = "sft.runtime.context_parallel = 3 does not divide the 4 attention heads of the model; allowed: 1, 2, 4"
    assert wanted in problems_with(config)


def test_a_context_of_four_keeps_a_quarter_of_the_activations() -> None:
    """1 GB per billion bytes: what does not shrink is 16 bytes a parameter over the workers."""

    def memory_gb(context_parallel: int, tokens: int) -> float:
        runtime = TrainRuntime(num_workers=4, context_parallel=context_parallel, tokens_per_microbatch=tokens)
        config = PipelineConfig(name="x", sft=SftConfig(runtime=runtime))
        found = next(row.memory_gb for row in estimate(config) if row.stage == "sft")
        assert found is not None
        return found

    assert memory_gb(4, 4000) == memory_gb(1, 1000) < memory_gb(1, 4000)


def test_a_weight_for_a_source_that_does_not_exist_is_a_typo() -> None:
    curate = CurateConfig.model_validate({"sources": [{"kind": "procedural", "name": "chain"}, "data/openthoughts.jsonl"]})
    config = PipelineConfig(name="x", curate=curate, sft=SftConfig(source_weights={"openthoughts": 2, "opnthoughts": 2}))
    wanted = "sft.source_weights: 'opnthoughts' is none of curate.sources, which are: chain, openthoughts"
    assert wanted in problems_with(config)
    assert not any("'openthoughts'" in problem for problem in problems_with(config))
