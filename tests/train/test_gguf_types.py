"""Quantised blocks of a GGUF file become the numbers that ggml's documented layout says, in a model of mixed types."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from struct import unpack_from

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize
from gguf_models import rewritten, write_model
from safetensors.torch import load_file

from klear_core.config.train import GgufModelConfig
from klear_core.errors import ConfigError
from klear_core.gguf_checks import check_gguf
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, take_model
from klear_core.train.gguf_files import write_gguf

WIDTH = 256
"""Values in a block of the K types."""

# ---- the layouts, one value at a time, from ggml-common.h and the comments of ggml-quants.c
# d and m: float16, the scale of a block and of its minimum. i: the number of a value in its block.


def half(block: bytes, at: int) -> float:
    return float(unpack_from("<e", block, at)[0])


def q2_k(block: bytes, i: int) -> float:
    """16 bytes of scale and minimum, 4 bits each, for 16 values each; 64 bytes of 2 bits; d, m."""
    n, j, k = i // 128, i % 128 // 32, i % 32
    q = block[16 + 32 * n + k] >> 2 * j & 3
    return half(block, 80) * (block[i // 16] & 15) * q - half(block, 82) * (block[i // 16] >> 4)


def q3_k(block: bytes, i: int) -> float:
    """32 bytes of high bits; 64 bytes of 2 low bits; 12 bytes of 16 scales in 6 bits; d."""
    n, j, k, s = i // 128, i % 128 // 32, i % 32, i // 16
    q = (block[32 + 32 * n + k] >> 2 * j & 3) - (0 if block[k] >> (4 * n + j) & 1 else 4)
    scale = (block[96 + s % 8] >> 4 * (s // 8) & 15) | (block[104 + s % 4] >> 2 * (s // 4) & 3) << 4
    return half(block, 108) * (scale - 32) * q


def scale_and_minimum(packed: bytes, s: int) -> tuple[int, int]:
    """Of 32 values, in 12 bytes of 6 bits: the first four whole, of the others the high bits are behind the former."""
    if s < 4:
        return packed[s] & 63, packed[s + 4] & 63
    return packed[s + 4] & 15 | packed[s - 4] >> 6 << 4, packed[s + 4] >> 4 | packed[s] >> 6 << 4


def q4_k(block: bytes, i: int) -> float:
    """d, m, 12 bytes of scales and minima; 128 bytes of 4 bits, low ones for 32 values, high ones for the next."""
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    q = block[16 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15
    return half(block, 0) * scale * q - half(block, 2) * minimum


def q5_k(block: bytes, i: int) -> float:
    """As Q4_K, with 32 bytes of fifth bits before the fours."""
    scale, minimum = scale_and_minimum(block[4:16], i // 32)
    q = block[48 + 32 * (i // 64) + i % 32] >> 4 * (i // 32 % 2) & 15 | (block[16 + i % 32] >> i // 32 & 1) << 4
    return half(block, 0) * scale * q - half(block, 2) * minimum


def q6_k(block: bytes, i: int) -> float:
    """128 bytes of 4 low bits, 64 of 2 high bits, 16 signed scales, d; 32 is zero."""
    n, j, k = i // 128, i % 128 // 32, i % 32
    low = block[64 * n + 32 * (j % 2) + k] >> 4 * (j // 2) & 15
    high = block[128 + 32 * n + k] >> 2 * j & 3
    return half(block, 208) * unpack_from("b", block, 192 + i // 16)[0] * ((low | high << 4) - 32)


LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(block: bytes, i: int) -> float:
    """d; 16 bytes, low bits for the first half of 32 values; each names one of 16 uneven levels."""
    return half(block, 0) * LEVELS[block[2 + i % 16] >> 4 * (i // 16) & 15]


def iq4_xs(block: bytes, i: int) -> float:
    """d; 2 and 4 bytes of the high and low bits of 8 scales; 128 bytes as in IQ4_NL."""
    s = i // 32
    scale = block[4 + s // 2] >> 4 * (s % 2) & 15 | (unpack_from("<H", block, 2)[0] >> 2 * s & 3) << 4
    return half(block, 0) * (scale - 32) * LEVELS[block[8 + 16 * s + i % 16] >> 4 * (i % 32 // 16) & 15]


Q = GGMLQuantizationType
LAYOUTS: dict[GGMLQuantizationType, tuple[Callable[[bytes, int], float], Sequence[int]]] = {
    Q.Q2_K: (q2_k, (80, 82)),
    Q.Q3_K: (q3_k, (108,)),
    Q.Q4_K: (q4_k, (0, 2)),
    Q.Q5_K: (q5_k, (0, 2)),
    Q.Q6_K: (q6_k, (208,)),
    Q.IQ4_NL: (iq4_nl, (0,)),
    Q.IQ4_XS: (iq4_xs, (0,)),
}
"""Value of a block, and where its float16 are."""
MATRICES = {
    "attn_q": ("self_attn.q_proj", Q.Q2_K),
    "attn_k": ("self_attn.k_proj", Q.Q3_K),
    "attn_v": ("self_attn.v_proj", Q.Q4_K),
    "attn_output": ("self_attn.o_proj", Q.Q5_K),
    "ffn_gate": ("mlp.gate_proj", Q.Q6_K),
    "ffn_up": ("mlp.up_proj", Q.IQ4_NL),
    "ffn_down": ("mlp.down_proj", Q.IQ4_XS),
}
"""Name in the folder and type of each matrix of the mixed model."""


def random_rows(kind: GGMLQuantizationType, rows: int, rng: np.random.Generator) -> np.ndarray:
    """Blocks of random bytes for rows of WIDTH values; their float16 are between 2^-8 and 2^-7."""
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, WIDTH // num_values, num_bytes), dtype=np.uint8)
    for at in LAYOUTS[kind][1]:
        blocks[..., at + 1] = 0x1C  # sign and exponent
    return blocks.reshape(rows, -1)


def by_hand(kind: GGMLQuantizationType, rows: np.ndarray) -> torch.Tensor:
    num_values, num_bytes = GGML_QUANT_SIZES[kind]
    value = LAYOUTS[kind][0]
    blocks = [bytes(block) for block in rows.reshape(-1, num_bytes)]
    values = [value(block, i) for block in blocks for i in range(num_values)]
    return torch.tensor(values).reshape(len(rows), WIDTH)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "head_dim": 64, "num_hidden_layers": 1}
    model = write_model("qwen2", root / "model", "qwen2", **sizes)
    write_gguf(model, root / "x.gguf", "f16", name="x", licence="")
    return root / "x.gguf"


def test_each_matrix_of_a_model_of_mixed_types_has_the_values_of_its_layout(plain, tmp_path):
    rng = np.random.default_rng(0)
    num_rows = {"attn_k": 128, "attn_v": 128}  # of 2 heads, where the queries have 4
    blocks = {name: random_rows(kind, num_rows.get(name, WIDTH), rng) for name, (_, kind) in MATRICES.items()}
    path = rewritten(
        plain,
        tmp_path / "x.gguf",
        tensors={f"blk.0.{name}.weight": values for name, values in blocks.items()},
        types={f"blk.0.{name}.weight": kind for name, (_, kind) in MATRICES.items()},
    )
    summary = take_model(GgufModelConfig(path=str(path)), licence="", workdir=tmp_path, telemetry=NullTelemetry())
    for _, kind in MATRICES.values():
        assert kind.name in summary.notes[0]
    weights = load_file(model_folder(tmp_path) / "model.safetensors")
    for name, (key, kind) in MATRICES.items():
        expected = by_hand(kind, blocks[name])
        assert expected.abs().max() > 0.1, kind
        torch.testing.assert_close(weights[f"model.layers.0.{key}.weight"], expected, rtol=1e-5, atol=1e-6)


def test_layouts_by_hand():
    """Q4_K: 2 * 3 * 5 - 1 * 4 = 26. Q6_K: 0.5 * -2 * (33 - 32) = -1. IQ4_NL: the ninth level is 1."""
    two, one, half_ = (np.float16(value).tobytes() for value in (2, 1, 0.5))
    rows = {
        Q.Q4_K: two + one + bytes([3] * 4 + [4] * 4 + [0x43] * 4) + bytes([0x55] * 128),
        Q.Q6_K: bytes([0x11] * 128 + [0xAA] * 64) + bytes([256 - 2] * 16) + half_,
        Q.IQ4_NL: one + bytes([0x88] * 16),
    }
    for (kind, row), value in zip(rows.items(), (26.0, -1.0, 1.0), strict=True):
        assert set(dequantize(np.frombuffer(row, np.uint8), kind).tolist()) == {value}, kind
        assert {LAYOUTS[kind][0](row, i) for i in range(GGML_QUANT_SIZES[kind][0])} == {value}, kind


# ---- types that cannot be read


def can_be_read(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("kind", Q, ids=lambda kind: kind.name)
def test_types_that_the_library_cannot_dequantise_are_refused_from_the_header(kind, plain, tmp_path):
    name, num_bytes = "blk.0.ffn_up.weight", WIDTH // GGML_QUANT_SIZES[kind][0] * GGML_QUANT_SIZES[kind][1]
    zeros = np.zeros((WIDTH, num_bytes), np.uint8)
    path = rewritten(plain, tmp_path / "x.gguf", tensors={name: zeros}, types={name: kind})
    if can_be_read(kind):
        check_gguf(path)
    else:
        with pytest.raises(ConfigError, match=f"{name} is of ggml's type {kind.value}, .* quantise the model again"):
            check_gguf(path)
