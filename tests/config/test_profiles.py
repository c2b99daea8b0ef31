"""All profiles are valid, and those for GPUs fit into the GPUs that they name; profiles build on one another."""

from pathlib import Path

import pytest

from klear_core.config.evaluate import VllmEngineConfig
from klear_core.config.load import extended_by, load_profile, read_profile
from klear_core.config.settings import config_digest
from klear_core.errors import ConfigError
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.capacity import memory_problems

CONFIGS = Path(__file__).parents[2] / "configs"
PROFILES = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir() and path.name != "ablations")


def test_the_profiles_are_these() -> None:
    assert PROFILES == [
        "desk",
        "desk_ci",
        "klear_8b",
        "klear_8b_64k",
        "klear_8b_opd",
        "klear_8b_script",
        "laptop",
        "laptop_opd",
        "node_8",
        "qwen3_06b",
        "single_gpu",
        "smoke",
        "smol",
        "smol_ci",
        "smol_opd",
    ]


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_valid_and_fits(name: str) -> None:
    config = load_profile(CONFIGS / name)
    assert list(memory_problems(PendingWork.of(config, None, ()))) == []


def test_node_8_is_klear_8b_with_fewer_gpus() -> None:
    node, published = load_profile(CONFIGS / "node_8"), load_profile(CONFIGS / "klear_8b")
    assert (node.rl.runtime.num_rollout_actors, published.rl.runtime.num_rollout_actors) == (2, 6)
    without_runtime = {"runtime": published.rl.runtime}
    assert node.rl.model_copy(update=without_runtime) == published.rl
    assert (node.sft, node.distill, node.benchmarks) == (published.sft, published.distill, published.benchmarks)


def _profile(folder: Path, text: str) -> Path:
    folder.mkdir()
    (folder / "run.toml").write_text(text)
    return folder


def test_a_profile_has_the_settings_of_the_one_that_it_extends_and_its_own_over_them(tmp_path: Path) -> None:
    _profile(
        tmp_path / "base", 'seed = 3\n[rl.optim]\nlr = 1e-4\nwarmup_steps = 7\n[rl.loss]\nkind = "clip"\neps_low = 0.1'
    )
    over = _profile(tmp_path / "over", 'extends = "../base"\n[rl.optim]\nlr = 2e-4\n[rl.loss]\nkind = "gppo"')
    assert read_profile(over) == {
        "seed": 3,
        "rl": {"optim": {"lr": 2e-4, "warmup_steps": 7}, "loss": {"kind": "gppo"}},
    }


def test_a_profile_names_those_that_it_extends(tmp_path: Path) -> None:
    _profile(tmp_path / "a", "seed = 1")
    _profile(tmp_path / "b", 'extends = "../a"')
    assert extended_by(_profile(tmp_path / "c", 'extends = "../b"')) == ("b", "a")
    assert extended_by(tmp_path / "a") == ()


def test_a_profile_leaves_out_a_section_that_the_extended_one_has(tmp_path: Path) -> None:
    _profile(tmp_path / "base", "[rl_code]\nnum_steps = 3\n[tag]\nsamples_per_problem = 4")
    over = load_profile(_profile(tmp_path / "over", 'extends = "../base"\nrl_code = "none"'))
    assert over.rl_code is None
    assert over.tag is not None
    assert load_profile(tmp_path / "base", ["tag=none"]).tag is None


def test_profiles_in_a_circle_are_refused(tmp_path: Path) -> None:
    _profile(tmp_path / "a", 'extends = "../b"')
    _profile(tmp_path / "b", 'extends = "../a"')
    with pytest.raises(ConfigError, match="circle: a extends b extends a"):
        load_profile(tmp_path / "a")


def test_a_base_that_is_not_there_is_named(tmp_path: Path) -> None:
    over = _profile(tmp_path / "over", 'extends = "../nowhere"')
    with pytest.raises(ConfigError, match=r"nowhere: no such profile folder"):
        load_profile(over)


def test_other_decodings_of_klear_8b_train_nothing_again() -> None:
    def jobs(profile: str) -> dict[str, str]:
        stages = stages_of(load_profile(CONFIGS / profile))
        return {stage.name: config_digest(stage.job) for stage in stages if not stage.scored_model_stage}

    ours = jobs("klear_8b")
    for profile in ("klear_8b_64k", "klear_8b_script"):
        others = jobs(profile)
        assert {name for name in ours if ours[name] != others[name]} == {"report"}


def test_the_papers_64k_stretches_the_window_of_pretraining() -> None:
    """2.5 times 32,768 is 81,920, and not 2.5 times the 36,864 of training."""
    engine = load_profile(CONFIGS / "klear_8b_64k").evaluate.engine
    assert isinstance(engine, VllmEngineConfig)
    assert engine.stretched(36_864) == engine.max_model_len == 81_920
    script = load_profile(CONFIGS / "klear_8b_script").evaluate.sampling
    assert (script.top_k, script.repetition_penalty, script.max_new_tokens) == (20, 1.05, 65_536)
