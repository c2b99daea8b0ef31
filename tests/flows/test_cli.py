import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from klear_command import ROOT, start
from manifests import manifest, publish

from flows.doctor import Check, show_checks
from flows.show import name_of
from klear_core.artifacts.manifest import read_manifest
from klear_core.artifacts.records import write_shard
from klear_core.artifacts.store import LocalStore
from klear_core.config.load import load_profile
from klear_core.pipeline.graph import stages_of
from klear_core.types import Difficulty, Domain, MathReference, Problem

COMMANDS = ("run", "plan", "doctor", "show", "chat", "ui", "sweep", "judge", "bench", "ablate", "rl", "curate")
COMMANDS += ("evaluate", "answers", "rejudge", "compare", "publish", "champion", "rollback", "submit")
PROFILES = sorted(
    folder.relative_to(ROOT)
    for folder in (ROOT / "configs").iterdir()
    if folder.is_dir() and folder.name != "ablations"
)


def test_the_help_lists_every_command(klear):
    shown = klear("--help")
    assert shown.status == 0
    assert all(re.search(rf"^\W*{command}\b", shown.out, re.MULTILINE) for command in COMMANDS)


@pytest.mark.parametrize("command", [*(c for c in COMMANDS if c not in ("doctor", "rl")), "rl replay"])
def test_the_help_of_a_command_shows_examples_a_line_each(klear, command):
    shown = klear(*command.split(), "--help")
    assert shown.status == 0
    assert re.search(rf"^\W*klear {command} \S+", shown.out, re.MULTILINE)


def test_the_version_is_that_of_the_installed_package(klear):
    shown = klear("--version")
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (shown.status, shown.out) == (0, f"klear {declared}\n")


def test_the_docs_name_every_command():
    page = (ROOT / "docs" / "running.md").read_text()
    assert [command for command in COMMANDS if f"`klear {command}" not in page] == []


def test_without_a_command_the_help_is_shown(klear):
    assert "Usage" in klear().out


@pytest.mark.usefixtures("no_hub")
@pytest.mark.parametrize("profile", PROFILES, ids=str)
def test_every_profile_of_the_repository_can_be_planned(klear, monkeypatch, tmp_path, profile):
    monkeypatch.chdir(ROOT)
    planned = klear("plan", profile, "--set", f"workspace.root={tmp_path}")
    assert planned.status == 0, planned.err
    assert "valid" in planned.out
    assert "tokens, at most" in planned.out


