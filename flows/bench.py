"""`klear bench NAME`: run one benchmark file of the checkout and print its measurements."""

from __future__ import annotations

import json
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from klear_core.errors import ConfigError

_FOLDER = Path(__file__).parents[1] / "tests" / "bench"


def run_bench(name: str) -> None:
    """Run `measure()` of tests/bench/**/bench_NAME.py and print a table, then one JSON line per measurement.

    A measurement is a mapping with name, value, unit, target, ok and versions.
    """
    if not _FOLDER.is_dir():
        raise ConfigError(f"klear bench needs a checkout of the repository: there is no {_FOLDER}")
    files = {path.stem.removeprefix("bench_"): path for path in sorted(_FOLDER.rglob("bench_*.py"))}
    if name not in files:
        raise ConfigError(f"no benchmark {name!r}; there are: {', '.join(files)}")
    measures: Sequence[Mapping[str, object]] = runpy.run_path(str(files[name]))["measure"]()
    table = Table("measure", "value", "unit", "target", "ok", box=None)
    for m in measures:
        value = f"{m['value']:.4g}" if isinstance(m["value"], float) else str(m["value"])
        table.add_row(str(m["name"]), value, str(m["unit"]), str(m["target"]), "yes" if m["ok"] else "NO")
    Console().print(table)
    for m in measures:
        print(json.dumps(m))
