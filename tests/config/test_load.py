import os
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from klear_core.config.data import FileSource
from klear_core.config.evaluate import TorchEngineConfig
from klear_core.config.load import apply_override, as_option, load_profile, profiles_in, validate
from klear_core.config.losses import ClipConfig, GppoConfig
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.settings import config_digest
from klear_core.config.train import SftOptimConfig
from klear_core.errors import ConfigError
from klear_core.products import instructions

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def profile(tmp_path):
    (tmp_path / "run.toml").write_text('name = "mine"\nseed = 3\n')
    (tmp_path / "rl.toml").write_text("[rl]\nnum_steps = 7\n[rl.loss]\nbeta_low = 0.5\n")
    return tmp_path


def test_a_profile_says_only_what_differs(profile):
    cfg = load_profile(profile)
    assert (cfg.name, cfg.seed, cfg.rl.num_steps) == ("mine", 3, 7)
    assert cfg.rl.loss == GppoConfig(beta_low=0.5)


def test_override_wins_over_the_file(profile):
    assert load_profile(profile, ["rl.num_steps=9", "rl.loss.eps_high=0.3"]).rl.loss == GppoConfig(
        beta_low=0.5, eps_high=0.3
    )


def test_changing_the_kind_forgets_the_settings_of_the_old_kind(profile):
    assert load_profile(profile, ["rl.loss.kind=clip"]).rl.loss == ClipConfig()


def test_a_kind_that_would_remove_what_an_earlier_override_set_is_refused(profile):
    with pytest.raises(
        ConfigError, match=r"'rl\.loss\.eps_high=0\.35' has no effect before --set 'rl\.loss\.kind=clip'"
    ):
        load_profile(profile, ["rl.loss.eps_high=0.35", "rl.loss.kind=clip"])
    overrides = ["rl.loss.eps_high=0.3", "rl.loss.kind=clip", "rl.loss.eps_high=0.35"]
    assert load_profile(profile, overrides).rl.loss == ClipConfig(eps_high=0.35)
    # Removed by the preset, and not by the kind, which is that of the table already.
    load_profile(profile, ["rl.loss.beta_low=0.3", "rl.loss.preset=paper", "rl.loss.kind=gppo"])


@pytest.mark.parametrize("overrides", [["rl.loss.kind=gppo"], ["rl.loss.beta_low=0.5", "rl.loss.kind=gppo"]])
def test_naming_the_kind_that_a_table_has_by_default_keeps_its_settings(profile, overrides):
    assert load_profile(profile, overrides).rl.loss == GppoConfig(beta_low=0.5)


def test_another_kind_of_optimizer_keeps_the_rate_and_the_other_settings(profile, tmp_path):
    (profile / "optim.toml").write_text("[sft.optim]\nlr = 3e-4\nbetas = [0.9, 0.95]\n")
    settings = SftOptimConfig(kind="adamw_8bit", lr=3e-4, betas=(0.9, 0.95))
    assert load_profile(profile, ["sft.optim.kind=adamw_8bit"]).sft.optim == settings
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text('extends = ".."\n[sft.optim]\nkind = "adamw_8bit"\n')
    assert load_profile(other).sft.optim == settings


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.num_heads=3", "num_kv_heads = 2 does not divide num_heads = 3"),
        ("model.num_heads=1", "num_kv_heads = 2 does not divide num_heads = 1"),
        ("model.head_dim=15", "head_dim = 15 is odd"),
    ],
)
def test_heads_with_which_no_model_would_run_are_refused(profile, override, problem):
    with pytest.raises(ConfigError, match=problem):
        load_profile(profile, [override])


def test_a_profile_that_names_the_default_kind_keeps_what_the_extended_one_sets(profile, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "run.toml").write_text('extends = ".."\n[rl.loss]\nkind = "gppo"\neps_high = 0.3\n')
    assert load_profile(other).rl.loss == GppoConfig(beta_low=0.5, eps_high=0.3)
    (other / "run.toml").write_text('extends = ".."\n[rl.loss]\nkind = "clip"\n')
    assert load_profile(other).rl.loss == ClipConfig()


