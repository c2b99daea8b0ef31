"""`klear rl replay`: train other losses on a saved RL step, and print how their updates differ from the run's."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flows.find import find_artifact
from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.opened import store_of
from klear_core.config.explain import explained
from klear_core.config.jobs import RlJob
from klear_core.config.losses import GPPO_PRESETS, LOSS_KINDS, GppoConfig, LossConfig
from klear_core.config.rl import RlConfig
from klear_core.config.toml import toml_value
from klear_core.errors import ArtifactError, ConfigError
from tasks.resources import learner_ranks

if TYPE_CHECKING:
    from klear_core.rl.replay import LossEffect

_TABLE_WIDTH = 120
"""Characters that the table needs, with the name of a loss that has one or two settings."""
_BETWEEN_SETTINGS = re.compile(r",(?![^{\[]*[}\]])")
"""A comma that is not inside the braces or brackets of a value."""
_LEGEND = """\
value, gradient: means over the mini-batches; cosine: of the change of all weights with that of the run's loss
A>0, A<0: tokens of that advantage that are clipped, decayed or masked, of all tokens; F: mean weight of theirs
KL: from the old policy to the new, KL(old, new), nats per token; entropy: change of the mean, nats"""


def replay_step(step: int, which: str, given: Sequence[str], *, root: Path, num_workers: int | None) -> None:
    """Print a table with one row per loss: `given` ones (`clip`, `dgpo,high_root=3`), or all at their defaults."""
    folder = find_artifact(which, root)
    manifest = read_manifest(folder)
    job = _job_of(folder, manifest)
    cfg = job.rl
    if num_workers is not None:
        # Validated, which a copy is not: the number must fit the other settings, such as context_parallel.
        runtime = cfg.runtime.model_dump() | {"num_workers": num_workers}
        cfg = _validated(cfg.model_dump() | {"runtime": runtime}, origin=f"--workers {num_workers}")
    losses = {text: parse_loss(text) for text in given} or _other_losses(cfg.loss)

    from klear_core.rl.replay import Replay, replay  # torch takes seconds, and wrong input is an error before

    model = _model_of(folder, manifest)
    asked = Replay(cfg=cfg, seed=job.seed, model=model, folder=folder, step=step, losses=losses)
    with learner_ranks(cfg.runtime, model) as run_ranks:
        found = replay(asked, run_ranks)
    # A file has no width to fit, and in a narrow terminal a wrapped line is better than numbers without digits.
    console = Console(highlight=False, width=max(_TABLE_WIDTH, Console().width))
    console.print(f"RL step {step} of {manifest.stage} {manifest.fingerprint[:8]}: {found.num_samples} answers")
    console.print(_effects_table({f"{cfg.loss.kind} (the run's)": found.own} | found.others))
    console.print(_LEGEND, style="dim")
    console.print(_comparison(found.difference))


def parse_loss(text: str) -> LossConfig:
    """Return the loss that `kind` or `kind,key=value,...` names; ConfigError if it is none."""
    kind, *pairs = _BETWEEN_SETTINGS.split(text)
    settings: dict[str, object] = {"kind": kind.strip()}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator:
            raise ConfigError(f"--loss {text!r}: expected kind,key=value, for example gppo,beta_low=0.25")
        settings[key.strip()] = toml_value(value.strip())
    return _validated({"loss": settings}, origin=f"--loss {text!r}").loss


def _validated(settings: Mapping[str, object], *, origin: str) -> RlConfig:
    try:
        return RlConfig.model_validate(settings)
    except ValidationError as e:
        raise ConfigError(f"{origin}: {explained(e, RlConfig)}") from e


def _other_losses(own: LossConfig) -> dict[str, LossConfig]:
    """Return every kind with its defaults, gppo with each of its presets, but not the run's own loss."""
    losses: dict[str, LossConfig] = {f"gppo,preset={name}": parse_loss(f"gppo,preset={name}") for name in GPPO_PRESETS}
    for cls in LOSS_KINDS:
        if cls is not GppoConfig:
            losses[cls().kind] = cls()
    return {name: loss for name, loss in losses.items() if loss != own}


def _job_of(folder: Path, manifest: Manifest) -> RlJob:
    if manifest.kind != RlJob.kind:
        raise ArtifactError(f"{folder}: an artifact of kind {manifest.kind}; only rl stages have steps to replay")
    try:
        return RlJob.model_validate(manifest.config)
    except ValidationError as e:
        raise ArtifactError(f"{folder}: its settings are not of this version of Klear: {explained(e, RlJob)}") from e


def _model_of(folder: Path, manifest: Manifest) -> Path:
    """Return the folder of the model that the stage began with, in the same store."""
    (model,) = [record for record in manifest.inputs if record.role == "model"]
    found = store_of(folder).find(model.kind, model.fingerprint)
    if found is None:
        raise ArtifactError(f"{model.kind}/{model.fingerprint}: the model that {manifest.stage} began with is gone")
    return found.path


def _effects_table(rows: Mapping[str, LossEffect]) -> Table:
    table = Table(box=None)
    table.add_column("loss", overflow="fold")  # a long name gives way, and no number does
    for header in ("value", "gradient", "cosine", "A>0", "A<0", "F, A>0", "F, A<0", "KL", "entropy"):
        table.add_column(header, justify="right", no_wrap=True)
    for name, effect in rows.items():
        table.add_row(escape(name), *_cells(effect.metrics, effect.cosine, effect.kl, effect.entropy_change))
    return table


def _cells(metrics: Mapping[str, float], cosine: float, kl: float, entropy_change: float) -> list[str]:
    """Return the cells of one loss; a dash where there is no number, as after a step whose updates were skipped."""

    def shown(name: str, form: str) -> str:
        return form.format(metrics[name]) if name in metrics else "-"

    return [
        shown("rl/loss/mean", "{:.4f}"),
        shown("rl/grad/norm", "{:.3f}"),
        "-" if math.isnan(cosine) else f"{cosine:.4f}",
        shown("rl/clip/positive_frac", "{:.2%}"),
        shown("rl/clip/negative_frac", "{:.2%}"),
        shown("rl/weight/positive", "{:.3f}"),
        shown("rl/weight/negative", "{:.3f}"),
        f"{kl:.3g}",
        f"{entropy_change:+.4f}",
    ]


def _comparison(difference: float) -> str:
    if difference == 0:
        return "The run's loss gave every metric as it was logged, to the bit."
    if math.isinf(difference):
        return "[yellow]The run's loss gave other metrics than were logged: the code is another than the run's.[/]"
    return (
        f"The run's loss gave the metrics that were logged, but for {difference:.1e} of one of them: "
        "rounding differs on other devices and with other numbers of processes."
    )
