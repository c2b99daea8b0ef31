"""A checkpoint is whole or not there, and training from it is training without a break."""

import json
import shutil
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from tiny_models import ONE, nll_heads, packed, random_rows, tiny_folder

from klear_core.artifacts.shared import write_shared
from klear_core.config.train import CheckpointConfig, OptimConfig, TrainRuntime
from klear_core.errors import ResourceError
from klear_core.metrics import NullTelemetry
from klear_core.train.checkpoint import Checkpoints
from klear_core.train.distributed import load_policy, local_weights
from klear_core.train.model import load_model
from klear_core.train.step import Updater

BATCHES = [packed(random_rows([9, 20], seed=s)) for s in range(6)]


class Run:
    """A few training steps with checkpoints, as a loop has them."""

    def __init__(self, folder, checkpoints, **cfg):
        self.policy = load_model(folder, device="cpu")
        self.updater = Updater(self.policy, OptimConfig(lr=1e-2, weight_decay=0.1), ONE, num_steps=6)
        self.checkpoints = Checkpoints(checkpoints, CheckpointConfig(**cfg), ONE)

    def steps(self, first, last):
        for s in range(first, last):
            self.updater.update(BATCHES[s], nll_heads(BATCHES[s], 1 / 23), step=s)

    def save(self, step, **counters):
        self.checkpoints.save(step, self.policy, self.updater.optimizer, counters)

    def load(self):
        return self.checkpoints.load_latest(self.policy, self.updater.optimizer)

    def weights(self):
        return [p.detach().clone() for p in self.policy.parameters()]


@pytest.fixture
def folder(tmp_path):
    return tiny_folder(tmp_path / "base")


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(folder, tmp_path, asynchronous):
    whole = Run(folder, tmp_path / "a", asynchronous=asynchronous)
    whole.steps(0, 3)
    whole.save(3, version=3)
    whole.steps(3, 6)  # an asynchronous save must not see these
    whole.checkpoints.wait()
    resumed = Run(folder, tmp_path / "a")
    assert resumed.load() == (3, {"version": 3})
    resumed.steps(3, 6)
    assert same(whole.weights(), resumed.weights())


def test_a_checkpoint_before_the_first_step_changes_nothing(folder, tmp_path):
    saved, plain = Run(folder, tmp_path / "a"), Run(folder, tmp_path / "b")
    saved.save(0)
    for run in (saved, plain):
        run.steps(0, 2)
    assert same(saved.weights(), plain.weights())


def test_random_state_comes_back(folder, tmp_path):
    run = Run(folder, tmp_path / "a")
    torch.manual_seed(11)
    run.save(1)
    want = torch.rand(3)
    torch.manual_seed(12)
    run.load()
    assert torch.equal(torch.rand(3), want)


def test_without_a_checkpoint_there_is_nothing_to_resume(folder, tmp_path):
    assert Run(folder, tmp_path / "a").load() is None


def test_only_the_newest_are_kept(folder, tmp_path):
    run = Run(folder, tmp_path / "a", keep=2)
    for step in (10, 20, 30):
        run.save(step)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["step-00000020", "step-00000030"]
    assert run.load()[0] == 30


