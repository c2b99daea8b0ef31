"""Judge model answers to math and code problems as right, wrong, absent, or impossible to judge."""

from klear_core.verify.judge_pool import JudgeHealth, JudgePool, build_judge_pool, faulty_references, has_test_program

__all__ = ["JudgeHealth", "JudgePool", "build_judge_pool", "faulty_references", "has_test_program"]
