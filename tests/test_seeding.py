import subprocess
import sys

from klear_core.seeding import seed_for


def test_the_seed_is_the_same_in_every_process():
    code = "from klear_core.seeding import seed_for; print(seed_for(7, 'rl/rollout', 'p1', 3))"
    fresh = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "123", "PATH": ""},
    )
    assert int(fresh.stdout) == seed_for(7, "rl/rollout", "p1", 3)


def test_every_argument_matters():
    seeds = {
        seed_for(0, "a"),
        seed_for(1, "a"),
        seed_for(0, "b"),
        seed_for(0, "a", "x"),
        seed_for(0, "a", "x", 1),
        seed_for(0, "a", "x1"),
    }
    assert len(seeds) == 6


def test_parts_do_not_run_together():
    assert seed_for(0, "a", "bc") != seed_for(0, "ab", "c")


def test_seeds_fit_a_signed_64_bit_integer():
    assert all(0 <= seed_for(s, "w") < 2**63 for s in range(1000))
