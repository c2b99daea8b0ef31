"""Evaluate a model with intervals: python evaluate.py MODEL EXAM.jsonl OUT

MODEL is a Hugging Face folder. A row of EXAM has `question` and `reference`, or is in a published schema. OUT keeps
every answer with its verdict; started again, only answers that are missing are sampled.
"""

import sys
from pathlib import Path

import klear_core as klear


def main(model: Path, exam: Path, out: Path) -> None:
    """Sample four answers to each question, judge them, and print the score with both intervals."""
    questions = klear.load_benchmark(klear.BenchmarkConfig(name="exam", source=str(exam)), seed=0)
    suite = [klear.Benchmark(name="exam", problems=tuple(questions), num_samples=4)]
    cfg = klear.EvaluateConfig(
        sampling={"temperature": 0.6, "top_p": 0.95, "max_new_tokens": 32},  # 32,768 for a reasoning model
        # engine={"kind": "vllm"} for other models than Llama, Qwen2 and Qwen3
    )
    klear.evaluate_model(cfg, klear.VerifyConfig(tags="none"), suite, model=model, workdir=out)
    (report,) = klear.read_reports(out)
    avg, percent = report.avg, 100
    print(f"avg@{report.num_samples} {avg.value * percent:.1f} % on {report.num_problems} problems")
    print(f"  other problems {avg.new_problems.low * percent:.1f} to {avg.new_problems.high * percent:.1f}")
    print(f"  these problems, other samples {avg.rerun.low * percent:.1f} to {avg.rerun.high * percent:.1f}")
    print(f"  cut off {report.truncated_frac * percent:.1f} %, not judged {report.unscored or 'none'}")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