@pytest.mark.parametrize("damage", ["flip", "truncate", "delete", "seal", "half"])
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(folder, tmp_path, damage):
    run = Run(folder, tmp_path / "a")
    run.steps(0, 1)
    run.save(1, version=1)
    want = run.weights()
    run.steps(1, 2)
    run.save(2, version=2)
    newest = tmp_path / "a" / "step-00000002"
    shard = newest / "__0_0.distcp"
    match damage:
        case "flip":
            data = bytearray(shard.read_bytes())
            data[len(data) // 2] ^= 1
            shard.write_bytes(data)
        case "truncate":
            shard.write_bytes(shard.read_bytes()[:-1])
        case "delete":
            shard.unlink()
        case "seal":
            (newest / "seal.json").write_text("{")
        case "half":  # killed while writing: the folder never got its name
            newest.rename(tmp_path / "a" / "unfinished")
    again = Run(folder, tmp_path / "a")
    assert again.load() == (1, {"version": 1})
    assert same(again.weights(), want)
    again.save(2, version=22)  # and the damaged one is replaced
    assert Run(folder, tmp_path / "a").load() == (2, {"version": 22})


def test_a_failed_asynchronous_save_is_raised_by_the_next_wait(folder, tmp_path):
    run = Run(folder, tmp_path / "a", asynchronous=True)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("a file where the folder was")
    run.save(1)
    with pytest.raises(ResourceError, match=r"step-00000001 could not be written: rank 0: NotADirectoryError"):
        run.checkpoints.wait()


def ask_until_it_raises(checkpoints):
    while True:
        checkpoints.raise_failure()


def test_a_failed_asynchronous_save_is_raised_before_the_next_once_it_has_ended(folder, tmp_path):
    run = Run(folder, tmp_path / "a", asynchronous=True)
    (tmp_path / "a").rmdir()
    (tmp_path / "a").write_text("a file where the folder was")
    run.checkpoints.raise_failure()  # nothing has failed yet
    run.save(1)
    with pytest.raises(ResourceError, match="step-00000001 could not be written"):
        ask_until_it_raises(run.checkpoints)
    run.checkpoints.wait()  # it is raised once


def test_a_save_is_due_every_so_many_steps(folder, tmp_path):
    checkpoints = Run(folder, tmp_path / "a", every_steps=4).checkpoints
    assert [s for s in range(1, 13) if checkpoints.is_due(s)] == [4, 8, 12]


def test_the_seal_names_every_file(folder, tmp_path):
    Run(folder, tmp_path / "a").save(5, version=5)
    made = tmp_path / "a" / "step-00000005"
    seal = json.loads((made / "seal.json").read_text())
    assert set(seal["files"]) | {"seal.json"} == {p.name for p in made.iterdir()}


def node(tmp_path, name):
    """Return the folder of a stage's checkpoints on a node's own disk."""
    write_shared(tmp_path / name, (tmp_path / "shared").as_uri())
    return tmp_path / name / ".building" / "sft-f1" / "work" / "scratch" / "checkpoints"


def test_another_node_resumes_from_the_newest_checkpoint_in_the_store(folder, tmp_path):
    lost = Run(folder, node(tmp_path, "a"), keep=2, asynchronous=True)
    for step in range(4):
        lost.steps(step, step + 1)
        lost.save(step + 1, version=step + 1)
    lost.checkpoints.wait()
    lost.steps(4, 6)
    other = Run(folder, node(tmp_path, "b"))
    assert other.load() == (4, {"version": 4})
    other.steps(4, 6)
    assert same(lost.weights(), other.weights())
    copies = tmp_path / "shared" / "work" / "sft-f1" / "work" / "scratch" / "checkpoints"
    assert sorted(path.name for path in copies.iterdir() if list(path.iterdir())) == ["step-00000003", "step-00000004"]


def test_a_node_that_comes_back_takes_what_another_has_done_since(folder, tmp_path):
    first = Run(folder, node(tmp_path, "a"))
    first.steps(0, 2)
    first.save(2)
    second = Run(folder, node(tmp_path, "b"))
    second.load()
    second.steps(2, 4)
    second.save(4)
    assert Run(folder, node(tmp_path, "a")).load() == (4, {})


def test_a_copy_that_is_not_sealed_or_is_damaged_is_skipped(folder, tmp_path, caplog):
    run = Run(folder, node(tmp_path, "a"), keep=3)
    for step in (1, 2, 3):
        run.save(step)
    copies = tmp_path / "shared" / "work" / "sft-f1" / "work" / "scratch" / "checkpoints"
    (copies / "step-00000003" / "seal.json").unlink()
    (copies / "step-00000002" / "__0_0.distcp").write_bytes(b"x")
    assert Run(folder, node(tmp_path, "b")).load() == (1, {})
    assert "checkpoint step-00000002 is skipped" in caplog.text
    # the node that wrote it still has it whole
    assert Run(folder, node(tmp_path, "a")).load() == (3, {})


@pytest.mark.parametrize("seal", ["", "{", "{}", "null"])
def test_a_copy_or_a_checkpoint_whose_seal_cannot_be_read_is_skipped(folder, tmp_path, seal):
    """A disk that loses its power, or a tool that copies the folder, may leave a part of the file."""
    run = Run(folder, node(tmp_path, "a"), keep=3)
    for step in (1, 2):
        run.save(step)
    copies = tmp_path / "shared" / "work" / "sft-f1" / "work" / "scratch" / "checkpoints"
    (copies / "step-00000002" / "seal.json").write_text(seal)
    assert Run(folder, node(tmp_path, "b")).load() == (1, {})
    alone = Run(folder, tmp_path / "alone")
    for step in (1, 2):
        alone.save(step)
    (tmp_path / "alone" / "step-00000002" / "seal.json").write_text(seal)
    assert Run(folder, tmp_path / "alone").load() == (1, {})


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_damaged_checkpoint_is_not_kept_in_place_of_an_intact_one(folder, tmp_path, is_shared):
    """Damaged, it has the highest number until training comes to its step again."""
    place = node(tmp_path, "a") if is_shared else tmp_path / "alone"
    run = Run(folder, place, keep=1)
    run.save(3)
    copies = tmp_path / "shared" / "work" / "sft-f1" / "work" / "scratch" / "checkpoints"
    for damaged in (place, copies) if is_shared else (place,):
        (damaged / "step-00000003" / "__0_0.distcp").write_bytes(b"x")
    again = Run(folder, place, keep=1)
    assert again.load() is None
    again.save(1)
    assert [p.name for p in place.iterdir()] == ["step-00000001"]
    assert Run(folder, place, keep=1).load() == (1, {})
    if is_shared:
        assert Run(folder, node(tmp_path, "b"), keep=1).load() == (1, {})


def _save_apart(folder, root, world, _telemetry):
    place = root / str(world.rank) / ".building" / "sft-f1" / "work" / "scratch" / "checkpoints"
    write_shared(root / str(world.rank), (root / "shared").as_uri())
    policy = load_policy(folder, world, dtype="float32", activation_checkpointing=False)
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=6)
    checkpoints = Checkpoints(place, CheckpointConfig(asynchronous=True), world)
    assert checkpoints.load_latest(policy, updater.optimizer) is None
    saved = local_weights(policy)
    checkpoints.save(1, policy, updater.optimizer, {"version": 1})
    checkpoints.wait()
    written = sorted(f.name for f in (place / "step-00000001").iterdir())
    shutil.rmtree(place)  # another node takes the rank's place
    with torch.no_grad():
        for p in policy.parameters():
            p.mul_(2)
    assert checkpoints.load_latest(policy, updater.optimizer) == (1, {"version": 1})
    assert same(saved, local_weights(policy))
    return world.gather([written, sorted(f.name for f in (place / "step-00000001").iterdir())])


