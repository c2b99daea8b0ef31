"""Check before a run that its models and engines are there and fit each other: lengths, heads, devices.

Each function yields one message for each problem that it finds.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby

from klear_core.artifacts.model_files import check_model, folder_of, token_ids
from klear_core.cluster.nodes import joins_a_cluster, known_nodes, plan_scorer
from klear_core.cluster.placement import (
    GpuPlan,
    Node,
    Place,
    Placement,
    Room,
    check_cpu_is_meant,
    check_tensor_parallel,
    cpu_refusal,
    is_direct,
    is_too_large_for_cpu,
    place_ranks,
    place_rl,
    plan_gpus,
)
from klear_core.config.data_jobs import GivenModelJob
from klear_core.config.evaluate import LONGEST_TORCH_ANSWER, HttpEngineConfig, TorchEngineConfig, VllmEngineConfig
from klear_core.config.opd import GivenTeacher, OpdRolloutsConfig, OpdTeacherConfig, TrainedTeacher
from klear_core.config.opd_jobs import OpdScoresJob
from klear_core.config.rl import RlConfig, RolloutConfig
from klear_core.config.stage import BaseJob, EngineUse, LearnerUse, RlJob, SftJob, Stage
from klear_core.config.train import HubModelConfig, LocalModel, ModelConfig, SftConfig, TinyModelConfig
from klear_core.errors import ConfigError, ResourceError
from klear_core.generate.model_size import ModelSize
from klear_core.hf_config import HfConfig, read_hf_config, unusual_keys
from klear_core.native import NO_BFLOAT16
from klear_core.pipeline.costs.estimate import trained_model, trained_size
from klear_core.pipeline.costs.memory import learner_load, learner_peak
from klear_core.pipeline.graph import stages_of
from klear_core.pipeline.plan import PendingWork
from klear_core.pipeline.preflight.data_checks import error_messages
from klear_core.prompts import different_tokens


def model_problems(work: PendingWork) -> Iterator[str]:
    """Find models that are not there or not whole."""
    # Also the model of a base stage that is reused: its artifact only points to the folder.
    for _, job in work.needs(BaseJob):
        if isinstance(job.model, LocalModel):
            yield from error_messages(f"model.path = {job.model.path!r}", check_model, job.model)
        elif isinstance(job.model, HubModelConfig):
            yield from error_messages("model", check_model, job.model)
    # Of all stages: a later call may train what this one samples from.
    trained = {stage.inputs.get("model") for stage in stages_of(work.config) if stage.job.method()}
    for stage, given in work.needs(GivenModelJob):
        check = partial(check_model, is_trained=stage.name in trained)
        yield from error_messages(stage.section, check, given.runtime.as_model())


def token_problems(work: PendingWork) -> Iterator[str]:
    """Find a teacher of on-policy distillation whose tokens are not the student's: nothing could be learned."""
    for key, source in _teachers(work):
        student = work.config.start_model
        teacher = source.model.as_model() if isinstance(source, GivenTeacher) else source.model
        if student == teacher:
            continue
        try:
            student_ids, teacher_ids = _token_ids(student), _token_ids(teacher)
        except ConfigError as e:
            yield f"{key}: {e}"
            continue
        except ResourceError:
            continue  # the Hub cannot be reached, which `model_problems` says
        # What cannot be compared here is compared before the teacher is loaded.
        if student_ids is not None and teacher_ids is not None:
            note = different_tokens(student_ids, teacher_ids)
            if note:
                yield f"{key}: {note}"


def _teachers(work: PendingWork) -> Iterator[tuple[str, GivenTeacher | TrainedTeacher]]:
    """Yield the teachers of pending stages, each with the key of its model."""
    for stage, job in work.pending(OpdScoresJob):
        yield f"{stage.section}.{job.teacher}.source.model", job.runtime.source
    config = work.config
    if config.rl_teacher and any(job.teacher for _, job in work.pending(RlJob)):
        yield "rl_teacher.source.model", config.rl_teacher.source


def _token_ids(model: ModelConfig) -> Mapping[str, int] | None:
    if isinstance(model, TinyModelConfig):
        from klear_core.prompts import build_byte_tokenizer

        ids: Mapping[str, int] = build_byte_tokenizer().get_vocab()
        return ids
    return token_ids(model)


