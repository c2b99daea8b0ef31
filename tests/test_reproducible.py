import pytest
import torch
from torch.nn.functional import linear

import klear_core  # noqa: F401  (its import sets how MKL computes)
from klear_core.generate.decoder.batch import MIN_ROWS


@pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="this torch multiplies matrices with another library than MKL"
)
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 64), (64, 263), (96, 512), (256, 64)])
def test_a_row_of_a_matrix_product_has_the_same_bits_in_any_batch_of_the_sampler(num_in: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(300, num_in, generator=generator), torch.randn(num_out, num_in, generator=generator)
    whole = linear(x, weight)
    # fewer rows take another kernel on some processors (AMD's), and the sampler never has fewer
    assert [n for n in range(MIN_ROWS, 300) if not torch.equal(linear(x[:n], weight), whole[:n])] == []
