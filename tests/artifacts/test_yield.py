"""A share of lost input stops a stage, is a warning, or is nothing to remark upon; nothing left is always an error."""

import pytest
from pydantic import ValidationError

from klear_core.artifacts.manifest import LedgerStep, check_yield
from klear_core.config.curate import CurateConfig, CurateRuntime, ReadYieldLimits
from klear_core.config.data_jobs import CurateJob
from klear_core.config.load import load_profile
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.settings import RareYieldLimits, YieldLimits, config_digest
from klear_core.errors import DataError


def share(num_out: int, num_in: int = 10) -> LedgerStep:
    lost = {"broken": num_in - num_out} if num_out < num_in else {}
    return LedgerStep.of("read", "row", num_in=num_in, dropped=lost)


def check(found: LedgerStep, floor: YieldLimits) -> tuple[str, ...]:
    key, example = "curate.runtime.read", "row 3: not JSON"
    return check_yield(found, "rows can be used", floor, key=key, remedy="Repair it", example=example)


def test_a_share_below_the_floor_stops_with_the_value_the_limit_the_reasons_an_example_and_the_remedy():
    with pytest.raises(DataError) as caught:
        check(share(4), YieldLimits())
    assert str(caught.value) == (
        "4 of 10 rows can be used; lost: 6 broken; the first: row 3: not JSON; that is 40.0%, less than "
        "curate.runtime.read.stop_below = 0.5. Repair it, or lower that setting"
    )
    assert caught.value.is_permanent


def test_between_floor_and_warning_level_there_is_a_warning_and_above_it_none():
    (warning,) = check(share(5), YieldLimits())
    assert warning.startswith("5 of 10 rows can be used; lost: 5 broken")
    assert "less than curate.runtime.read.warn_below = 0.9" in warning
    assert check(share(9), YieldLimits()) == ()
    assert check(share(10), YieldLimits()) == ()


@pytest.mark.parametrize("num_in", [0, 10])
def test_nothing_left_is_an_error_whatever_the_floor(num_in: int):
    with pytest.raises(DataError, match=f"0 of {num_in} rows"):
        check(share(0, num_in), YieldLimits(stop_below=0, warn_below=0))


def test_what_is_rightly_rare_has_a_floor_of_its_own():
    assert check(share(2, 10), RareYieldLimits()) == ()
    assert len(check(share(2, 100), RareYieldLimits())) == 1
    with pytest.raises(DataError):
        check(share(2, 1000), RareYieldLimits())


def test_a_floor_above_its_warning_level_is_refused():
    with pytest.raises(ValidationError, match=r"stop_below = 0\.95 is above warn_below = 0\.9"):
        YieldLimits(stop_below=0.95)


def test_a_floor_changes_no_fingerprint():
    strict = CurateConfig(runtime=CurateRuntime(read=ReadYieldLimits(stop_below=0.9)))
    config = PipelineConfig()
    assert config_digest(CurateJob.of(config, strict)) == config_digest(CurateJob.of(config, config.curate))


def test_one_half_of_a_floor_can_be_set_alone(tmp_path):
    (tmp_path / "p.toml").write_text("seed = 1\n")
    floor = load_profile(tmp_path, ["rl.runtime.informative.stop_below=0", "curate.runtime.read.warn_below=0.8"])
    assert (floor.rl.runtime.informative.stop_below, floor.rl.runtime.informative.warn_below) == (0, 0.1)
    assert (floor.curate.runtime.read.stop_below, floor.curate.runtime.read.warn_below) == (0.5, 0.8)