def length_problems(work: PendingWork) -> Iterator[str]:
    """Check lengths against the model's window: the configured one, or the folder's if it is wider."""
    for stage, job in work.pending(SftJob):
        model, max_tokens = trained_model(work.config, stage), job.sft.max_tokens
        window, whose = window_of(model), "model." if model == work.config.start_model else "its "
        if window is not None and max_tokens > window:
            yield f"{stage.section}.max_tokens = {max_tokens} is more than {whose}max_position_embeddings = {window}"
    for use in work.engines():
        yield from _too_long_answers(use, use.model or work.config.start_model)
    for stage, rl_job in work.pending(RlJob):
        yield from _too_long_prompts(f"{stage.section}.rollout", rl_job.rl.rollout)
    yield from _unscorable_answers(work)


def _too_long_prompts(key: str, rollout: RolloutConfig) -> Iterator[str]:
    """Yield a problem if RL may send a prompt that its engine refuses, which would end the run when it comes."""
    engine = rollout.engine
    if not isinstance(engine, VllmEngineConfig) or engine.max_model_len is None:
        return
    if rollout.max_prompt_tokens >= engine.max_model_len:
        yield (
            f"{key}.max_prompt_tokens = {rollout.max_prompt_tokens} leaves no room for an answer in "
            f"{key}.engine.max_model_len = {engine.max_model_len}"
        )


def _unscorable_answers(work: PendingWork) -> Iterator[str]:
    """Yield a problem for each teacher whose window is shorter than the longest answer that it scores."""
    config = work.config
    for stage, job in work.pending(OpdScoresJob):
        assert config.opd is not None
        yield from _unscorable(work, f"{stage.section}.{job.teacher}", job.runtime, "opd.rollouts", config.opd.rollouts)
    for stage, rl_job in work.pending(RlJob):
        if rl_job.teacher and config.rl_teacher:
            key = f"{stage.section}.rollout"
            yield from _unscorable(work, "rl_teacher", config.rl_teacher, key, rl_job.rl.rollout)


def _unscorable(
    work: PendingWork,
    key: str,
    teacher: OpdTeacherConfig,
    student_key: str,
    student: OpdRolloutsConfig | RolloutConfig,
) -> Iterator[str]:
    source = teacher.source
    model = source.model.as_model() if isinstance(source, GivenTeacher) else source.model
    room, of_what = _room_of(EngineUse(key=key, engine=teacher.engine, sampling=student.sampling, model=model), model)
    if room is None or teacher.runtime.num_engines == 0:
        return
    use = EngineUse(key=student_key, engine=student.engine, sampling=student.sampling)
    students_room, _ = _room_of(use, work.config.start_model)
    longest = student.max_prompt_tokens + student.sampling.max_new_tokens
    needed = longest if students_room is None else min(longest, students_room)
    needed += not isinstance(teacher.engine, TorchEngineConfig)  # the others sample a token behind what they score
    if needed > room:
        yield f"{key}: a window of {needed} tokens, to score answers of {student_key}, is more than {of_what}"


def _room_of(use: EngineUse, model: ModelConfig) -> tuple[int | None, str]:
    """Return the positions of an engine, None if they are not known, and the setting that says so."""
    room, of_what = _widest_room(use, model)
    own = use.engine.max_model_len if isinstance(use.engine, VllmEngineConfig) else None
    if own is not None and (room is None or own <= room):
        return own, f"{use.key}.engine.max_model_len = {own}"
    return room, of_what


def _widest_room(use: EngineUse, model: ModelConfig) -> tuple[int | None, str]:
    """Return the positions that an engine could have, those of the model as YaRN stretches them, and what says so."""
    room, engine = window_of(model), use.engine
    of_what = f"{'its ' if use.model else 'model.'}max_position_embeddings = {room}"
    if room is None or not isinstance(engine, VllmEngineConfig) or engine.yarn_factor is None:
        return room, of_what
    if engine.yarn_original_window is not None:
        of_what = f"{use.key}.engine.yarn_original_window = {engine.yarn_original_window}"
    return engine.stretched(room), f"{of_what} times {use.key}.engine.yarn_factor = {engine.yarn_factor:g}"


