"""`klear rejudge`, `klear answers` and `klear compare`."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import replace
from pathlib import Path

from klear_command import Klear
from stored_evaluations import RIGHT, WRONG, evaluation, given_model, made_model, published_report, said, sample

from flows.stored_answers import evaluations_of
from klear_core.artifacts.store import LocalStore
from klear_core.config.evaluate import EvaluateSamplingConfig
from klear_core.config.train import TinyModelConfig
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import prepare_base

TINY = TinyModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16)

BARE = "<think>\nsteps\n</think>\nThe answer is 2."


def test_rejudge_shows_what_changed_and_writes_a_page(klear: Klear, tmp_path: Path) -> None:
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT), sample(2, 0, BARE, RIGHT)])
    ended = klear("rejudge", "rl", "--set", "verify.math.box=required", "--root", tmp_path, "--out", tmp_path / "again")
    assert ended.status == 0, ended.err
    assert "right to no answer: 1" in ended.out
    assert "100.0" in ended.out
    assert "50.0" in ended.out
    assert (tmp_path / "again" / "answers.html").is_file()
    # the result is a set of answers as any other
    assert klear("answers", tmp_path / "again", "rl", "--root", tmp_path, "--out", tmp_path / "page").status == 0
    assert (tmp_path / "page" / "answers-data" / "index.js").is_file()


def test_rows_of_a_foreign_file_that_cannot_be_read_end_in_an_error_after_the_result(
    klear: Klear, tmp_path: Path
) -> None:
    file = tmp_path / "mine.jsonl"
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"reference": 3}) + "\n")
    ended = klear("rejudge", file, "--set", "verify.tags=none", "--root", tmp_path)
    assert ended.status == 2
    named, _, last = " ".join(ended.err.split()).partition("error:")
    assert "1 rows are left out" in named  # before anything is judged
    assert "mine.jsonl:2: reference must be" in named
    assert "1 rows could not be read" in last
    assert list(tmp_path.glob("rejudged/mine-*/answers.html"))


def test_a_file_of_no_known_layout_is_read_with_the_option_that_its_error_names(klear: Klear, tmp_path: Path) -> None:
    file = tmp_path / "plain.jsonl"
    row = {"problem": "What is 3+4, in digits?", "expected": "7", "output": "The answer is 7.", "correct": False}
    file.write_text(json.dumps(row) + "\n")
    refused = klear("answers", file, "--root", tmp_path)
    assert refused.status == 2
    option, places = shlex.split(" ".join(refused.err.split()).rpartition("are: ")[2])
    assert klear("answers", file, option, places, "--root", tmp_path).out.startswith("1 answers to 1 problems")
    ended = klear("rejudge", file, option, places, "--set", "verify.tags=none", "--root", tmp_path)
    assert ended.status == 0, ended.err
    assert "wrong to right: 1" in ended.out
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    both = klear("answers", "rl", file, option, places, "--root", tmp_path)  # the option says nothing of our own
    assert both.out.startswith("2 answers to 2 problems"), both.err
    misspelt = klear("answers", file, option, places.replace("question", "qestion"), "--root", tmp_path)
    assert misspelt.status == 2
    assert "question: missing" in misspelt.err


def test_what_is_wrong_with_a_foreign_file_is_told_before_anything_is_judged(klear: Klear, tmp_path: Path) -> None:
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row | {"id": i}) + "\n" for i in ("a", "a", "b")))
    uneven = klear("answers", file, "--root", tmp_path)
    assert uneven.status == 0, uneven.err
    assert "1 of 2 problems have fewer than 2 samples: mine b: 1" in " ".join(uneven.err.split())
    custom = {"kind": "custom", "judge": "mine", "value": 1}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"id": "b", "reference": custom}) + "\n")
    refused = klear("rejudge", file, "--root", tmp_path, "--out", tmp_path / "again")
    assert refused.status == 2
    assert "problem b needs the judge 'mine'; verify.judges has" in " ".join(refused.err.split())
    assert not list(tmp_path.glob("again*"))


def test_an_evaluation_that_lost_answers_is_refused(klear: Klear, tmp_path: Path) -> None:
    folder = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)]).path
    next(folder.glob("samples/*")).unlink()
    assert "is missing, so that fewer answers are here" in klear("rejudge", folder, "--root", tmp_path).err


def test_other_settings_and_other_artifacts_are_refused_by_name(klear: Klear, tmp_path: Path) -> None:
    evaluation(tmp_path, [sample(1, 0, said(1), WRONG)])
    assert "only verify.* settings" in klear("rejudge", "rl", "--set", "seed=1", "--root", tmp_path).err
    assert "no evaluation of it" in klear("answers", "benchmarks", "--root", tmp_path).err


def test_fewer_stored_samples_than_n_are_refused_before_anything_is_judged(klear: Klear, tmp_path: Path) -> None:
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT), sample(1, 1, said(1), RIGHT), sample(2, 0, said(2), RIGHT)])
    refused = klear("rejudge", "rl", "--samples", "2", "--root", tmp_path, "--out", tmp_path / "again")
    assert refused.status == 2
    assert "1 of 2 problems have fewer than the 2 stored samples" in " ".join(refused.err.split())
    assert f"toy {2:016x}: 1" in refused.err
    assert not (tmp_path / "again").exists()
    assert klear("rejudge", "rl", "--samples", "1", "--root", tmp_path, "--out", tmp_path / "again").status == 0


def test_answers_to_prompt_templates_are_counted_shown_and_linked(klear: Klear, tmp_path: Path) -> None:
    plain = [sample(2, 0, said(2), RIGHT), sample(2, 1, said(2), RIGHT)]
    evaluation(tmp_path, plain, worded={"terse": [sample(2, 0, BARE, RIGHT)]})
    ended = klear("rejudge", "rl", "--set", "verify.math.box=required", "--root", tmp_path, "--out", tmp_path / "again")
    assert "toy, template terse, sampled: 1 problems" in ended.out
    assert "sample 0, template terse" in ended.out
    assert "answers.html#show=flipped&template=*" in ended.out
    refused = klear("rejudge", "rl", "--samples", "2", "--root", tmp_path)
    assert f"toy, template terse {2:016x}: 1" in " ".join(refused.err.split())


def test_files_of_one_name_are_told_apart_by_their_folders(klear: Klear, tmp_path: Path) -> None:
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    files = []
    for model in ("qwen", "llama"):
        (tmp_path / model).mkdir()
        files.append(tmp_path / model / "samples_x.jsonl")
        files[-1].write_text(json.dumps(row) + "\n")
    ended = klear("answers", *files, "--root", tmp_path, "--out", tmp_path / "page")
    assert ended.status == 0, ended.err
    index = (tmp_path / "page" / "answers-data" / "index.js").read_text()
    assert '"name":"samples_x qwen"' in index
    assert '"name":"samples_x llama"' in index


def test_names_in_square_brackets_are_printed_as_they_stand(klear: Klear, tmp_path: Path) -> None:
    """They are no markup of the terminal's."""
    row = {"problem_idx": "[/b]1", "problem": "", "gold_answer": "1", "answer": "\\boxed{2}", "correct": True}
    file = tmp_path / "aime [new].jsonl"
    file.write_text(json.dumps(row | {"model_name": "o9 [high]"}) + "\n")
    ended = klear("rejudge", file, "--set", "verify.tags=none", "--root", tmp_path, "--out", tmp_path / "[again]")
    assert ended.status == 0, ended.err
    assert "aime [new], o9 [high], sampled: 1 problems" in ended.out
    assert "[/b]1" in ended.out
    assert f"{tmp_path}/[again]/answers.html" in ended.out


