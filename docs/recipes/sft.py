"""SFT on traces: python sft.py MODEL TRACES.jsonl OUT

MODEL is a Hugging Face folder with a chat template; TRACES has messages, conversations, or `prompt` and `response`,
with the thinking in <think> tags. OUT/sft/model is the trained model, a Hugging Face folder. Killed at any moment and
started again, it continues from its last checkpoint.
"""

import sys
from pathlib import Path

import klear_core as klear


def main(model: Path, traces: Path, out: Path) -> None:
    """Read the traces, and fine-tune the model on them; the loss is on the responses alone."""
    read = klear.take_traces([klear.FileSource(path=str(traces))], workdir=out / "traces")
    print(f"{read.counts['traces']} traces of {read.counts['problems']} problems")
    cfg = klear.SftConfig(
        num_epochs=2,
        rows_per_step=8,  # 128 for an 8B model
        max_tokens=512,  # longer rows are dropped and counted
        optim={"lr": 4e-3, "warmup_steps": 5},  # for a tiny model; 8e-5 for 8B
        dtype="float32",  # "bfloat16" on a GPU
        # lora={"rank": 16} trains adapters
    )
    summary = klear.train_sft(cfg, model=model, traces=out / "traces", workdir=out / "sft")
    print(summary.counts)
    for step in summary.ledger:
        print(f"{step.step}: {step.num_in} -> {step.num_out} {step.unit}s {step.dropped or ''}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
