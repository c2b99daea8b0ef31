"""Judge model answers to math and code problems as right, wrong, absent, or impossible to judge."""

from klear_core.verify.blame import JudgeHealth, has_test_program
from klear_core.verify.judge_pool import JudgePool, faulty_references

__all__ = ["JudgeHealth", "JudgePool", "faulty_references", "has_test_program"]
