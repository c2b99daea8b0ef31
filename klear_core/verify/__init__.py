"""Judge model answers to math and code problems as right, wrong, absent, or impossible to judge."""

from klear_core.verify.pool import JudgeHealth, JudgePool, build_verifier

__all__ = ["JudgeHealth", "JudgePool", "build_verifier"]
