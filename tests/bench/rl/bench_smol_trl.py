"""TRL's GRPOTrainer on the problems, from the SFT model and with the budget of a finished run of the smol profile.

It needs a run (`klear run configs/smol`) in the workspace $SMOL_ROOT, by default runs, and TRL: `pip install trl`. `klear bench smol_trl`
takes the newest RL stage there, trains TRL's model into WORKSPACE/trl/seed-N, and writes a row for each step of both sides to
$SMOL_ROWS, by default docs/data/smol_trl.jsonl, in place of older ones of that seed. A step of TRL took 190 to 280 s on two idle cores: its
rows are written as they come, and every fourth step's model is kept. The models are scored alike:

    klear evaluate runs/trl/seed-0 --profile configs/smol --set seed=0 --root runs

Run as a program, this file prints the table of docs/smol.md from the rows.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from klear_core.artifacts.manifest import Manifest, read_manifest
from klear_core.artifacts.records import read_shards
from klear_core.config.rl import RlConfig
from klear_core.config.verify import VerifyConfig
from klear_core.errors import ConfigError
from klear_core.metrics import METRICS_FILE
from klear_core.rl.rewards import is_well_formed, reward_of
from klear_core.train.base_model import model_folder
from klear_core.types import Completion, Problem
from klear_core.verify import JudgePool

ROOT = Path(__file__).parents[3]
ROWS = Path(os.environ.get("SMOL_ROWS", ROOT / "docs/data/smol_trl.jsonl"))
MICRO_ROWS = 16
"""Answers in one forward pass of TRL: 16 of 100 tokens with 49,152 logits each take a third of a gigabyte."""
_EACH_THIRD, _KEPT_EVERY = 3, 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One RL step of one side."""

    side: str
    """`klear` or `trl`."""
    seed: int
    step: int
    """Counted from 1."""
    seconds: float
    """Wall clock since the start of the first step."""
    tokens: int
    """Tokens sampled so far."""
    pass_rate: float
    """Share of right answers of this step, sampled before its update."""
    malformed: float
    """Share of answers that lack a tag; see `is_well_formed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedRun:
    """A finished RL stage, and what it started from."""

    rl: Path
    manifest: Manifest
    cfg: RlConfig
    verify: VerifyConfig
    seed: int

    def input(self, role: str) -> Path:
        """Return the folder of an input of the stage."""
        for record in self.manifest.inputs:
            if record.role == role:
                return self.rl.parents[1] / record.kind / record.fingerprint
        raise ConfigError(f"{self.rl} has no input {role!r}: {[record.role for record in self.manifest.inputs]}")

    def rows(self) -> list[Row]:
        """Return the steps of our side, from the metrics that the stage logged."""
        rollout, rows = self.cfg.rollout, []
        seconds = tokens = 0.0
        for line in (self.rl / METRICS_FILE).read_text().splitlines():
            logged = json.loads(line)
            if "rl/pass/rate" not in logged:
                continue
            seconds += sum(logged[f"rl/time/{part}_s"] for part in ("wait", "train", "sync"))
            tokens += logged["rl/response/mean_tokens"] * logged["rl/groups/asked"] * rollout.samples_per_group
            row = Row(
                side="klear",
                seed=self.seed,
                step=len(rows) + 1,
                seconds=round(seconds, 1),
                tokens=round(tokens),
                pass_rate=round(logged["rl/pass/rate"], 4),
                malformed=round(logged["rl/answers/malformed_frac"], 4),
            )
            rows.append(row)
        return rows


def measure() -> list[dict[str, object]]:
    """Train TRL's model, write the rows of both sides, and return speed and the share of right answers of both."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    try:
        import transformers
        import trl
    except ImportError as e:
        raise ConfigError(f"this benchmark needs TRL ({e}); pip install trl") from e
    root = Path(os.environ.get("SMOL_ROOT", "runs"))
    run = newest_run(root)
    ours = run.rows()
    kept = [row for row in read_rows(ROWS) if row.seed != run.seed] if ROWS.exists() else []
    ROWS.parent.mkdir(parents=True, exist_ok=True)
    ROWS.write_text("".join(_line(row) for row in [*kept, *ours]))
    theirs = train_trl(run, root / "trl" / f"seed-{run.seed}")
    versions = {"transformers": transformers.__version__, "trl": trl.__version__}
    entries: list[tuple[str, float, str, str, bool]] = []
    for side, rows in (("klear", ours), ("trl", theirs)):
        entries.append((f"smol_trl/tokens_per_minute/{side}", _tokens_per_minute(rows), "tokens", "-", True))
        entries.append((f"smol_trl/last_third/{side}", _share(_third(rows, 2))[0], "right answers", "-", True))
    ratio = _tokens_per_minute(ours) / _tokens_per_minute(theirs)
    entries.append(("smol_trl/tokens_per_minute/ratio", ratio, "of TRL", ">= 1", ratio >= 1))
    return [
        {"name": n, "value": v, "unit": u, "target": t, "ok": ok, "versions": versions} for n, v, u, t, ok in entries
    ]


