"""The share of the peak that a plan assumes follows from attention kernel, recomputation and row length; a setting takes its place."""

import pytest

from klear_core.config.evaluate import HardwareConfig
from klear_core.config.train import TrainRuntime
from klear_core.generate.model_size import known_size
from klear_core.pipeline.costs.estimate import assumed_mfu

SIZE = known_size("Qwen3-8B")


@pytest.mark.parametrize(
    ("row_tokens", "settings", "mfu"),
    [
        (10_000, {"activation_checkpointing": True}, 0.34),
        (32_000, {"activation_checkpointing": True}, 0.29),
        (10_000, {}, 0.44),
        (10_000, {"activation_checkpointing": True, "attention": "FA3"}, 0.34 * 1.13),
        (32_000, {"activation_checkpointing": True, "attention": "FA4"}, 0.29 * 1.3),
        (10_000, {"attention": "FA3"}, 0.50),
        (10_000, {"activation_checkpointing": True, "keep_layers": 36}, 0.44),
    ],
)
def test_the_share_of_the_peak_is_that_computed_by_hand(row_tokens: int, settings: dict, mfu: float):
    runtime = TrainRuntime(**settings)
    assert assumed_mfu(HardwareConfig(), SIZE, runtime, row_tokens) == pytest.approx(mfu, abs=0.012)
    assert assumed_mfu(HardwareConfig(mfu=0.37), SIZE, runtime, row_tokens) == 0.37
