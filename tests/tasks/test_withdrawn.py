"""A model that was rolled back stays so, whichever artifact holds it."""

from __future__ import annotations

from pathlib import Path

from stored_evaluations import given_model, made_model

from klear_core.artifacts.manifest import ArtifactRef
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base
from tasks.evaluation import withdrawn_elsewhere
from tasks.model_registry import Promotion, Rollback, Version

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)
RUDE = Rollback(by="ann", why="rude", to=1, at="2026-01-01T00:00:00+00:00")


def model(folder: Path, seed: int) -> ArtifactRef:
    files = folder / f"files{seed}"
    files.mkdir()
    prepare_base(TINY, seed=seed, workdir=files, telemetry=NullTelemetry())
    return made_model(folder, seed=seed, files=files)


def version(number: int, uri: str, rollback: Rollback | None) -> Version:
    promotion = Promotion(
        model="rl/a",
        model_uri=uri,
        evaluation="evaluate/a",
        evaluation_uri="file:///a",
        decision="promote/a",
        decision_uri="file:///a",
        run="r",
        over=None,
    )
    return Version(number=number, promotion=promotion, promoted_at="", rollback=rollback)


def test_a_model_that_was_rolled_back_is_known_when_it_is_given_by_its_folder(tmp_path: Path) -> None:
    """Else `klear evaluate rl` with a rule for promotion could make it champion again."""
    lost, other = model(tmp_path, 0), model(tmp_path, 1)
    given = given_model(tmp_path, lost.path / "model", work=tmp_path / "pointer")
    versions = [version(1, "file:///gone", RUDE), version(2, lost.uri, RUDE), version(3, other.uri, None)]
    assert withdrawn_elsewhere(given.path, versions) == RUDE.sentence
    assert withdrawn_elsewhere(other.path, versions) == ""
