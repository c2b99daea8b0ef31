"""Implement the method, without Prefect or MLflow."""

import os

# With this setting a row of a matrix product has the same bits in every batch, so that a resumed run can equal an
# uninterrupted one; without it, MKL's kernels for few rows sum in another order. MKL reads it at its first call. On AMD
# processors it holds from 4 rows on, which the sampler always has (`MIN_ROWS`). It costs nothing measurable.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
