"""GPPO on problems with a reward of one's own: python gppo.py MODEL PROBLEMS.jsonl OUT, in the folder of this file.

A row of PROBLEMS has `question` and `reference`, such as {"kind": "math", "answers": ["42"]}. OUT/rl/model is the
trained model, a Hugging Face folder.
"""

import sys
from pathlib import Path

import klear_core as klear


def letters(answer) -> float:
    """Return the share of letters, with a JudgedAnswer's `text`, `score`, `num_tokens` and more at hand."""
    return sum(char.isalpha() for char in answer.text) / max(len(answer.text), 1)


def main(model: Path, problems: Path, out: Path) -> None:
    """Train on the verdict of the judge plus half of `letters`."""
    klear.curate(klear.CurateConfig(sources=[str(problems)]), workdir=out / "problems")
    cfg = klear.RlConfig(
        num_steps=4,
        minibatches_per_step=2,
        loss={"kind": "gppo", "beta_low": 0.5},  # or clip, cispo, gspo, dgpo, aspo, sapo, trm, m2po, dppo
        optim={"lr": 1e-3, "warmup_steps": 0},  # for a tiny model; 1e-6 for 8B
        rollout={"groups_per_step": 2, "samples_per_group": 8, "sampling": {"max_new_tokens": 16}},
        reward={
            "custom": [{"function": "gppo:letters", "weight": 0.5}],
            "missing_open": None,  # the default punishes answers without <think> and </think>
            "missing_close": None,
        },
        dtype="float32",
    )
    setup = klear.RlSetup(cfg=cfg, model=model, workdir=out / "rl")
    summary = klear.train_rl(setup, klear.VerifyConfig(tags="none"), problems=out / "problems")
    print(summary.counts)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
