"""The fused head against logits and cross-entropy, at Qwen's vocabulary: CPU time and peak memory of forward and backward.

Each side runs in a process of its own, for a peak is a property of a process. Memory is counted beyond what both sides must
have: inputs and gradients.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

TOKENS, HIDDEN, VOCAB = 2048, 512, 151_936


def measure() -> list[dict[str, object]]:
    """Ratios fused over plain, best of two runs a side."""
    plain, fused = ([_run(side) for _ in range(2)] for side in ("plain", "fused"))
    memory = min(r["extra_mb"] for r in fused) / min(r["extra_mb"] for r in plain)
    cpu = min(r["cpu_s"] for r in fused) / min(r["cpu_s"] for r in plain)
    loss = abs(fused[0]["loss"] - plain[0]["loss"])
    versions = {"torch": torch.__version__, "tokens": TOKENS, "hidden": HIDDEN, "vocab": VOCAB}
    return [
        _entry("fused_head/memory/ratio", memory, "of plain", 0.1, versions),
        _entry("fused_head/cpu_time/ratio", cpu, "of plain", 1.1, versions),
        _entry("fused_head/loss/difference", loss, "nats", 1e-4, versions),
    ]


def _entry(name: str, value: float, unit: str, most: float, versions: dict[str, object]) -> dict[str, object]:
    return {
        "name": name,
        "value": value,
        "unit": unit,
        "target": f"<= {most}",
        "ok": value <= most,
        "versions": versions,
    }


def _run(side: str) -> dict[str, float]:
    out = subprocess.run([sys.executable, __file__, side], check=True, capture_output=True, text=True)
    return dict(json.loads(out.stdout.splitlines()[-1]))


def _one_side(side: str) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden_NH = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight_VH = (torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5).requires_grad_()
    target_N = torch.randint(VOCAB, (TOKENS,))
    from klear_core.train.logps import fused_loss

    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    if side == "plain":
        loss = torch.nn.functional.cross_entropy(hidden_NH @ weight_VH.T, target_N)
    else:
        loss = fused_loss(hidden_NH, weight_VH, target_N, lambda logp_C, _entropy_C, _where: -logp_C / TOKENS).loss
    loss.backward()  # type: ignore[no-untyped-call]
    cpu_s = time.process_time() - started
    gradients_mb = (weight_VH.numel() + hidden_NH.numel()) * 4 / 1e6
    extra_mb = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 / 1e6 - gradients_mb
    return {"cpu_s": cpu_s, "extra_mb": extra_mb, "loss": loss.item()}


if __name__ == "__main__":
    print(json.dumps(_one_side(sys.argv[1])))
