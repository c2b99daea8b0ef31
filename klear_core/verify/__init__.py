"""Judges: was the answer right, wrong, absent, or could it not be judged."""

from klear_core.verify.pool import JudgeHealth, JudgePool, build_verifier

__all__ = ["JudgeHealth", "JudgePool", "build_verifier"]