def newest_run(root: Path) -> FinishedRun:
    """Return the newest finished RL stage of a workspace. Raise ConfigError if there is none."""
    found = [(read_manifest(path.parent), path.parent) for path in root.glob("artifacts/rl/*/manifest.json")]
    if not found:
        raise ConfigError(f"{root} has no finished RL stage: klear run configs/smol --set workspace.root={root}")
    manifest, folder = max(found, key=lambda pair: pair[0].created_at)
    config: Any = manifest.config
    return FinishedRun(
        rl=folder.resolve(),
        manifest=manifest,
        cfg=RlConfig.model_validate(config["rl"]),
        verify=VerifyConfig.model_validate(config["verify"]),
        seed=config["seed"],
    )


def train_trl(run: FinishedRun, out: Path) -> list[Row]:
    """Train with TRL's GRPOTrainer as the run did with ours, save the model, and return its steps."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    cfg = run.cfg
    problems = {p.problem_id: p for p in read_shards(run.input("problems") / "problems", Problem)}
    order = list(problems)
    Random(run.seed).shuffle(order)
    answers = cfg.rollout.groups_per_step * cfg.rollout.samples_per_group
    per_update = answers // cfg.minibatches_per_step
    micro = math.gcd(per_update, MICRO_ROWS)
    log = _Log(run, problems)

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, _args: Any, state: Any, _control: Any, **_others: Any) -> None:
            if state.global_step % cfg.minibatches_per_step == 0:
                log.end_step()

    args = GRPOConfig(
        output_dir=str(out / "trainer"),
        seed=run.seed,
        use_cpu=True,
        bf16=True,  # TRL's default
        learning_rate=cfg.optim.lr,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=cfg.optim.warmup_steps * cfg.minibatches_per_step,
        adam_beta1=cfg.optim.betas[0],
        adam_beta2=cfg.optim.betas[1],
        weight_decay=cfg.optim.weight_decay,
        max_grad_norm=cfg.optim.max_grad_norm,
        max_steps=cfg.num_steps * cfg.minibatches_per_step,
        logging_steps=1000,
        save_strategy="steps",
        save_steps=_KEPT_EVERY * cfg.minibatches_per_step,
        save_only_model=True,
        report_to=[],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_update // micro,
        steps_per_generation=answers // micro,
        num_generations=cfg.rollout.samples_per_group,
        max_completion_length=cfg.rollout.sampling.max_new_tokens,
        temperature=cfg.rollout.sampling.temperature,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        beta=0.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        disable_dropout=True,
    )
    rows = [{"prompt": [{"role": "user", "content": problems[i].question}], "problem_id": i} for i in order]
    with JudgePool(run.verify) as judges:
        log.judges = judges
        trainer = GRPOTrainer(
            model=str(model_folder(run.input("model"))),
            reward_funcs=log.rewards,
            args=args,
            train_dataset=Dataset.from_list(rows),
            callbacks=[Steps()],
        )
        log.start()
        trainer.train()
    trainer.save_model(str(out))
    return log.rows


class _Log:
    """Rewards TRL's answers by our judge and reward, and notes each step."""

    judges: JudgePool

    def __init__(self, run: FinishedRun, problems: Mapping[str, Problem]) -> None:
        self._run, self._problems = run, problems
        self.rows: list[Row] = []
        self._started = 0.0
        self._sampled: list[tuple[int, bool, bool]] = []
        """Tokens, right, malformed, of each answer of this step."""

    def start(self) -> None:
        """Start the clock."""
        self._started = time.monotonic()

    def rewards(self, completions: Any, completion_ids: Any, problem_id: Sequence[str], **_others: Any) -> list[float]:
        """Return the reward of each answer; TRL calls it once a batch of answers."""
        values = []
        for (message,), ids, problem in zip(completions, completion_ids, problem_id, strict=True):
            text = message["content"]
            verdict = self.judges.judge(self._problems[problem], text)
            answer = Completion(
                text=text, token_ids=tuple(ids), logps=(0.0,) * len(ids), finish_reason="stop", policy_versions=()
            )
            values.append(reward_of(answer, verdict, self._run.cfg.reward))
            self._sampled.append((len(ids), verdict.is_correct, not is_well_formed(answer, self._run.cfg.reward)))
        return values

    def end_step(self) -> None:
        """Note a step that is finished."""
        num_tokens, right, malformed = (list(column) for column in zip(*self._sampled, strict=True))
        row = Row(
            side="trl",
            seed=self._run.seed,
            step=len(self.rows) + 1,
            seconds=round(time.monotonic() - self._started, 1),
            tokens=sum(num_tokens) + (self.rows[-1].tokens if self.rows else 0),
            pass_rate=round(statistics.fmean(right), 4),
            malformed=round(statistics.fmean(malformed), 4),
        )
        self.rows.append(row)
        with ROWS.open("a") as file:
            file.write(_line(row))
        self._sampled.clear()