def _too_long_answers(use: EngineUse, model: ModelConfig) -> Iterator[str]:
    widest, of_widest = _widest_room(use, model)
    if widest is None:
        return
    engine, max_new_tokens = use.engine, use.sampling.max_new_tokens
    if isinstance(engine, VllmEngineConfig) and engine.max_model_len is not None and engine.max_model_len > widest:
        yield f"{use.key}.engine.max_model_len = {engine.max_model_len} is more than {of_widest}"
    room, of_what = _room_of(use, model)
    if room is not None and max_new_tokens > room:
        yield f"{use.key}.sampling.max_new_tokens = {max_new_tokens} is more than {of_what}"


def engine_problems(work: PendingWork) -> Iterator[str]:
    """Find engines that are not installed here, or cannot run their model."""
    from klear_core.generate.decoder.shape import read_shape

    for use in work.engines():
        key, engine, sampling = use.key, use.engine, use.sampling
        model = use.model or work.config.start_model
        if isinstance(engine, VllmEngineConfig) and importlib.util.find_spec("vllm") is None:
            way_out = "pip install -e '.[gpu]'"
            if _torch_runs(model):
                way_out += (
                    f", or set kind = 'torch', which runs this model with answers of at most {LONGEST_TORCH_ANSWER} "
                    f"tokens ({key}.sampling.max_new_tokens; klear evaluate: --max-tokens {LONGEST_TORCH_ANSWER})"
                )
            yield f"{key}.engine.kind = 'vllm': vLLM is not installed here; {way_out}"
        if isinstance(engine, VllmEngineConfig) and isinstance(model, TinyModelConfig) and model.head_dim < 32:
            yield f"{key}.engine.kind = 'vllm' needs model.head_dim of 32 or more, not {model.head_dim}"
        if isinstance(engine, TorchEngineConfig) and sampling.max_new_tokens > LONGEST_TORCH_ANSWER:
            yield (
                f"{key}.engine.kind = 'torch' has no paged cache; for answers of more than {LONGEST_TORCH_ANSWER} "
                f"tokens use kind = 'vllm', or lower {key}.sampling.max_new_tokens, which is {sampling.max_new_tokens}"
            )
        if isinstance(engine, TorchEngineConfig) and not isinstance(model, TinyModelConfig) and _hf_config(model):
            yield from error_messages(f"{key}.engine", read_shape, folder_of(model))


def context_problems(work: PendingWork) -> Iterator[str]:
    """Find trainings whose context parallelism does not fit the model's heads, or that keep more layers than it has."""
    for stage, learner in work.trainings():
        size, runtime = trained_size(work.config, stage), learner.training.runtime
        if size is None:
            continue
        try:
            runtime.check_attention_heads(size.num_heads, "the model")
            runtime.check_layers(size.num_layers, "the model")
        except ConfigError as e:
            yield f"{learner.key}.{e}"


def cuda_problems(work: PendingWork) -> Iterator[str]:
    """Check the devices of this machine; a stage on a Ray cluster at RAY_ADDRESS is refused where it is placed."""
    if joins_a_cluster():
        return
    devices = {f"{learner.key}.runtime": learner.training.runtime.device for _, learner in work.trainings()}
    devices |= {
        f"{use.key}.engine.runtime": use.engine.runtime.device
        for use in work.engines()
        if isinstance(use.engine, TorchEngineConfig)
    }
    for key, device in devices.items():
        if device == "cuda":
            from klear_core.train.model import pick_device

            yield from error_messages(key, pick_device, device)


def _hf_config(model: ModelConfig) -> HfConfig | None:
    """Return None for a tiny model, and without a readable config.json, which `model_problems` reports."""
    try:
        return None if isinstance(model, TinyModelConfig) else read_hf_config(folder_of(model))
    except ConfigError:
        return None


def _torch_runs(model: ModelConfig) -> bool:
    config = _hf_config(model)
    return isinstance(model, TinyModelConfig) or (config is not None and not any(unusual_keys(config)))


def window_of(model: ModelConfig) -> int | None:
    """Return the positions of a model, those of its folder or of its settings; None if neither says."""
    hf = _hf_config(model)
    return hf.window(model.max_position_embeddings) if hf else model.max_position_embeddings


# ---- placement ----
# Place the learners and engines of pending stages on the available nodes, or say why that is impossible.


def placement_problems(work: PendingWork) -> Iterator[str]:
    """Yield why the learners and engines of a stage cannot be placed on this machine or the cluster at RAY_ADDRESS."""
    try:
        nodes = known_nodes()
    except ResourceError as e:
        yield str(e)
    else:
        yield from problems_on(nodes, work)


