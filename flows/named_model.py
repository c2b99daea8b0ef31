"""The model that a command names: a folder, an artifact of the workspace, or a repository of the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

from rich.console import Console

from klear_core.artifacts.hub import commit_of
from klear_core.config.train import HubModelConfig
from klear_core.hf_config import read_hf_config

_HUB_ID = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TORCH_FAMILY = "qwen3"
"""`model_type` of the models that the torch engine samples."""


def on_hub(model: str, console: Console) -> HubModelConfig | None:
    """Return the model of the Hub that `owner/name` or `owner/name@revision` names, pinned to a commit.

    None for other words. The commit of a branch or tag is asked of the Hub, and printed.
    """
    named = _HUB_ID.fullmatch(model)
    if named is None:
        return None
    repo, revision = named["repo"], named["revision"] or "main"
    if not _COMMIT.fullmatch(revision):
        commit = commit_of(repo, revision)
        console.print(f"[dim]{repo}@{revision} is commit {commit}[/]")
        revision = commit
    return HubModelConfig(repo=repo, revision=revision)


def can_sample_in_torch(folder: Path) -> bool:
    """Return whether our own engine samples the model; vLLM runs the other families, too."""
    return read_hf_config(folder).model_type == _TORCH_FAMILY