def test_compare_takes_fingerprints_and_workspaces(klear: Klear, tmp_path: Path) -> None:
    for seed, verdict in ((0, WRONG), (1, RIGHT)):
        root = tmp_path / f"w{seed}"
        ref = evaluation(root, [sample(i, 0, said(i), verdict) for i in range(40)], seed=seed)
        published_report(root, {"evaluate_rl": ref}, {"name": "toy", "seed": seed})
    ended = klear("compare", "f00", tmp_path / "w1", "--root", tmp_path / "w0", "--out", tmp_path / "out")
    assert ended.status == 0, ended.err
    assert "+100.0" in ended.out
    assert "seed 0 | 1" in ended.out
    assert (tmp_path / "out" / "comparison.html").is_file()
    again = klear("compare", tmp_path / "w1", "f00", "f0", "--root", tmp_path / "w0").err
    assert "two of these are one run, f00" in again


def test_an_evaluation_of_a_models_folder_counts_as_the_models_own(klear: Klear, tmp_path: Path) -> None:
    """`klear evaluate rl` scores the folder of the model as a given one, wherever it was when it was scored."""
    files = tmp_path / "files"
    files.mkdir()
    prepare_base(TINY, seed=0, workdir=files, telemetry=NullTelemetry())
    other = tmp_path / "other"
    other.mkdir()
    prepare_base(TINY, seed=1, workdir=other, telemetry=NullTelemetry())
    made_model(tmp_path, files=files)
    made_model(tmp_path, model="sft", files=other)
    given = given_model(tmp_path, files / "model", work=tmp_path / "pointer")
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)], stage="evaluate_model", made=given)
    assert klear("answers", "rl", "--root", tmp_path).status == 0
    assert klear("publish", "rl", "--to", tmp_path / "mine", "--root", tmp_path).status == 0
    assert "| toy | avg@1 | 100.0 % |" in (tmp_path / "mine" / "README.md").read_text()
    assert klear("publish", tmp_path / "mine", "--to", tmp_path / "copy", "--root", tmp_path).status == 0
    assert (tmp_path / "copy" / "README.md").read_text() == (tmp_path / "mine" / "README.md").read_text().replace(
        "mine", "copy"
    )
    assert "no evaluation of it" in klear("answers", "sft", "--root", tmp_path).err  # other weights