@pytest.mark.parametrize("section", ["rl", "rl_code"])
def test_a_term_for_which_no_stage_makes_numbers_is_refused(profile, section):
    with pytest.raises(ConfigError, match=rf"{section}.distill is set, but no teacher: set rl_teacher"):
        load_profile(profile, [f"{section}.distill.coef=0.5"])


def test_a_lock_file_of_an_editor_is_no_part_of_a_profile(profile):
    (profile / ".#rl.toml").symlink_to("someone@machine.4711")  # Emacs's, while there are unsaved changes
    assert load_profile(profile).rl.num_steps == 7
    assert profile.name in profiles_in(profile.parent)


def test_a_file_is_read_as_utf_8_in_every_locale_and_may_begin_with_the_mark_of_a_windows_editor(profile):
    (profile / "run.toml").write_text('data_until = 2024-01-01\nmodel = {kind = "hf", path = "é"}\n', "utf-8-sig")
    script = "import sys; from klear_core.config.load import load_profile, Path\n"
    script += "print(ascii(load_profile(Path(sys.argv[1])).model.path))"
    # An old locale, as `LC_ALL=en_US` is, without Python's own change to UTF-8.
    env = os.environ | {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [sys.executable, "-c", script, profile]
    read = subprocess.run(command, cwd=CONFIGS.parent, env=env, capture_output=True, text=True, check=False)
    assert (read.stdout, read.stderr) == ("'\\xe9'\n", "")


def test_a_file_of_a_profile_that_cannot_be_read_is_an_error_that_names_it(profile):
    (profile / "gone.toml").symlink_to("nowhere.toml")
    with pytest.raises(ConfigError, match=r"gone\.toml: cannot be read \(No such file or directory\)"):
        load_profile(profile)
    assert profile.name in profiles_in(profile.parent)


def test_optional_stage_takes_defaults_for_what_it_does_not_say(profile):
    cfg = load_profile(profile, ["rl_code.loss.beta_low=0.25", "rl_code.domain=code"])
    assert cfg.rl_code is not None
    assert cfg.rl_code.loss == GppoConfig(beta_low=0.25)


def test_list_values_are_toml():
    tree = apply_override({}, 'curate.sources=[{kind="file", path="a.jsonl"}]')
    assert tree == {"curate": {"sources": [{"kind": "file", "path": "a.jsonl"}]}}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("given.score_despite=[own]", "--set 'given.score_despite=[\"own\"]'"),  # after a shell took the quotes
        ("given.score_despite=own", "--set 'given.score_despite=[\"own\"]'"),
        ("curate.sources=a.jsonl", "--set 'curate.sources=[\"a.jsonl\"]'"),
        ("evaluate.templates={a: b}", "--set 'evaluate.templates={key = \"text\"}'"),
    ],
)
def test_text_in_place_of_a_list_or_table_is_answered_with_what_to_type(profile, override, told):
    with pytest.raises(ConfigError) as refused:
        load_profile(profile, [override])
    assert told in str(refused.value)


@pytest.mark.parametrize("value", [["a b", "c"], {"rank": 4, "of": ["x"]}, "it's", "cpu", 0.5, True, "[x]", "1"])
def test_an_option_for_the_command_line_gives_the_value_back(value):
    word, override = shlex.split(as_option("x.y", value))
    assert (word, apply_override({}, override)) == ("--set", {"x": {"y": value}})


def test_an_option_without_special_characters_needs_no_quotes():
    assert as_option("rl.device", "cpu") == "--set rl.device=cpu"
    assert as_option("rl.lr", 0.5) == "--set rl.lr=0.5"


def test_an_endpoint_cannot_be_scored_for_it_would_stand_for_every_model(profile):
    with pytest.raises(ConfigError, match=r"evaluate\.engine.*'http'.*'torch', 'vllm'"):
        load_profile(
            profile,
            ["evaluate.engine.kind=http", "evaluate.engine.base_url=http://127.0.0.1:1/v1", "evaluate.engine.model=m"],
        )


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("sft.optim.betas=[2, 3]", r"sft\.optim\.betas\.0 = 2: .*less than 1"),
        ('workspace.root=""', r"workspace\.root = '': .*at least 1 character"),
    ],
)
def test_values_that_make_no_sense_are_refused(profile, override, told):
    with pytest.raises(ConfigError, match=told):
        load_profile(profile, [override])