# ---- table ----


def _line(row: Row) -> str:
    return f"{json.dumps(asdict(row))}\n"


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file."""
    return [Row(**json.loads(line)) for line in file.read_text().splitlines()]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each seed and side: time, tokens, and right answers in each third of the steps."""
    runs: dict[tuple[int, str], list[Row]] = defaultdict(list)
    for row in rows:
        runs[row.seed, row.side].append(row)
    lines = [
        "| seed | | steps | minutes | tokens sampled | tokens a minute | right, first third | second | last |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (seed, side), run in sorted(runs.items()):
        thirds = " | ".join(_percent(_third(run, i)) for i in range(_EACH_THIRD))
        name = "Klear, GPPO" if side == "klear" else "TRL, GRPO"
        last = run[-1]
        lines.append(
            f"| {seed} | {name} | {len(run)} | {last.seconds / 60:.1f} | {last.tokens:,} | "
            f"{_tokens_per_minute(run):,.0f} | {thirds} |"
        )
    return "\n".join(lines)


def _third(rows: Sequence[Row], which: int) -> Sequence[Row]:
    bounds = [round(len(rows) * i / _EACH_THIRD) for i in range(_EACH_THIRD + 1)]
    return rows[bounds[which] : bounds[which + 1]]


def _share(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the mean share of right answers, and half of its 95 % t interval over steps, which have other problems."""
    from scipy.stats import t

    shares = [row.pass_rate for row in rows]
    if len(shares) < 2:
        return statistics.fmean(shares), math.nan
    error = statistics.stdev(shares) / math.sqrt(len(shares))
    return statistics.fmean(shares), error * float(t.ppf(0.975, len(shares) - 1))


def _percent(rows: Sequence[Row]) -> str:
    mean, half = _share(rows)
    return f"{100 * mean:.1f} %" if math.isnan(half) else f"{100 * mean:.1f} ± {100 * half:.1f} %"


def _tokens_per_minute(rows: Sequence[Row]) -> float:
    return 60 * rows[-1].tokens / rows[-1].seconds


if __name__ == "__main__":
    print(table(read_rows(Path(sys.argv[1]) if len(sys.argv) > 1 else ROWS)))
