"""AdamW, its schedule, and the update that never applies what is not finite."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from klear_core.config.train import OptimConfig


def lr_at(step: int, cfg: OptimConfig, num_steps: int) -> float:
    """Learning rate of update `step` (from 0): linear warm-up to `lr`, then a cosine that reaches `min_lr_ratio` at the last step."""
    if step < cfg.warmup_steps:
        return cfg.lr * (step + 1) / cfg.warmup_steps
    floor = cfg.lr * cfg.min_lr_ratio
    left = max(1, num_steps - 1 - cfg.warmup_steps)
    share = min(1.0, (step - cfg.warmup_steps) / left)
    return floor + (cfg.lr - floor) * 0.5 * (1 + math.cos(math.pi * share))


def make_optimizer(model: nn.Module, cfg: OptimConfig) -> torch.optim.AdamW:
    """AdamW with decay on matrices only: not on norms and biases (one axis), and not on embeddings."""
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)}
    decayed: list[nn.Parameter] = []
    plain: list[nn.Parameter] = []
    for p in model.parameters():
        if p.requires_grad:
            (decayed if p.ndim >= 2 and id(p) not in embeddings else plain).append(p)
    groups = [{"params": decayed, "weight_decay": cfg.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=cfg.lr, betas=cfg.betas, fused=True)
    for p in decayed + plain:  # moments exist from the start: memory fails early, and a checkpoint is whole at any step
        optimizer.state[p] = {"step": torch.zeros((), device=p.device), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    return optimizer


def grad_norm(model: nn.Module) -> Tensor:
    """The global 2-norm of all gradients, over all ranks."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    full: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # sharded gradients give a sharded norm
    return full


def apply_update(model: nn.Module, optimizer: torch.optim.Optimizer, *, lr: float, norm: Tensor, max_grad_norm: float) -> None:
    """Clip to `max_grad_norm`, step, and clear the gradients."""
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_grad_norm, norm)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
