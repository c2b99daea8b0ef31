"""Read teachers' API keys from Prefect blocks."""

from __future__ import annotations

from collections.abc import Iterable

from prefect.blocks.system import Secret
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from klear_core.config.distill import HttpTeacherConfig
from klear_core.config.jobs import DistillJob
from klear_core.config.stage import Job
from klear_core.errors import ConfigError


def read_keys(jobs: Iterable[Job]) -> dict[str, SecretStr]:
    """Return the keys in the Secret blocks that distillations among these jobs name; blocks that do not exist are left
    out. Raise ConfigError, without the value, if a block holds something else than text.
    """
    found: dict[str, SecretStr] = {}
    for name in sorted(_blocks_of(jobs)):
        try:
            block = Secret.load(name)
        except ValueError as e:
            if isinstance(e.__cause__, ObjectNotFound):
                continue
            # the text and the cause of another error may show what is in the block
            raise ConfigError(f"the Prefect block secret/{name} cannot be read ({type(e).__name__})") from None
        assert isinstance(block, Secret), type(block)
        value = block.value.get_secret_value()
        if not isinstance(value, str):
            raise ConfigError(f"the Prefect block secret/{name} holds {type(value).__name__}, not the text of a key")
        found[name] = SecretStr(value)
    return found


def _blocks_of(jobs: Iterable[Job]) -> set[str]:
    names: set[str] = set()
    for job in jobs:
        if isinstance(job, DistillJob) and isinstance(job.distill.teacher, HttpTeacherConfig):
            names.update(endpoint.api_key_block for endpoint in job.distill.teacher.runtime.endpoints)
    return names - {""}