def test_a_published_model_has_the_sampling_of_its_run_and_the_scores_of_later_evaluations(
    klear: Klear, tmp_path: Path
) -> None:
    """`make smol` scores GSM8K after the run, greedy and of 192 tokens; its card had that score alone."""
    files = tmp_path / "files"
    files.mkdir()
    prepare_base(TINY, seed=0, workdir=files, telemetry=NullTelemetry())
    of_run = evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)], files=files)
    (made,) = [f for f in LocalStore(tmp_path / "artifacts").folders() if f.parent.name == "rl"]
    given = given_model(tmp_path, made / "model", work=tmp_path / "pointer")
    greedy = EvaluateSamplingConfig(temperature=0.0, max_new_tokens=192)
    for seed, benchmark in ((1, "gsm8k"), (2, "toy")):
        wrong = [replace(sample(1, 0, said(2), WRONG), benchmark=benchmark)]
        later = {"stage": "evaluate_model", "made": given, "sampling": greedy}
        evaluation(tmp_path, wrong, seed=seed, benchmark=benchmark, **later)
    assert evaluations_of(made)[0] == of_run.path
    assert klear("publish", "rl", "--to", tmp_path / "mine", "--root", tmp_path).status == 0
    card = (tmp_path / "mine" / "README.md").read_text()
    assert "| toy | avg@1 | 100.0 % |" in card
    assert "| gsm8k | avg@1 | 0.0 % |" in card
    assert "`generation_config.json` has the sampling of the scores on toy. " in card
    stated = json.loads((tmp_path / "mine" / "generation_config.json").read_text())
    assert (stated["do_sample"], stated["temperature"], stated["max_new_tokens"]) == (True, 0.6, 32_768)