def test_a_model_may_lie_in_the_home_folder(profile, monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert (
        load_profile(profile, ["model.kind=hf", "model.path=~/models/Qwen3"]).model.path == "/home/someone/models/Qwen3"
    )


def test_text_that_is_not_toml_is_a_string():
    assert apply_override({}, "model.path=models/Qwen3-8B-Base") == {"model": {"path": "models/Qwen3-8B-Base"}}


def test_unknown_key_is_named_with_the_nearest_known_one(profile):
    with pytest.raises(ConfigError, match=r"rl\.loss\.eps_hihg: unknown key; did you mean eps_high\?"):
        load_profile(profile, ["rl.loss.eps_hihg=0.3"])


def test_out_of_range_value_is_named_with_its_bound(profile):
    with pytest.raises(ConfigError, match=r"rl\.num_steps = 0: .*greater than or equal to 1"):
        load_profile(profile, ["rl.num_steps=0"])


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("api_key_env", "sk-proj-0123456789"),
        ("api_key_block", "SK_0123456789"),
        ("base_url", "https://user:0123456789@host/v1"),
    ],
)
def test_a_key_in_the_wrong_place_is_refused_without_being_shown(setting, value):
    teacher = {"kind": "http", "model": "r1", "base_url": "https://host/v1", setting: value}
    with pytest.raises(ConfigError, match=rf"{setting}: string should match .* its value is not shown") as caught:
        validate({"distill": {"teacher": teacher}}, origin="here")
    assert "0123456789" not in f"{caught.value} {caught.value.__cause__}"


def test_all_wrong_keys_are_reported_at_once():
    with pytest.raises(ConfigError, match=r"(?s)sede.*nmae"):
        validate({"sede": 1, "nmae": "x"}, origin="here")


def test_missing_folder_names_the_profiles_that_exist(profile):
    with pytest.raises(ConfigError, match=rf"nope: no such profile folder; profiles in .*\b{profile.name}\b"):
        load_profile(profile.parent / "nope")


def test_key_set_in_two_files_is_refused(profile):
    (profile / "z.toml").write_text("[rl]\nnum_steps = 8\n")
    with pytest.raises(ConfigError, match=r"z\.toml: \[rl\] is already set"):
        load_profile(profile)


def test_override_without_a_value_is_refused(profile):
    with pytest.raises(ConfigError, match=r"expected key\.path=value"):
        load_profile(profile, ["rl.num_steps"])


def test_runtime_settings_do_not_change_the_digest(profile):
    a, b = load_profile(profile), load_profile(profile, ["rl.runtime.num_rollout_actors=7"])
    assert config_digest(a.rl) == config_digest(b.rl)
    assert config_digest(a.rl) != config_digest(load_profile(profile, ["rl.num_steps=8"]).rl)


def test_a_bare_path_is_a_file_source(profile):
    cfg = load_profile(profile, ['curate.sources=["a.jsonl"]'])
    assert cfg.curate.sources == (FileSource(path="a.jsonl"),)


@pytest.mark.parametrize(
    ("override", "kept"),
    [
        ("rl.optim.lr=2e-6", {"warmup_steps": 10, "weight_decay": 0.1}),
        ("sft.optim.lr=1e-5", {"min_lr_ratio": 0.5}),
        ("sft.optim.warmup_steps=5", {"lr": 8e-5, "min_lr_ratio": 0.5}),
        ("rl.runtime.checkpoint.asynchronous=true", {"every_steps": 10}),
        ("rl_code.runtime.checkpoint.keep=3", {"every_steps": 10}),
        ("evaluate.sampling.max_new_tokens=64", {"temperature": 0.6, "top_p": 0.95}),
    ],
)
def test_setting_one_key_of_a_table_leaves_the_defaults_of_its_others(profile, override: str, kept: dict[str, float]):
    table: typing.Any = load_profile(profile, [override])
    for key in override.partition("=")[0].split(".")[:-1]:
        table = getattr(table, key)
    assert {key: getattr(table, key) for key in kept} == kept