def problems_on(nodes: Sequence[Node], work: PendingWork, *, are_remote: bool = False) -> Iterator[str]:
    """Yield why the learners and engines of a stage cannot be placed on these nodes; `are_remote`: not here."""
    has_no_device = not any(node.num_gpus for node in nodes) and not (are_remote or joins_a_cluster())
    for stage, learner in work.trainings():
        training, size = learner.training, trained_size(work.config, stage)
        try:
            if size is not None:
                _check_device(stage, learner, size.num_params, nodes)
        except ResourceError as e:
            yield str(e)
            continue
        if has_no_device and training.runtime.device == "cuda":
            continue  # a missing device of this machine is reported by itself
        try:
            place_training(stage, learner, size, nodes)
        except ResourceError as e:
            yield f"{learner.key}.runtime: {e}"
            continue
        yield from _scorer_problems(stage, training, size, nodes)


def _scorer_problems(
    stage: Stage, training: SftConfig | RlConfig, size: ModelSize | None, nodes: Sequence[Node]
) -> Iterator[str]:
    """Yield a problem if the engine that scores models while a stage trains finds no GPU beside the learner's."""
    use = stage.job.scorer()
    if use is None:
        return
    assert not isinstance(use.engine, HttpEngineConfig), "evaluation has engines of its own"
    num_params = None if size is None else size.num_params
    try:
        plan_scorer(use.engine, training.runtime, nodes, num_params, key=stage.section)
    except ResourceError as e:
        yield str(e)


def _check_device(stage: Stage, learner: LearnerUse, num_params: int, nodes: Sequence[Node]) -> None:
    """Raise ResourceError if `device = "auto"` would be a CPU for a model that is too large for one."""
    num_gpus = sum(node.num_gpus for node in nodes)
    if not isinstance(stage.job, RlJob):
        if learner.training.runtime.device == "auto" and num_gpus == 0 and is_too_large_for_cpu(num_params):
            raise ResourceError(cpu_refusal(f"{learner.key}.runtime", num_params))
        return
    runtime, engine = stage.job.rl.runtime, stage.job.rl.rollout.engine
    # Too few GPUs are no concern of this check.
    gpus = plan_gpus(runtime, engine, num_gpus) if num_gpus else GpuPlan(learner=0, rollout=0)
    check_cpu_is_meant(runtime, engine, gpus, num_params, stage=stage.section)


def place_training(stage: Stage, learner: LearnerUse, size: ModelSize | None, nodes: Sequence[Node]) -> Placement:
    """Return where ranks and engines will run. Raise ResourceError, with the setting to change, if they cannot.

    `size` is that of the model, without which its attention heads are not checked.
    """
    num_gpus = sum(node.num_gpus for node in nodes)
    if not isinstance(stage.job, RlJob):
        own = learner.training.runtime
        runs_on_gpus = own.device == "cuda" or (own.device == "auto" and num_gpus > 0)
        # The last argument is the GPUs of a rank: a whole one, or none.
        return Placement(ranks=tuple(place_ranks(Room.of(nodes), own, float(runs_on_gpus))))
    runtime, engine = stage.job.rl.runtime, stage.job.rl.rollout.engine
    gpus = plan_gpus(runtime, engine, num_gpus)
    is_direct(runtime, engine, gpus)  # for the error that it raises
    if size is not None:
        check_tensor_parallel(engine, size.num_heads)
    return place_rl(runtime, engine, gpus, nodes)


def placement_lines(
    stages: Collection[Stage], size: ModelSize | None, nodes: Sequence[Node] | None = None
) -> Iterator[str]:
    """Yield where the processes of each training run, one line per node in use; nothing if they cannot be placed.

    `nodes` are those of the run; None: this machine, or the cluster at RAY_ADDRESS.
    """
    try:
        nodes = known_nodes() if nodes is None else nodes
    except ResourceError:
        return  # a problem of the run, which is shown as such
    for stage in stages:
        yield from stage_lines(stage, size, nodes)