def test_a_place_that_cannot_be_written_to_is_refused_before_any_work(klear: Klear, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    file.write_text(json.dumps(row) + "\n")
    for out in (file, file / "below"):
        told = f"{out}: {file} is a file; name a folder"
        assert f"--out {told}" in klear("answers", file, "--out", out).err
        assert f"--out {told}" in klear("compare", "a", "b", "--out", out).err
        assert f"--out {told}" in klear("rejudge", file, "--out", out).err
        assert f"--out {told}" in klear("curate", file, "--out", out).err
        assert f"--to {told}" in klear("publish", "rl", "--to", out).err
    for out in (Path("/proc/here"), tmp_path / ("x" * 300)):
        assert f"--out {out}: cannot be written to (" in klear("answers", file, "--out", out).err
        assert f"--out {out}: cannot be written to (" in klear("compare", "a", "b", "--out", out).err
        assert f"--out {out}: cannot be written to (" in klear("rejudge", file, "--out", out).err
        assert f"--to {out}: cannot be written to (" in klear("publish", "rl", "--to", out).err
        assert f"--out {out}/x: cannot be written to (" in klear("judge", file, "--out", out / "x").err
    assert "--out /proc/answers/rows: cannot be written to (" in klear("answers", file, "--root", "/proc").err
    (tmp_path / "folder").mkdir()
    refused = klear("judge", file, "--out", tmp_path / "folder")
    assert (refused.status, refused.out) == (2, "")
    assert f"--out {tmp_path}/folder: a folder; name a file" in refused.err
    assert f"--out {file}/x: {file} is a file" in klear("judge", file, "--out", file / "x").err


def test_a_page_of_many_files_gets_a_folder_whose_name_is_not_too_long(klear: Klear, tmp_path: Path) -> None:
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    files = [tmp_path / f"samples_{i}_{'long' * 30}.jsonl" for i in range(3)]
    for file in files:
        file.write_text(json.dumps(row) + "\n")
    ended = klear("answers", *files, "--root", tmp_path)
    assert ended.status == 0, ended.err
    assert klear("answers", *files[:2], "--root", tmp_path).status == 0
    assert len(list(tmp_path.glob("answers/*/answers.html"))) == 2  # no page replaces another


def test_an_upload_without_a_token_is_refused_before_a_folder_is_written(
    klear: Klear, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    made_model(tmp_path)
    refused = klear("publish", "rl", "--to", "me/model", "--root", tmp_path)
    assert "me/model: no token of the Hub is here; set HF_TOKEN" in refused.err
    assert not (tmp_path / "published").exists()


def test_publish_tells_a_folder_from_a_name_on_the_hub(klear: Klear, tmp_path: Path, monkeypatch) -> None:
    evaluation(tmp_path, [sample(1, 0, said(1), RIGHT)])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me").mkdir()
    assert "For a folder, write ./me/model" in klear("publish", "benchmarks", "--to", "me/model", "--root", ".").err
    assert "name a stage that makes a model" in klear("publish", "benchmarks", "--to", "./me/model", "--root", ".").err


def test_the_documented_commands_to_publish_name_a_folder_and_a_name_on_the_hub(
    klear: Klear, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    for text in (page, klear("publish", "--help").out):
        places = dict.fromkeys(re.findall(r"klear publish rl --to (\S+)", text))
        refused = [klear("publish", "rl", "--to", place).err for place in places]
        assert sum("no token of the Hub" in error for error in refused) == 1
        assert sum("no artifact 'rl'" in error for error in refused) == len(places) - 1 > 0


def test_names_of_files_may_be_long_in_bytes_but_must_be_text(klear: Klear, tmp_path: Path) -> None:
    row = {"id": "a", "response": "The answer is 7.", "reference": {"kind": "math", "answers": ["7"]}}
    chinese = [tmp_path / f"{'题' * 80}{number}.jsonl" for number in range(2)]
    for file in chinese:
        file.write_text(json.dumps(row) + "\n")
    ended = klear("answers", *chinese, "--root", tmp_path)
    assert ended.status == 0, ended.err
    (page,) = tmp_path.glob("answers/*/answers.html")
    assert page.parent.name.startswith("题" * 40 + "-")
    broken = tmp_path / "a\udcff.jsonl"
    chinese[0].rename(broken)
    for command in ("answers", "rejudge"):
        refused = klear(command, broken, "--root", tmp_path)
        assert refused.status == 2
        assert "a\\udcff.jsonl': the name is not UTF-8; rename the file" in refused.err
