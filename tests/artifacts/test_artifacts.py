from pathlib import Path

from klear_core.artifacts.files import content_digest
from klear_core.artifacts.manifest import ArtifactId, fingerprint
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.stage import SftJob
from klear_core.config.train import SftConfig, SftOptimConfig, SftRuntime

JOB = SftJob(seed=1, sft=SftConfig())
INPUT = ArtifactId(kind="distill", fingerprint="a" * 20)


def test_a_fingerprint_changes_with_seed_settings_version_kind_and_inputs():
    other_input = ArtifactId(kind="distill", fingerprint="b" * 20)
    fingerprints = {
        fingerprint("sft", 1, JOB, [INPUT]),
        fingerprint("sft", 1, JOB.model_copy(update={"seed": 2}), [INPUT]),
        fingerprint("sft", 1, SftJob(seed=1, sft=SftConfig(optim=SftOptimConfig(lr=1e-3))), [INPUT]),
        fingerprint("sft", 2, JOB, [INPUT]),
        fingerprint("rl", 1, JOB, [INPUT]),
        fingerprint("sft", 1, JOB, [other_input]),
        fingerprint("sft", 1, JOB, []),
        fingerprint("sft", 1, JOB, [INPUT, other_input]),
        fingerprint("sft", 1, JOB, [other_input, INPUT]),
    }
    assert len(fingerprints) == 9


def test_a_fingerprint_does_not_change_with_runtime_settings():
    elsewhere = SftJob(seed=1, sft=SftConfig(runtime=SftRuntime(device="cpu", num_threads=7)))
    assert fingerprint("sft", 1, JOB, [INPUT]) == fingerprint("sft", 1, elsewhere, [INPUT])


def test_a_fingerprint_is_the_same_in_every_release():
    # Pinned: if this fails, everybody's artifacts would be made again.
    assert fingerprint("report", 1, ArtifactId(kind="x", fingerprint="y"), []) == "c92fb6b99c140e7f254a"


def test_a_file_is_known_by_its_content_and_not_by_its_name_or_date(tmp_path: Path):
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    one.write_text("same")
    two.write_text("same")
    assert content_digest(one) == content_digest(two)
    two.write_text("diff")
    assert content_digest(one) != content_digest(two)


def test_a_folder_is_known_by_names_and_contents_of_its_files(tmp_path: Path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "a").write_text("1")
    before = content_digest(folder)
    (folder / ".cache").write_text("hidden files do not count")
    assert content_digest(folder) == before
    (folder / "sub" / "a").rename(folder / "sub" / "b")
    assert content_digest(folder) != before


def test_a_job_holds_nothing_of_the_workspace():
    config = PipelineConfig()
    assert SftJob.of(config) == SftJob.of(
        config.model_copy(update={"workspace": config.workspace.model_copy(update={"root": "/else"})})
    )
