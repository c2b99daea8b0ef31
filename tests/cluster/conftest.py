import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS / "verify"), str(TESTS / "rl"), str(TESTS / "distill")]  # problems and answers in a line
