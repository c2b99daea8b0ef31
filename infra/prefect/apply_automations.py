"""Make the server's automations those of `automations.yaml`: replaced by name, so that applying twice does not double them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import yaml
from prefect.client.orchestration import get_client
from prefect.events.schemas.automations import AutomationCore
from pydantic import TypeAdapter


def read(path: Path) -> list[AutomationCore]:
    """The automations of a file."""
    return TypeAdapter(list[AutomationCore]).validate_python(yaml.safe_load(path.read_text())["automations"])


async def apply(wanted: list[AutomationCore]) -> None:
    """Replace these on the server at PREFECT_API_URL."""
    async with get_client() as client:
        for automation in wanted:
            for old in await client.read_automations_by_name(automation.name):
                await client.delete_automation(old.id)
            await client.create_automation(automation)


if __name__ == "__main__":
    asyncio.run(apply(read(Path(__file__).with_name("automations.yaml"))))
