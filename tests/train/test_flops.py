"""Operations of a step, counted by hand."""

import pytest
import torch
from tiny_models import random_rows, tiny_folder

from klear_core.train.model import FlopCount, load_model, named_peak, peak_flops


def test_a_tiny_model_is_counted_by_hand(tmp_path):
    count = FlopCount.of(load_model(tiny_folder(tmp_path), device="cpu"))
    attention = 16 * 32 + 2 * 16 * 16 + 32 * 16  # q, k and v, o: 2 query heads and 1 key head of 16
    assert count.layer_params == 2 * (attention + 3 * 16 * 24)
    assert count.head_params == 320 * 16
    assert count.attention_width == 2 * 2 * 16


def test_a_step_counts_tokens_loss_tokens_and_pairs():
    count = FlopCount(layer_params=100, head_params=10, attention_width=3)
    rows = random_rows([4, 6], prompt=3)  # 10 tokens, 4 of them learnt, (16 + 36) / 2 pairs
    assert count.step(rows) == 6 * (100 * 10 + 10 * 4 + 2 * 3 * 26)


def test_a_cpu_has_no_peak():
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA L4", 121),
        ("NVIDIA L40", 181),
        ("NVIDIA L40S", 362),
    ],
)
def test_a_gpus_peak_is_found_by_whole_words_of_its_name(name: str, tflops: int):
    assert named_peak(name) == tflops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA GB200", "NVIDIA H20", "Tesla T4"])
def test_a_gpu_that_is_not_in_the_table_has_no_peak(name: str):
    assert named_peak(name) is None


def test_the_work_of_a_row_counts_recomputation_and_leaves_out_gradients_of_frozen_weights():
    """100 weights in layers and 10 in the head, attention 3 wide: FLOPs a token over 9 (7) * 3 a squared token."""
    count = FlopCount(layer_params=100, head_params=10, attention_width=3)
    assert count.row_work(recomputes=True).attention_len == (8 * 100 + 6 * 10) / (9 * 3)
    assert count.row_work(recomputes=False).attention_len == (6 * 100 + 6 * 10) / (7 * 3)
    frozen = FlopCount(
        layer_params=100, head_params=10, attention_width=3, frozen_layer_params=90, frozen_head_params=10
    )
    assert frozen.row_work(recomputes=False).attention_len == (660 - 2 * 100) / (7 * 3)
