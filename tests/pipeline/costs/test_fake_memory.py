"""The closed form of a learner's memory against the learner itself, run on fake tensors."""

import pytest

from klear_core.generate.model_size import ModelSize
from klear_core.pipeline.costs.fake_run import LearnerCase, hf_config_of, measure
from klear_core.pipeline.costs.memory import LearnerLoad, learner_peak

_WIDE = ModelSize(
    vocab_size=151_936, hidden_size=2048, num_layers=3, num_heads=16, num_kv_heads=8, head_dim=128, mlp_size=6144,
    is_tied=True, is_fused=True,
)  # fmt: skip
_DEEP = ModelSize(
    vocab_size=32_000, hidden_size=1024, num_layers=6, num_heads=16, num_kv_heads=4, head_dim=64, mlp_size=4096,
    is_tied=False, is_fused=False,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "num_ranks", "cp_size", "checkpointing", "keep_layers", "adapter_rank"),
    [
        (_WIDE, 8, 1, True, 0, None),
        (_WIDE, 1, 1, False, 0, None),
        (_DEEP, 4, 2, False, 0, None),
        (_DEEP, 4, 1, True, 3, None),
        (_WIDE, 1, 1, True, 1, None),
        (_WIDE, 1, 1, True, 0, 16),
        (_DEEP, 4, 1, True, 0, 64),
    ],
)
def test_the_closed_form_agrees_with_the_learner_on_fake_tensors(
    size: ModelSize, num_ranks: int, cp_size: int, checkpointing: bool, keep_layers: int, adapter_rank: int | None
) -> None:
    case = LearnerCase(
        model=hf_config_of(size),
        num_ranks=num_ranks,
        cp_size=cp_size,
        num_tokens=8192,
        activation_checkpointing=checkpointing,
        keep_layers=keep_layers,
        adapter_rank=adapter_rank,
    )
    load = LearnerLoad(
        num_ranks=num_ranks,
        num_tokens=8192 // cp_size,
        value_bytes=2,
        has_checkpointing=checkpointing,
        keep_layers=keep_layers,
        adapter_rank=adapter_rank,
    )
    assert learner_peak(size, load).num_bytes == pytest.approx(measure(case)[0].num_bytes, rel=0.02)
