import sys
from pathlib import Path

sys.path.insert(
    0, str(Path(__file__).parents[1] / "generate")
)  # the engines' model folder and endpoint are shared with their own tests