def stage_lines(stage: Stage, size: ModelSize | None, nodes: Sequence[Node]) -> Iterator[str]:
    """Yield where the processes of a training run on these nodes; nothing for other stages."""
    learner = stage.learner()
    if learner is None:
        return
    try:
        if size is not None:
            _check_device(stage, learner, size.num_params, nodes)
        placement = place_training(stage, learner, size, nodes)
    except ResourceError:
        return  # a problem of the run, too
    for node in nodes:
        parts = [*_parts("learner rank", placement.ranks, node), *_parts("engine", placement.engines, node)]
        if parts:
            yield f"{stage.section} on {node.name}: {', '.join(parts)}{_idle(placement, node)}"
    if isinstance(stage.job, RlJob) and not placement.engines:
        yield f"{stage.section}: {stage.job.rl.runtime.num_rollout_actors} engines on CPUs of any node"


def _idle(placement: Placement, node: Node) -> str:
    used = {gpu for place in (*placement.ranks, *placement.engines) if place.node == node for gpu in place.gpus}
    unused = node.num_gpus - len(used)
    return f"; {unused} of {node.num_gpus} GPUs unused" if used and unused else ""


def _parts(role: str, places: Sequence[Place], node: Node) -> Iterator[str]:
    """Yield `learner ranks 0-3 on GPUs 0-3` for ranks with neighbouring numbers on this node."""
    here = [(index, place) for index, place in enumerate(places) if place.node == node]
    # Numbers that count up together with their position are a run without a gap.
    runs = [list(run) for _, run in groupby(enumerate(here), key=lambda pair: pair[1][0] - pair[0])]
    for run in runs:
        members = [member for _, member in run]
        indices = [index for index, _ in members]
        gpus = sorted({gpu for _, place in members for gpu in place.gpus})
        share = members[0][1].share
        of_each = f", {share:g} of each" if gpus and share < 1 else ""
        where = f"{_numbers('GPU', gpus)}{of_each}" if gpus else "CPUs"
        yield f"{_numbers(role, indices)} on {where}"


def _numbers(noun: str, numbers: Sequence[int]) -> str:
    """Return `GPU 0`, `GPUs 0-3` or `GPUs 0, 2`."""
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    is_run = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    shown = f"{numbers[0]}-{numbers[-1]}" if is_run else ", ".join(map(str, numbers))
    return f"{noun}s {shown}"


# ---- CPU ----
# Say what makes a run on this machine's CPU slow, or larger than its memory. It starts all the same.


def slow_products(work: PendingWork, *, has_gpus: bool, compiles_bfloat16: bool) -> Iterator[str]:
    """Yield a warning for what computes in bfloat16 on a CPU if the C compiler lacks its instructions for it."""
    if compiles_bfloat16:
        return
    settings: list[tuple[str, str, str]] = []
    for _, learner in work.trainings():
        settings.append((learner.key, learner.training.dtype, learner.training.runtime.device))
    for use in work.engines():
        if isinstance(use.engine, TorchEngineConfig):
            settings.append((f"{use.key}.engine", use.engine.dtype, use.engine.runtime.device))
    for key, dtype, device in settings:
        if dtype == "bfloat16" and _is_on_cpu(device, has_gpus=has_gpus):
            yield f"{key}.dtype = 'bfloat16' is slower than float32 here: {NO_BFLOAT16}"


def memory_warnings(work: PendingWork, *, has_gpus: bool, memory_gb: float) -> Iterator[str]:
    """Yield a warning for each training on this machine's CPU that holds more than its memory, at the least.

    Counted are learners at their peak and the weights of RL's engines, not caches and other processes.
    """
    for stage, learner in work.trainings():
        size = trained_size(work.config, stage)
        if size is None or not _is_on_cpu(learner.training.runtime.device, has_gpus=has_gpus):
            continue
        needed = learner.training.runtime.num_workers * learner_peak(size, learner_load(learner.training)).num_bytes
        if isinstance(stage.job, RlJob):
            rl = stage.job.rl
            value_bytes = 2 if rl.rollout.engine.dtype == "bfloat16" else 4
            needed += rl.runtime.num_rollout_actors * value_bytes * size.num_params
        if needed / 1e9 > memory_gb:
            yield (
                f"{stage.section}: learners and weights of engines take {needed / 1e9:.1f} GB, and this machine has "
                f"{memory_gb:.1f}; lower {learner.key}.runtime.tokens_per_microbatch, or set "
                f"{learner.key}.runtime.activation_checkpointing = true"
            )


def _is_on_cpu(device: str, *, has_gpus: bool) -> bool:
    return device == "cpu" or (device == "auto" and not has_gpus)
