import sys
from pathlib import Path

import pytest

from flows.environment import CONFIGS, export_spans, grid_file, profile_folder, resolve
from flows.pipeline import label_of, with_seed
from klear_core.config.distill import ProceduralTeacherConfig
from klear_core.config.losses import GppoConfig
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import workspace_root

PROFILE = """
seed = 3
[sft]
num_epochs = 2
optim = { lr = 1e-3, warmup_steps = 5 }
[distill.teacher]
slip_rate = 0.1
"""


@pytest.fixture
def profile(tmp_path: Path) -> str:
    (tmp_path / "profile.toml").write_text(PROFILE)
    return str(tmp_path)


def test_a_nested_setting_given_alone_leaves_the_rest_of_the_profile_as_it_is(profile: str):
    given = PipelineConfig.model_validate({"sft": {"optim": {"lr": 2e-3}}})
    config = resolve(profile, [], given)
    assert (config.seed, config.sft.num_epochs, config.sft.optim.lr, config.sft.optim.warmup_steps) == (3, 2, 2e-3, 5)


def test_a_setting_of_a_tagged_union_is_laid_over_the_profiles(profile: str):
    given = PipelineConfig.model_validate({"distill": {"teacher": {"kind": "procedural", "blind_spot_rate": 0.2}}})
    teacher = resolve(profile, [], given).distill.teacher
    assert teacher == ProceduralTeacherConfig(slip_rate=0.1, blind_spot_rate=0.2)


def test_overrides_win_over_settings_and_these_over_the_profile(profile: str):
    config = resolve(
        profile, ["seed=5", "sft.num_epochs=7"], PipelineConfig.model_validate({"seed": 4, "sft": {"num_epochs": 6}})
    )
    assert (config.seed, config.sft.num_epochs) == (5, 7)


def test_betas_given_in_a_form_name_no_preset_that_an_override_could_contradict(profile: str):
    form = {"rl": {"loss": {"kind": "gppo", "beta_low": 0.5}}}
    given = PipelineConfig.model_validate(form)
    assert form == {"rl": {"loss": {"kind": "gppo", "beta_low": 0.5}}}
    loss = resolve(profile, ["rl.loss.beta_low=0.25"], given).rl.loss
    assert isinstance(loss, GppoConfig)
    assert (loss.beta_low, loss.preset) == (0.25, "custom")


def test_a_preset_given_in_a_form_replaces_the_profiles_betas(tmp_path: Path):
    (tmp_path / "rl.toml").write_text("[rl.loss]\nbeta_low = 1.0\nbeta_high = 1.0\n")
    given = PipelineConfig.model_validate({"rl": {"loss": {"kind": "gppo", "preset": "ce_gppo"}}})
    loss = resolve(str(tmp_path), [], given).rl.loss
    assert isinstance(loss, GppoConfig)
    assert (loss.beta_low, loss.beta_high) == (0.5, 1.0)


def test_without_a_profile_the_settings_stand_alone(profile: str):
    assert resolve(None, [], PipelineConfig(seed=9)) == PipelineConfig(seed=9)
    with pytest.raises(ConfigError):
        resolve(None, ["seed=1"], None)


def test_a_folder_is_not_taken_for_the_profile_that_goes_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    own = tmp_path / "laptop"
    own.mkdir()
    (own / "profile.toml").write_text(PROFILE)
    monkeypatch.chdir(tmp_path)
    assert resolve("./laptop", [], None).seed == 3
    with pytest.raises(ConfigError, match=r"laptop: a folder here and a profile by its name; write \./laptop or /"):
        profile_folder("laptop")
    monkeypatch.chdir(own)
    assert resolve(".", [], None).seed == resolve("../laptop", [], None).seed == 3
    assert profile_folder("laptop") == CONFIGS / "laptop"


def test_a_file_and_a_name_that_is_no_grids_are_answered_with_what_is_meant(tmp_path: Path):
    (tmp_path / "rl.toml").touch()
    with pytest.raises(ConfigError, match=r"rl\.toml: a file; a profile is a folder of TOML files"):
        resolve(str(tmp_path / "rl.toml"), [], None)
    with pytest.raises(ConfigError, match=r"smol_reward: no such grid; did you mean smol_rewards\?"):
        grid_file("smol_reward")


def test_a_home_folder_of_nobody_is_a_folder_of_that_name():
    assert workspace_root(WorkspaceConfig(root="~nobody-here/ws")) == Path.cwd() / "~nobody-here" / "ws"


def test_a_run_with_a_fresh_seed_is_called_by_that_seed():
    config = PipelineConfig(name="laptop", seed=3)
    fresh = with_seed(config, "fresh", run_id="one")
    assert with_seed(config, "fixed", run_id="one") == config
    assert with_seed(config, "fresh", run_id="one") == fresh
    assert len({3, fresh.seed, with_seed(config, "fresh", run_id="two").seed}) == 3
    assert label_of(lambda: fresh, prefix="retrain") == f"retrain-laptop-seed{fresh.seed}-gppo"
    assert label_of(lambda: config, prefix="") == "laptop-seed3-gppo"
    distilled = PipelineConfig.model_validate({"name": "x", "opd": {"then_rl": False}})
    assert label_of(lambda: distilled, prefix="") == "x-seed0-opd"


def test_an_unknown_override_names_the_key(profile: str):
    with pytest.raises(ConfigError, match=r"sft\.num_epoch.*did you mean num_epochs"):
        resolve(profile, ["sft.num_epoch=1"], None)


def test_a_collector_without_the_exporter_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter", None)  # as if it were not installed
    with pytest.raises(ConfigError, match=r"pip install 'klear\[otel\]'"):
        export_spans()
