"""Judge model answers to math and code problems as right, wrong, absent, or impossible to judge."""

from klear_core.verify.health import JudgeHealth
from klear_core.verify.pool import JudgePool, build_judge_pool
from klear_core.verify.references import faulty_references, has_test_program

__all__ = ["JudgeHealth", "JudgePool", "build_judge_pool", "faulty_references", "has_test_program"]
