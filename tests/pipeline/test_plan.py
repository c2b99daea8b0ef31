from pathlib import Path

import pytest
from manifests import manifest, publish

from klear_core.config.curate import CurateConfig
from klear_core.config.data import BenchmarkConfig, FileSource, ProceduralSource
from klear_core.config.pipeline import PipelineConfig, WorkspaceConfig
from klear_core.config.rewards import CustomReward, RewardConfig
from klear_core.config.rl import RlConfig
from klear_core.config.settings import result_settings
from klear_core.config.stage import RlJob
from klear_core.config.train import HfModelConfig, SftConfig, SftOptimConfig, SftRuntime
from klear_core.errors import ConfigError
from klear_core.pipeline.costs.estimate import estimate
from klear_core.pipeline.graph import (
    downstream_of,
    fingerprints_of,
    input_records,
    open_store,
    select_stages,
    stages_again,
    stages_of,
    with_inputs,
)
from klear_core.pipeline.plan import plan_stages, reruns_of_upgrade


def config(root: Path, **changes) -> PipelineConfig:
    benchmarks = (BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout")),)
    return PipelineConfig(**({"workspace": WorkspaceConfig(root=str(root)), "benchmarks": benchmarks} | changes))


def changed(before: PipelineConfig, after: PipelineConfig) -> list[str]:
    old, new = (fingerprints_of(stages_of(c), c.workspace) for c in (before, after))
    return [name for name in new if old[name] != new[name]]


def test_a_new_learning_rate_of_sft_changes_sft_and_what_follows_from_it(tmp_path: Path):
    after = config(tmp_path, sft=SftConfig(optim=SftOptimConfig(lr=1e-3)))
    assert changed(config(tmp_path), after) == ["sft", "rl", "evaluate_sft", "evaluate_rl", "report"]


def test_a_new_seed_changes_everything(tmp_path: Path):
    assert changed(config(tmp_path), config(tmp_path, seed=1)) == [s.name for s in stages_of(config(tmp_path))]


def test_runtime_settings_and_the_workspace_change_nothing(tmp_path: Path):
    after = config(tmp_path / "elsewhere", sft=SftConfig(runtime=SftRuntime(num_threads=8)))
    assert changed(config(tmp_path), after) == []


def test_sampling_a_benchmark_more_often_retrains_nothing(tmp_path: Path):
    more = (
        BenchmarkConfig(name="heldout", source=ProceduralSource(split="heldout"), num_samples=64, expected_rows=4096),
    )
    assert changed(config(tmp_path), config(tmp_path, benchmarks=more)) == [
        "evaluate_base",
        "evaluate_sft",
        "evaluate_rl",
        "report",
    ]


def test_new_content_of_a_source_file_changes_what_is_made_from_it(tmp_path: Path):
    source = tmp_path / "rows.jsonl"
    source.write_text("{}")
    cfg = config(tmp_path, curate=CurateConfig(sources=(FileSource(path=str(source)),)))
    before = fingerprints_of(stages_of(cfg), cfg.workspace)
    source.write_text("[]")
    after = fingerprints_of(stages_of(cfg), cfg.workspace)
    assert before["curate"] != after["curate"]
    assert before["rl"] != after["rl"]
    assert before["base"] == after["base"]


def test_a_model_from_disk_does_not_depend_on_the_seed(tmp_path: Path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    cfg = config(tmp_path, model=HfModelConfig(path=str(model)))
    assert "base" not in changed(cfg, cfg.model_copy(update={"seed": 1}))


def test_a_missing_source_file_is_a_config_error_that_names_it(tmp_path: Path):
    cfg = config(tmp_path, curate=CurateConfig(sources=(FileSource(path="no/such.jsonl"),)))
    with pytest.raises(ConfigError, match=r"no/such\.jsonl: no such file"):
        plan_stages(cfg)


def test_code_rl_is_a_stage_of_its_own_after_math_rl(tmp_path: Path):
    stages = {s.name: s for s in stages_of(config(tmp_path, rl_code=RlConfig(domain="code")))}
    assert stages["rl_code"].inputs["model"] == "rl"
    assert stages["evaluate_rl_code"].inputs["model"] == "rl_code"


def test_the_plan_says_what_is_reused_and_which_setting_makes_a_stage_run(tmp_path: Path):
    before = config(tmp_path)
    publish(before, "benchmarks", "curate", "base", "distill", "sft")
    after = config(tmp_path, sft=SftConfig(optim=SftOptimConfig(lr=1e-3)))
    plans = {p.stage: p for p in plan_stages(after)}
    assert [p.action for p in plans.values()] == ["reuse"] * 4 + ["run"] * 6
    assert plans["sft"].why == "sft.optim.lr: 8e-05 -> 0.001"
    assert plans["rl"].why == "no artifact yet"


def test_the_plan_names_the_input_that_changed_when_no_setting_did(tmp_path: Path):
    before = config(tmp_path)
    publish(before, "sft", "rl")
    after = config(tmp_path, sft=SftConfig(num_epochs=2))
    assert {p.stage: p.why for p in plan_stages(after)}["rl"] == "input model changed"


def test_the_plan_says_that_a_killed_stage_goes_on(tmp_path: Path):
    cfg = config(tmp_path)
    own = fingerprints_of(stages_of(cfg), cfg.workspace)["sft"]
    with open_store(cfg.workspace).create(own.kind, own.fingerprint):
        pass
    assert {p.stage: p.why for p in plan_stages(cfg)}["sft"] == "goes on from an unfinished attempt"


def test_a_damaged_artifact_is_planned_as_such_with_what_is_wrong(tmp_path: Path):
    cfg = config(tmp_path)
    publish(cfg, "benchmarks", "curate", "base", "distill")
    ids, store = fingerprints_of(stages_of(cfg), cfg.workspace), open_store(cfg.workspace)
    folders = {name: store.folder(own.kind, own.fingerprint) for name, own in ids.items()}
    (folders["benchmarks"] / "data").unlink()
    (folders["curate"] / "data").write_text("12")
    (folders["base"] / "data").write_text("1235")
    plans = {p.stage: (p.action, p.why.partition(";")[0]) for p in plan_stages(cfg)}
    assert plans["benchmarks"] == ("damaged", "data: missing")
    assert plans["curate"] == ("damaged", "data: has 2 bytes, the manifest says 4")
    assert plans["base"] == ("reuse", "already made")  # names and sizes do not show it
    assert plans["distill"] == ("reuse", "already made")
    read = {p.stage: p for p in plan_stages(cfg, checked_by="content")}
    assert read["base"].action == "damaged"
    assert read["base"].why.startswith("data: altered (SHA-256")
    assert read["base"].why.endswith("a run sets it aside and makes it again")


def test_what_is_asked_again_is_planned_to_run_though_it_is_there(tmp_path: Path):
    cfg = config(tmp_path)
    publish(cfg, "benchmarks", "curate", "base", "distill", "sft")
    stages = stages_of(cfg)
    again = stages_again(stages, "sft", [s.name for s in stages])
    plans = {p.stage: (p.action, p.why) for p in plan_stages(cfg, again=again)}
    assert plans["distill"] == ("reuse", "already made")
    assert plans["sft"] == ("run", "asked to be made again")


def test_nothing_is_made_again_that_is_not_among_the_stages_to_run(tmp_path: Path):
    stages = stages_of(config(tmp_path))
    assert stages_again(stages, None, ["rl"]) == ()
    with pytest.raises(ConfigError, match=r"rerun from 'curate': it is not among the stages to run, which are rl"):
        stages_again(stages, "curate", ["rl"])
    with pytest.raises(ConfigError, match="no stage 'train'"):
        stages_again(stages, "train", ["rl"])


def test_stages_are_chosen_by_name_or_kind(tmp_path: Path):
    stages = stages_of(config(tmp_path))
    assert select_stages(stages, only="evaluate", from_=None, until=None) == (
        "evaluate_base",
        "evaluate_sft",
        "evaluate_rl",
    )
    assert select_stages(stages, only=None, from_="distill", until="rl") == ("distill", "sft", "rl")
    with pytest.raises(ConfigError, match="no stage 'train'; there are: benchmarks, curate"):
        select_stages(stages, only="train", from_=None, until=None)
    with pytest.raises(ConfigError, match="comes after"):
        select_stages(stages, only=None, from_="rl", until="sft")


def test_stages_that_others_need_are_chosen_without_what_only_comes_before_them(tmp_path: Path):
    stages = stages_of(config(tmp_path))
    needed = ("benchmarks", "curate", "base", "distill", "sft", "evaluate_sft")
    assert select_stages(stages, only=None, from_=None, until=None, needed_by=["evaluate_sft"]) == needed
    assert select_stages(stages, only=None, from_="distill", until="sft", needed_by=["evaluate_sft"]) == (
        "distill",
        "sft",
    )
    with pytest.raises(ConfigError, match="no stage 'train'"):
        select_stages(stages, only=None, from_=None, until=None, needed_by=["train"])


def test_what_follows_from_a_stage_is_all_that_is_made_from_it(tmp_path: Path):
    assert downstream_of(stages_of(config(tmp_path)), "base") == (
        "base",
        "sft",
        "rl",
        "evaluate_base",
        "evaluate_sft",
        "evaluate_rl",
        "report",
    )


def test_what_a_stage_is_made_from_goes_back_to_the_beginning(tmp_path: Path):
    stages = stages_of(config(tmp_path))
    assert [s.name for s in with_inputs(stages, {"curate"})] == ["benchmarks", "curate"]
    assert [s.name for s in with_inputs(stages, {"evaluate_sft"})] == [
        "benchmarks",
        "curate",
        "base",
        "distill",
        "sft",
        "evaluate_sft",
    ]


@pytest.mark.parametrize("edited", ["rewards.py", "words.py", "table.csv"])
def test_rl_runs_again_when_the_source_of_a_users_reward_changes_and_says_which_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, edited: str
):
    monkeypatch.chdir(tmp_path)
    Path("rewards.py").write_text("import words\n\ndef brief(answer): return words.SCORE")
    Path("words.py").write_text("SCORE = 1.0")
    Path("table.csv").write_text("a,b")
    reward = RewardConfig(custom=(CustomReward(function="rewards:brief", files=("table.csv",)),))
    before = config(tmp_path, rl=RlConfig(reward=reward))
    publish(before, *[stage.name for stage in stages_of(before)])
    assert {plan.action for plan in plan_stages(before)} == {"reuse"}
    with Path(edited).open("a") as f:
        f.write("\n# edited")
    plans = {plan.stage: plan for plan in plan_stages(before)}
    assert plans["rl"].why == f"input {edited} changed"
    assert [name for name, plan in plans.items() if plan.action == "run"] == ["rl", "evaluate_rl", "report"]


def test_a_stage_alone_takes_the_models_that_are_given_to_it():
    stages = stages_of(PipelineConfig.model_validate({"given": {"sft": "models/mine"}}))
    assert select_stages(stages, only="rl", from_=None, until=None) == ("sft", "rl")
    assert select_stages(stages, only=None, from_="rl", until="rl") == ("sft", "rl")
    with pytest.raises(ConfigError, match=r"no stage 'reprot'; did you mean report\?"):
        select_stages(stages, only="reprot", from_=None, until=None)


# ---- upgrades ----


def test_an_upgrade_reruns_the_stages_whose_code_changed_and_what_follows_from_them(tmp_path: Path):
    cfg = config(tmp_path)
    publish(cfg, *[stage.name for stage in stages_of(cfg)], older=["rl"])
    reruns = reruns_of_upgrade(cfg)
    version = RlJob.code_version
    assert [(rerun.stage, rerun.why) for rerun in reruns] == [
        ("rl", f"code version {version - 1} -> {version}: {RlJob.code_changes[version]}"),
        ("evaluate_rl", "follows from rl"),
        ("report", "follows from rl, evaluate_rl"),
    ]
    assert [rerun.stage for rerun in reruns_of_upgrade(cfg, ["evaluate_rl"])] == ["evaluate_rl"]


def test_what_was_changed_by_the_user_is_not_rerun_by_the_upgrade(tmp_path: Path):
    publish(config(tmp_path), "benchmarks", "curate", "base", "distill", "sft", "rl", older=["distill", "rl"])
    after = config(tmp_path, sft=SftConfig(optim=SftOptimConfig(lr=1e-3)))
    assert [rerun.stage for rerun in reruns_of_upgrade(after)] == ["distill"]


def test_nothing_is_rerun_by_an_upgrade_that_changes_no_code_or_where_nothing_was_finished(tmp_path: Path):
    cfg = config(tmp_path)
    assert reruns_of_upgrade(cfg) == []
    publish(cfg, *[stage.name for stage in stages_of(cfg)])
    assert reruns_of_upgrade(cfg) == []


def test_a_setting_that_the_earlier_code_did_not_have_is_new_by_the_upgrade_unless_the_user_set_it(tmp_path: Path):
    stages = {stage.name: stage for stage in stages_of(config(tmp_path))}
    job = stages["sft"].job
    known = result_settings(job)
    del known["sft"]["optim"]["lr"]
    with open_store(config(tmp_path).workspace).create("sft", "0" * 20) as slot:
        inputs = fingerprints_of(list(stages.values()), config(tmp_path).workspace)
        records = input_records(
            job, {role: inputs[name] for role, name in stages["sft"].inputs.items()}, WorkspaceConfig()
        )
        slot.publish(manifest("sft", "0" * 20, code_version=job.code_version, result_config=known, inputs=records))
    assert [rerun.why for rerun in reruns_of_upgrade(config(tmp_path))] == ["new setting sft.optim.lr = 8e-05"]
    assert reruns_of_upgrade(config(tmp_path, sft=SftConfig(optim=SftOptimConfig(lr=1e-3)))) == []


def test_the_cost_of_a_rerun_is_what_the_earlier_artifact_took_on_its_gpus(tmp_path: Path):
    sft = SftConfig(dtype="bfloat16", runtime=SftRuntime(num_workers=4))
    publish(config(tmp_path, sft=sft), "sft", older=["sft"], wall_s=1800.0)
    (rerun,) = reruns_of_upgrade(config(tmp_path, sft=sft.model_copy(update={"runtime": SftRuntime()})), ["sft"])
    assert rerun.gpu_hours == 2.0  # half an hour on four GPUs, though one is configured now
    assert rerun.is_measured


def test_a_build_in_several_attempts_has_not_measured_what_it_took_and_is_estimated(tmp_path: Path):
    cfg = config(tmp_path, sft=SftConfig(dtype="bfloat16", max_steps=10))
    publish(cfg, "sft", older=["sft"], wall_s=1800.0, attempts=3)
    (rerun,) = reruns_of_upgrade(cfg, ["sft"])
    assert not rerun.is_measured
    assert rerun.gpu_hours == estimate(cfg, ["sft"])[0].gpu_hours
