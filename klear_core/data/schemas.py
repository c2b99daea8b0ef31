"""Which published row format a file has. The formats themselves are in `math_schemas.py`, `code_schemas.py` and `mixed_schemas.py`."""

from __future__ import annotations

from klear_core.config.data import RowSchema
from klear_core.data.code_schemas import CODE_SCHEMAS
from klear_core.data.fields import Fields, Schema
from klear_core.data.math_schemas import MATH_SCHEMAS
from klear_core.data.mixed_schemas import MIXED_SCHEMAS
from klear_core.errors import ConfigError

SCHEMAS: tuple[Schema, ...] = (*MATH_SCHEMAS, *CODE_SCHEMAS, *MIXED_SCHEMAS)


def schema_for(row_schema: RowSchema, first_row: Fields, *, where: str) -> Schema:
    """The format that the user named, or for `auto` the one that the keys of the first row tell.

    Where one format's keys include another's, the more specific one is meant. ConfigError if none fits or several do.
    """
    if row_schema != "auto":
        return next(s for s in SCHEMAS if s.name == row_schema)
    fits = [(s, signature) for s in SCHEMAS for signature in s.signatures if signature <= first_row.keys()]
    best = {s.name: s for s, signature in fits if not any(signature < other for _, other in fits)}
    if len(best) == 1:
        return next(iter(best.values()))
    if not best:
        raise ConfigError(
            f"{where}: no known row format has the keys {sorted(first_row)}; known formats: {', '.join(s.name for s in SCHEMAS)}"
        )
    raise ConfigError(
        f"{where}: a row with the keys {sorted(first_row)} could be any of {', '.join(sorted(best))}; set row_schema to the one it is"
    )
