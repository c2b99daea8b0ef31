"""Find the API key of a teacher's endpoint, in an environment variable or among the keys read from Prefect blocks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType

from pydantic import SecretStr

from klear_core.config.distill import TeacherEndpoint
from klear_core.errors import ConfigError

BlockKeys = Mapping[str, SecretStr]
"""API keys by the name of the Prefect block that holds them. They are read outside the core, which knows no Prefect."""
NO_KEYS: BlockKeys = MappingProxyType({})
MAKE_BLOCK = "make a block of type Secret with this name in Prefect's UI (Blocks), on the server that the run uses"


def request_headers(cfg: TeacherEndpoint, keys: BlockKeys = NO_KEYS) -> dict[str, str]:
    """Return the headers that carry the key. Raise ConfigError, without the key, if there is none or it is unusable.

    `keys` has those that are in Prefect blocks.
    """
    if cfg.api_key_env:
        named, place = f"api_key_env = {cfg.api_key_env!r}", "environment variable"
        key, remedy = os.environ.get(cfg.api_key_env, "").strip(), "export it and run again"
    elif cfg.api_key_block:
        named, place = f"api_key_block = {cfg.api_key_block!r}", "Prefect block"
        secret = keys.get(cfg.api_key_block)
        key, remedy = secret.get_secret_value().strip() if secret else "", MAKE_BLOCK
    else:
        return {}
    if not key:
        raise ConfigError(f"distill.teacher {named}: this {place} is not set; {remedy}")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(f"distill.teacher {named}: this {place} holds characters that no API key has")
    return {"Authorization": f"Bearer {key}"}
