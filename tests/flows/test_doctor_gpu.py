"""`klear doctor --gpu`: a table of all fast paths, and a status that says whether one of them fails."""

import pytest

from flows.doctor import PathCheck, check_paths, show_paths


def test_a_path_that_disagrees_or_crashes_fails_the_command_and_a_missing_one_does_not(capsys):
    sound = PathCheck(name="norm/cpu", verdict="agrees", error=0.02, time_ratio=0.5)
    absent = PathCheck(name="attention/cuda/flash_attn", verdict="missing", note="flash_attn is not installed")
    assert show_paths(iter([sound, absent, PathCheck(name="vllm/cuda", verdict="not run")]))
    told = capsys.readouterr().out
    assert all(what in told for what in ("norm/cpu", "agrees", "0.02", "0.5", "missing", "not run"))
    for verdict in ("disagrees", "crashed"):
        assert not show_paths(iter([sound, PathCheck(name="gate/cpu", verdict=verdict)]))


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_on_this_machine_nothing_that_is_there_fails_and_weights_reach_another_process():
    checks = {check.name: check for check in check_paths()}
    assert not [check for check in checks.values() if check.is_bad]
    assert checks["transfer/gloo"].verdict == "agrees"
    assert {"norm/cpu", "norm/cpu, torch.compile", "vllm/cuda"} <= checks.keys()
