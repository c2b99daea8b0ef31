"""Klear's core: everything about the method, nothing about Prefect or MLflow."""

import os

# A row of a matrix product then has the same bits in whatever batch it is computed, so that a resumed run can equal an
# uninterrupted one. MKL reads this at its first call; its kernels for few rows sum in another order otherwise. On AMD
# processors that holds from 4 rows on, which the sampler always has (`MIN_ROWS`). Costs nothing measurable.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