@pytest.mark.slow
def test_ranks_with_disks_of_their_own_send_their_files_and_resume_on_new_disks(folder, tmp_path):
    runtime = TrainRuntime(num_workers=2, device="cpu")
    files = run_ranks(partial(_save_apart, folder, tmp_path), runtime, NullTelemetry())
    whole = [".metadata", "__0_0.distcp", "__1_0.distcp", "seal.json"]
    assert files == [[[".metadata", "__0_0.distcp", "seal.json"], whole], [["__1_0.distcp", "seal.json"], whole]]


def _longest_waits(folder, world, _telemetry):
    checkpoints = Checkpoints(folder / str(world.rank), CheckpointConfig(asynchronous=True), world)
    groups = (dist.group.WORLD, world.cp_group.group, checkpoints._group)
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.slow
def test_no_rank_gives_up_others_that_are_slow_because_the_driver_knows_whether_they_make_progress(tmp_path):
    """Torch's defaults end a rank after 10 or 30 minutes in which another writes a large checkpoint or model."""
    runtime = TrainRuntime(num_workers=2, context_parallel=2, device="cpu")
    waits = run_ranks(partial(_longest_waits, tmp_path), runtime, NullTelemetry())
    assert waits == 3 * [timedelta(days=1)]


def _save_thrice(folder, places, world, _telemetry):
    """Return what the three saves of each rank raise. One whose rank was left waiting has gloo's error, at its exit."""
    policy = load_policy(folder, world, dtype="float32", activation_checkpointing=False)
    updater = Updater(policy, OptimConfig(lr=1e-2), world, num_steps=6)
    checkpoints = Checkpoints(places[world.rank], CheckpointConfig(asynchronous=True), world)
    errors = ["", "", ""]
    for step in (1, 2, 3):
        try:
            checkpoints.save(step, policy, updater.optimizer, {})
            checkpoints.wait()
        except (OSError, ResourceError) as e:
            errors[step - 1] = repr(e)
    return world.gather(errors)


@pytest.mark.slow
def test_what_one_rank_cannot_write_fails_the_save_on_all_and_the_next_goes_on(folder, tmp_path):
    places = [node(tmp_path, name) for name in ("a", "b")]
    copies = tmp_path / "shared" / "work" / "sft-f1" / "work" / "scratch" / "checkpoints"
    for obstacle in ("step-00000001/__1_0.distcp", "step-00000002/seal.json"):
        (copies / obstacle).mkdir(parents=True)  # a folder where a file belongs
    runtime = TrainRuntime(num_workers=2, device="cpu")
    errors = run_ranks(partial(_save_thrice, folder, places), runtime, NullTelemetry())
    for step, failing in ((1, 1), (2, 0)):
        own, others = errors[failing][step - 1], errors[1 - failing][step - 1]
        assert own.startswith("IsADirectoryError")
        assert f"step-{step:08d} could not be written: rank {failing}: IsADirectoryError" in others
    assert [each[2] for each in errors] == ["", ""]
    assert all((place / "step-00000003" / "seal.json").is_file() for place in places)