TWO_OF_ONE_NAME = 'benchmarks=[{name="a", source="x.jsonl"}, {name="a", source="y.jsonl"}]'


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([TWO_OF_ONE_NAME], "benchmarks: several benchmarks are called 'a'"),
        (["rl.continue_optimizer=true"], "rl.continue_optimizer = true: SFT keeps no optimizer"),
        (
            ["rl_code.continue_optimizer=true"],
            "rl_code.continue_optimizer = true needs .* set rl.keep_optimizer = true",
        ),
        (
            ["rl.group_filter.min_accuracy=0.9", "rl.group_filter.max_accuracy=0.1"],
            "rl.group_filter: min_accuracy = 0.9 is above",
        ),
        (
            ["distill.teacher.kind=http", "distill.teacher.model=m", "distill.teacher.base_url=http://"],
            r"distill.teacher.runtime.endpoints.0.base_url = 'http://'",
        ),
        (["rl.old_logps=sampler", "rl.mismatch.truncate_at=2"], "rl: mismatch correction compares"),
    ],
)
def test_settings_that_cannot_work_together_are_refused_without_repeating_whole_tables(
    profile, overrides: list[str], told: str
):
    with pytest.raises(ConfigError, match=rf": {told}") as error:
        load_profile(profile, overrides)
    assert "{" not in str(error.value)


def test_code_rl_may_continue_with_the_optimizer_that_math_rl_keeps(profile):
    cfg = load_profile(profile, ["rl.keep_optimizer=true", "rl_code.continue_optimizer=true"])
    assert cfg.rl_code is not None
    assert cfg.rl_code.continue_optimizer


def classes_below(annotation: typing.Any) -> set[type[BaseModel]]:
    """All settings classes that an annotation can hold, at any depth."""
    if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return set().union(*(classes_below(arg) for arg in typing.get_args(annotation)))
    return {annotation}.union(*(classes_below(field.annotation) for field in annotation.model_fields.values()))


def test_the_default_of_a_table_is_that_of_its_class():
    """Else a table of which one key is set would fall back to other values than a table that is not named at all."""
    fields = [
        (cls, name, field.default) for cls in classes_below(PipelineConfig) for name, field in cls.model_fields.items()
    ]
    tables = [(cls.__name__, name, default) for cls, name, default in fields if isinstance(default, BaseModel)]
    assert len(tables) > 30
    assert [(cls, name) for cls, name, default in tables if default != type(default)()] == []


def test_naming_a_preset_forgets_the_betas_of_the_file(profile):
    assert load_profile(profile, ["rl.loss.preset=high_only"]).rl.loss == GppoConfig(beta_low=0)
    assert load_profile(profile, ["rl.loss.beta_low=0.3", "rl.loss.preset=custom"]).rl.loss.beta_low == 0.3
    with pytest.raises(ConfigError, match=r"beta_low=0\.3 contradicts preset 'ce_gppo'"):
        load_profile(profile, ["rl.loss.preset=ce_gppo", "rl.loss.beta_low=0.3"])


@pytest.mark.parametrize("preset", ["paper", "ce_gppo", "high_only"])
def test_every_preset_can_be_set_on_every_profile(preset):
    for name in ("laptop", "klear_8b"):
        assert load_profile(CONFIGS / name, [f"rl.loss.preset={preset}"]).rl.loss == GppoConfig(preset=preset)


def test_auto_is_the_data_type_that_this_processor_multiplies_fast():
    found = "bfloat16" if instructions() else "float32"
    engine = TorchEngineConfig.model_validate({"dtype": "auto"})
    assert (RlConfig.model_validate({"dtype": "auto"}).dtype, engine.dtype) == (found, found)
    # Two processors compute with different numbers, so that the stages' hashes differ too.
    assert config_digest(engine) == config_digest(TorchEngineConfig(dtype=found))


def test_a_webhooks_address_in_place_of_its_variable_is_refused_and_not_shown(profile):
    with pytest.raises(
        ConfigError, match=r"workspace\.notify\.webhook_env: .*not shown, because it may hold"
    ) as raised:
        load_profile(profile, ["workspace.notify.webhook_env=https://hooks.example.com/T0/SECRET"])
    assert "SECRET" not in str(raised.value)