@pytest.mark.usefixtures("no_hub")
@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="a GPU is known here")
def test_a_plan_for_gpus_made_where_there_is_none_says_how_to_see_what_fits(klear, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    where = ("plan", "configs/klear_8b", "--only", "rl", "--set", f"workspace.root={tmp_path}")
    assert "--set hardware.gpu_memory_gb=80 adds what fits" in klear(*where).out
    there = klear(*where, "--set", "hardware.gpu_memory_gb=80").out
    assert "adds what fits" not in there
    assert "rl.runtime: keep_layers = 26 fits, of 36 layers" in there
    assert (
        "rl.runtime: context_parallel = 1 fits, and sends less between GPUs; 4 data ranks are then busy 1.00" in there
    )
    assert (
        "context_parallel"
        not in klear(*where, "--set", "hardware.gpu_memory_gb=45", "--set", "rl.runtime.context_parallel=1").out
    )


def test_a_profile_of_the_repository_goes_by_its_name_from_anywhere(klear, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned = klear("plan", "smoke", "--set", "workspace.root=ws")
    assert planned.status == 0, planned.err
    assert planned.out.startswith("smoke seed 0")


def test_a_plan_begins_with_its_table_and_fits_on_a_screen(klear, tmp_path):
    where = ("--set", f"workspace.root={tmp_path / 'ws'}")
    lines = klear("plan", "smoke", *where).out.splitlines()
    assert lines[1].split() == ["stage", "does", "artifact", "why"]
    assert len(lines) < 24
    with_config = klear("plan", "smoke", "--config", *where).out.splitlines()
    assert with_config[: len(lines)] == lines
    assert json.loads("\n".join(with_config[len(lines) :]))["rl"]["num_steps"] == 16


def test_a_character_that_the_output_lacks_is_escaped_and_ends_nothing(tmp_path):
    command = [sys.executable, "-c", "from flows.cli import main; main()", "runs", "--root", tmp_path / "Übung"]
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    ended = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "\\xdcbung" in "".join(ended.stdout.split())


def test_a_plan_warns_of_a_reward_that_can_be_played(klear, tmp_path):
    where = ("--set", f"workspace.root={tmp_path / 'ws'}")
    published = ("--set", "rl.reward.missing_close=-0.5")
    assert "rewards:" not in klear("plan", "smoke", *where).out
    warned = "rewards: rl.reward.missing_close = -0.5 is above reward.wrong = -1"
    assert warned in klear("plan", "smoke", *where, *published).out
    assert "rewards:" not in klear("run", "smoke", "--dry-run", "--until", "sft", *where, *published).out


def test_a_plan_warns_of_a_loss_that_collapsed_on_samples_as_old(klear, tmp_path):
    where = ("--set", f"workspace.root={tmp_path / 'ws'}")
    assert "stale samples:" not in klear("plan", "smoke", *where, "--set", "rl.max_staleness=3").out
    for age, seeds in (4, "3 of 8"), (16, "8 of 8"):
        old = (*where, "--set", f"rl.max_staleness={age}")
        warned = klear("plan", "smoke", *old).out
        assert (
            f'stale samples: rl.max_staleness = {age} and loss.kind = "gppo" with beta_low = 1 and old_logps = "sampler"'
            in warned
        )
        assert f"{age} versions old, of 16 updates each, a tiny model collapsed with it on {seeds} seeds" in warned
    for loss in ("rl.loss.kind=m2po", "rl.loss.preset=ce_gppo"):
        assert "stale samples:" not in klear("plan", "smoke", *old, "--set", loss).out
    distilled = ("--set", "opd.then_rl=false", "--set", "opd.train.num_steps=64")
    assert "stale samples:" not in klear("plan", "smoke", *where, *distilled).out
    warned = klear("plan", "smoke", *where, *distilled, "--set", "opd.teacher.top_k=0").out
    assert "stale samples: opd.teacher.top_k = 0, opd.train.num_steps = 64 and loss.kind" in warned


def test_a_dry_run_shows_the_plan_and_makes_nothing(klear, tmp_path):
    shown = klear("run", ROOT / "configs/smoke", "--dry-run", "--set", f"workspace.root={tmp_path / 'ws'}")
    assert shown.status == 0
    assert re.findall(r"^ *(\w+) +run ", shown.out, re.MULTILINE)[:3] == ["benchmarks", "curate", "base"]
    assert not (tmp_path / "ws").exists()


def test_a_dry_run_shows_the_stages_that_were_chosen_and_no_others(klear, tmp_path):
    where = ("--dry-run", "--set", f"workspace.root={tmp_path / 'ws'}")
    shown = klear("run", ROOT / "configs/smoke", "--from", "curate", "--until", "distill", *where)
    assert shown.status == 0
    assert re.findall(r"^ *(\w+) +run ", shown.out, re.MULTILINE) == ["curate", "base", "distill"]
    assert re.findall(r"^ *(\w+) .*traces by", shown.out, re.MULTILINE) == ["distill"]
    assert "rollouts" not in shown.out
    ended = klear("run", ROOT / "configs/smoke", "--only", "train", *where)
    assert (ended.status, "no stage 'train'" in ended.err) == (2, True)


def test_a_setting_of_a_stage_that_the_run_does_not_have_is_warned_about(klear, tmp_path):
    overrides = ("--set", f"workspace.root={tmp_path}", "--set", "given.sft.path=models/sft", "--set", "rl.num_steps=3")
    told = " ".join(klear("plan", "smoke", *overrides, "--set", "sft.optim.lr=1e-4").err.split())
    assert told == "warning --set 'sft.optim.lr=1e-4': no stage of this run uses settings of sft"
    assert klear("plan", "smoke", *overrides).err == ""


def test_a_plan_says_what_an_upgrade_makes_again_why_and_what_it_took(klear, tmp_path, snapshot):
    overrides = [f"workspace.root={tmp_path}", "hardware.price_per_gpu_hour=2", "sft.dtype=bfloat16"]
    cfg = load_profile(ROOT / "configs" / "smoke", overrides)
    counts = {"sampled_tokens": 9000, "trained_tokens": 4000}
    publish(cfg, *[stage.name for stage in stages_of(cfg)], older=["distill", "rl"], wall_s=5400.0, counts=counts)
    planned = klear("plan", "smoke", *(word for override in overrides for word in ("--set", override)))
    block = planned.out[planned.out.index("upgrade:") :].partition(" stage     tokens")[0]
    snapshot("plan_upgrade", block)


def test_plan_tells_what_an_override_changes(klear, workspace):
    planned = klear("plan", ROOT / "configs/smoke", "--set", f"workspace.root={workspace}", "--set", "curate.seed_me=1")
    assert planned.status == 2
    assert "curate.seed_me: unknown key" in planned.err


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A store with one artifact of kind `curate`, made of two problems."""
    problems = [
        Problem(
            problem_id=f"p{i}",
            source="made",
            domain=Domain.MATH,
            question=f"{i}+1=?",
            reference=MathReference(answers=(str(i + 1),)),
            difficulty=Difficulty.UNKNOWN,
        )
        for i in range(2)
    ]
    with LocalStore(tmp_path / "artifacts").create("curate", "3f2a91aa") as slot:
        write_shard(slot.workdir / "problems" / "00000-of-00001.parquet", problems)
        slot.publish(manifest("curate", "3f2a91aa", stage="curate_rl"))
    return tmp_path


@pytest.mark.parametrize("which", ["curate", "curate_rl", "3f2a91", "3f2a91aa", "artifacts/curate/3f2a91aa"])
def test_an_artifact_is_shown_by_kind_by_stage_by_fingerprint_or_by_folder(klear, workspace, monkeypatch, which):
    monkeypatch.chdir(workspace)
    shown = klear("show", which, "--root", workspace, "--records", 1)
    assert shown.status == 0, shown.err
    assert "same_text 1" in shown.out
    assert "2 records" in shown.out
    assert "0+1=?" in shown.out
    assert "1+1=?" not in shown.out


def test_the_counts_of_a_large_artifact_are_shown_in_full(klear, tmp_path):
    with LocalStore(tmp_path / "artifacts").create("sft", "aa11") as slot:
        slot.publish(manifest("sft", "aa11", counts={"tokens": 12_345_678, "train_loss": 0.07462}))
    assert "tokens 12,345,678, train_loss 0.07462" in klear("show", "sft", "--root", tmp_path).out


def test_a_folder_with_brackets_in_its_name_is_shown_as_it_is(klear, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")  # a path is not broken either, so that it can be copied
    root = tmp_path / "runs [test]"
    with LocalStore(root / "artifacts").create("sft", "aa11") as slot:
        slot.publish(manifest("sft", "aa11"))
    assert str(root / "artifacts" / "sft" / "aa11") in klear("show", "sft", "--root", root).out


def test_an_artifact_goes_by_the_name_of_the_stage_that_made_it_the_newest_of_several(klear, tmp_path):
    for number, stage in enumerate(("evaluate_base", "evaluate_sft", "evaluate_sft", "evaluate_rl")):
        with LocalStore(tmp_path / "artifacts").create("evaluate", f"{number}aaaaaaa") as slot:
            slot.publish(manifest("evaluate", f"{number}aaaaaaa", stage=stage))
        made = tmp_path / "artifacts" / "evaluate" / f"{number}aaaaaaa" / "manifest.json"
        os.utime(made, (number, number))
    shown = klear("show", "evaluate_sft", "--root", tmp_path)
    assert (shown.status, shown.out.split()[:2]) == (0, ["evaluate", "2aaaaaaa"])
    assert klear("show", "evaluate", "--root", tmp_path).out.split()[1] == "3aaaaaaa"
    folders = [tmp_path / "artifacts" / "evaluate" / f"{number}aaaaaaa" for number in range(4)]
    names = [name_of(folder, read_manifest(folder).stage, tmp_path) for folder in folders]
    assert names == ["evaluate_base", "1aaaaaaa", "evaluate_sft", "evaluate_rl"]


def test_digits_that_begin_several_fingerprints_name_them_all(klear, tmp_path):
    for fingerprint, stage in (("aa11", "evaluate_sft"), ("aa22", "evaluate_base")):
        with LocalStore(tmp_path / "artifacts").create("evaluate", fingerprint) as slot:
            slot.publish(manifest("evaluate", fingerprint, stage=stage))
    ended = klear("show", "aa", "--root", tmp_path)
    assert "'aa' begins several fingerprints: evaluate/aa11, evaluate/aa22" in ended.err


def test_an_empty_workspace_has_nothing_to_show(klear, tmp_path):
    ended = klear("show", "sft", "--root", tmp_path / "none")
    assert ended.status != 0
    assert f"there is none at all under {tmp_path / 'none'}" in ended.err


@pytest.mark.parametrize(
    ("option", "told"), [("--only", "stage 'rl' needs 'curate' and 'sft'"), ("--from", "needs 'curate' and 'sft'")]
)
def test_a_stage_without_its_inputs_is_refused_at_once_with_a_command_line(klear, tmp_path, option, told):
    ended = klear("run", "smoke", option, "rl", "--set", f"workspace.root={tmp_path / 'ws'}")
    assert ended.status == 2
    assert told in ended.err
    assert "--until sft" in ended.err
    assert not (tmp_path / "ws").exists()


def test_rerun_from_shows_in_the_plan_and_refuses_a_stage_that_is_not_to_run(klear, tmp_path):
    where = ("--set", f"workspace.root={tmp_path / 'ws'}")
    shown = klear("run", "smoke", "--dry-run", "--rerun-from", "rl", *where)
    assert re.findall(r"^ *(\w+) +run +\w+ +asked to be made again", shown.out, re.MULTILINE) == [
        "rl",
        "evaluate_rl",
        "report",
    ]
    ended = klear("run", "smoke", "--only", "base", "--rerun-from", "curate", *where)
    assert (ended.status, "rerun from 'curate': it is not among the stages to run" in ended.err) == (2, True)


def test_a_workspace_may_lie_in_the_home_folder_and_is_no_file(klear, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert f"norunin{tmp_path / 'ws'}yet" in "".join(klear("runs", "--root", "~/ws").out.split())  # lines are folded
    (tmp_path / "ws").touch()
    shown = klear("show", "sft", "--root", "~/ws")
    assert (shown.status, shown.err) == (
        2,
        f"error: --root {tmp_path / 'ws'}: a file; name the folder of a workspace\n",
    )


def test_an_artifact_that_is_not_there_is_an_error_that_lists_the_stages(klear, workspace):
    shown = klear("show", "sft", "--root", workspace)
    assert shown.status != 0
    assert f"no artifact 'sft' under {workspace}" in shown.err
    assert "curate" in shown.err


def test_answers_in_a_file_are_judged(klear, tmp_path):
    answers = [
        {"id": n, "response": rf"</think> \boxed{{{n}}}", "reference": {"kind": "math", "answers": ["1"]}}
        for n in ("1", "2")
    ]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(a) + "\n" for a in answers))
    shown = klear("judge", tmp_path / "answers.jsonl", "--out", tmp_path / "verdicts.jsonl")
    assert shown.status == 0, shown.err
    verdicts = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [(v["id"], v["outcome"], v["score"]) for v in verdicts] == [("1", "scored", 1.0), ("2", "scored", 0.0)]
    assert "full score 1, mean score 0.5000" in shown.out


def test_a_broken_line_in_a_file_of_answers_is_an_error_once_the_rest_is_judged(klear, tmp_path):
    answer = json.dumps({"id": "1", "response": r"</think> \boxed{1}", "reference": {"kind": "math", "answers": ["1"]}})
    (tmp_path / "answers.jsonl").write_text(f"{answer}\n{{half a row\n{answer}\n")
    shown = klear("judge", tmp_path / "answers.jsonl", "--out", tmp_path / "verdicts.jsonl")
    assert shown.status == 2
    assert "line 2 not JSON" in shown.out
    assert "1 of its 3 rows do not fit and were not judged" in shown.err
    verdicts = [json.loads(line) for line in (tmp_path / "verdicts.jsonl").read_text().splitlines()]
    assert [(v["id"], v["score"]) for v in verdicts] == [("1", 1.0), ("1", 1.0)]


def test_the_doctor_says_what_is_there_and_what_to_do(klear):
    told = klear("doctor")
    assert told.status == 0
    assert all(what in told.out for what in ("Python", "torch", "C compiler", "ray", "sandbox", "memory", "disk"))


def test_the_doctor_shows_commands_with_brackets_as_they_must_be_typed(capsys):
    show_checks([Check(name="vLLM", found="no", is_good=False, fix="pip install -e '.[gpu]'")])
    assert "'.[gpu]'" in capsys.readouterr().out


@pytest.mark.slow
def test_parts_of_the_pipeline_run_by_themselves_on_what_exists(fresh, tmp_path):
    def run(*args: str) -> tuple[int, str]:
        where = ("--set", f"workspace.root={fresh}", "--set", "workspace.retries=0")
        command = start("run", "configs/smoke", *args, *where, log=tmp_path / "log")
        return command.wait(), command.output

    status, shown = run("--until", "curate")
    assert (status, re.findall(r"✓ (\w+)", shown)) == (0, ["benchmarks", "curate"])
    status, shown = run("--from", "curate", "--until", "base")
    assert (status, re.findall(r"([=✓]) (\w+)", shown)) == (0, [("=", "curate"), ("✓", "base")])
    status, shown = run("--only", "curate")
    assert (status, re.findall(r"([=✓]) (\w+)", shown)) == (0, [("=", "curate")])
    status, shown = run("--only", "benchmarks", "--rerun-from", "benchmarks")
    assert (status, re.findall(r"([=✓]) (\w+)", shown)) == (0, [("✓", "benchmarks")])
    assert "cannot be used" not in shown  # what is to be made again is not called damaged


def test_a_plan_is_of_the_stages_that_are_asked_for(klear, tmp_path):
    planned = klear("plan", "smoke", "--until", "curate", "--set", f"workspace.root={tmp_path}")
    assert planned.status == 0, planned.err
    assert "curate" in planned.out
    assert "distill" not in planned.out


def test_the_commands_are_in_panels(klear):
    shown = klear("--help").out
    places = [shown.index(panel) for panel in ("─ Run ─", "─ Score ─", "─ Look ─", "─ Serve ─")]
    assert places == sorted(places)


def test_a_misspelt_profile_is_answered_by_the_one_that_is_close(klear):
    assert "laptp: no such profile folder; did you mean laptop?" in klear("plan", "laptp").err
    assert "no profile folder can have this name: File name too long" in klear("plan", "q" * 300).err
