"""Estimate what a run will cost: tokens, memory and GPU-hours by stage, from the settings alone. Upper bounds."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import assert_never

from klear_core.config.curate import TagConfig
from klear_core.config.distill import DistillConfig, HttpTeacherConfig, LocalTeacherConfig
from klear_core.config.evaluate import HardwareConfig, HttpEngineConfig, VllmEngineConfig
from klear_core.config.losses import M2poConfig
from klear_core.config.opd import OpdRolloutsConfig, OpdTeacherConfig
from klear_core.config.opd_jobs import OpdJob, OpdRolloutsJob, OpdScoresJob
from klear_core.config.pipeline import PipelineConfig
from klear_core.config.rl import RlConfig
from klear_core.config.stage import BaseJob, DistillJob, EngineUse, EvaluateJob, RlJob, SftJob, Stage, TagJob
from klear_core.config.train import ModelConfig, SftConfig, TrainRuntime
from klear_core.generate.model_size import VALUE_BYTES, ModelSize, engine_fit, planned_size
from klear_core.pipeline.costs.counts import (
    benchmark_rows,
    num_opd_answers,
    num_problems_of,
    num_traces,
    sft_rows,
    sft_steps,
)
from klear_core.pipeline.costs.memory import LearnerPeak, learner_load, learner_peak, reference_bytes, state_bytes
from klear_core.pipeline.graph import stages_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """Upper bounds for one stage; None: not known beforehand."""

    stage: str
    max_tokens: int | None
    """Tokens generated, or trained on (sft)."""
    memory_gb: float | None
    """Highest allocation of a process or GPU, in gigabytes of 1e9 bytes, without a margin."""
    peak: LearnerPeak | None = None
    """The same of a learner, by its parts."""
    gpu_hours: float | None = None
    """None as well for stages that use no GPU."""
    note: str


def estimate(config: PipelineConfig, chosen: Collection[str] | None = None) -> list[StageEstimate]:
    """Return an estimate for every chosen stage (None: all) that generates or trains, and one for all evaluations."""
    size = planned_size(config.start_model)
    stages = [stage for stage in stages_of(config) if chosen is None or stage.name in chosen]
    rows = []
    for stage in stages:
        found = (estimate_stage(config, stage, size), estimate_inline_eval(config, stage, size))
        rows += [row for row in found if row is not None]
    scoring = [stage for stage in stages if stage.job.scores_model]
    if scoring:
        rows.append(_evaluate(config, size, scoring))
    return rows


def estimate_stage(config: PipelineConfig, stage: Stage, size: ModelSize | None) -> StageEstimate | None:
    """Return the estimate of a stage; None if it neither generates nor trains, or evaluates (see `estimate`)."""
    match stage.job:
        case TagJob(tag=tag):
            return _tag(stage, tag, config)
        case DistillJob():
            return _distill(stage, config)
        case SftJob(sft=sft):
            return _sft(stage, config, sft, trained_size(config, stage))
        case OpdRolloutsJob(rollouts=rollouts):
            answers = num_opd_answers(stage, config)
            note = f"{answers or 'unknown number of'} answers of the student"
            return _answers_here(stage, config, answers, most_tokens=rollouts.sampling.max_new_tokens, note=note)
        case OpdScoresJob():
            return _opd_scores(stage, stage.job, config)
        case OpdJob():
            return _opd(stage, stage.job, config, size)
        case RlJob(rl=rl):
            return _rl(config, stage, rl, size)
        case _:
            return None


def estimate_inline_eval(config: PipelineConfig, stage: Stage, size: ModelSize | None) -> StageEstimate | None:
    """Return the estimate of the scores that a stage takes while it trains; None if it takes none."""
    if not isinstance(stage.job, SftJob | RlJob) or stage.job.runtime.curve is None:
        return None
    job = stage.job.runtime.curve
    name, num_models = f"{stage.name} curve", num_inline_evals(config, stage)
    own = stage.job.scorer()
    if num_models is None:
        return StageEstimate(stage=name, max_tokens=None, memory_gb=None, note="unknown number of models")
    # A benchmark with fewer problems than the curve asks for gives all that it has.
    num_problems = min(job.curve.num_problems, benchmark_rows(job.source) or job.curve.num_problems)
    answers = num_problems * job.curve.num_samples
    tokens = num_models * answers * job.sampling.max_new_tokens
    use = own or stage.engine()
    assert use is not None, stage.name
    hours = None if size is None else sampling_hours(config.hardware, size, use, tokens)
    by_whom = "an engine beside the learner" if own else "the engines that sample"
    memory = None if own is None or size is None else _weights_gb(size, own)
    return StageEstimate(
        stage=name,
        max_tokens=tokens,
        memory_gb=memory,
        gpu_hours=hours,
        note=f"{num_models} models, {answers} answers each by {by_whom}",
    )


def num_inline_evals(config: PipelineConfig, stage: Stage) -> int | None:
    """Return the number of models that a training with a curve scores; None if its steps are not known."""
    training = stage.job.training()
    assert training is not None, stage.name
    curve = training.runtime.curve
    num_steps = training.num_steps if isinstance(training, RlConfig) else sft_steps(config)
    return None if curve is None or num_steps is None else curve.num_points(num_steps)


def _tag(stage: Stage, tag: TagConfig, config: PipelineConfig) -> StageEstimate:
    problems = num_problems_of(stage, config)
    answers = None if problems is None else problems * tag.samples_per_problem
    note = f"{answers or 'unknown number of'} answers of the tagger"
    return _answers_here(stage, config, answers, most_tokens=tag.sampling.max_new_tokens, note=note)


def _answers_here(
    stage: Stage, config: PipelineConfig, answers: int | None, *, most_tokens: int, note: str
) -> StageEstimate:
    """Return the estimate of a stage that samples answers with the engines of this pipeline."""
    tokens = None if answers is None else answers * most_tokens
    size = planned_size(_sampled_model(stage.engine(), config))
    hours = gpu_hours(config, stage, size, max_tokens=tokens)
    return StageEstimate(stage=stage.name, max_tokens=tokens, memory_gb=None, gpu_hours=hours, note=note)


def _sampled_model(use: EngineUse | None, config: PipelineConfig) -> ModelConfig:
    return config.start_model if use is None or use.model is None else use.model


def _distill(stage: Stage, config: PipelineConfig) -> StageEstimate:
    traces = num_traces(config)
    teacher = config.distill.teacher
    if isinstance(teacher, LocalTeacherConfig):
        note = f"{traces or 'unknown number of'} traces by a model here"
        return _answers_here(stage, config, traces, most_tokens=teacher.sampling.max_new_tokens, note=note)
    if not isinstance(teacher, HttpTeacherConfig):
        note = f"{traces or 'unknown number of'} traces by the {teacher.kind} teacher"
        return StageEstimate(stage=stage.name, max_tokens=None, memory_gb=None, note=note)
    tokens = None if traces is None else traces * teacher.max_tokens
    note = f"{teacher.model}: {traces or 'unknown number of'} traces"
    prices = [endpoint.output_price for endpoint in teacher.runtime.endpoints]
    if tokens is not None and any(prices):
        # At the highest price, because the requests of a fleet may all go to one endpoint.
        note += f", at most {tokens * max(prices) / 1e6:,.0f} for output tokens at {max(prices):g} a million"
    return StageEstimate(stage=stage.name, max_tokens=tokens, memory_gb=None, note=note)


def trained_model(config: PipelineConfig, stage: Stage) -> ModelConfig:
    """Return the model that a stage trains: the pipeline's, or that of a teacher which is trained here."""
    base = next((one.job for one in stages_of(config) if one.name == stage.inputs.get("model")), None)
    return base.model if isinstance(base, BaseJob) else config.start_model


def trained_size(config: PipelineConfig, stage: Stage) -> ModelSize | None:
    """Return the size of the model that a stage trains; None if it is not known."""
    return planned_size(trained_model(config, stage))


def _opd_scores(stage: Stage, job: OpdScoresJob, config: PipelineConfig) -> StageEstimate:
    """A forward pass over prompts and answers, at the share of the peak that training's products reach."""
    assert config.opd is not None
    answers = num_opd_answers(next(one for one in stages_of(config) if one.name == stage.inputs["rollouts"]), config)
    longest = config.opd.rollouts.max_prompt_tokens + job.sampling.max_new_tokens
    tokens = None if answers is None else answers * longest
    use, hours = stage.engine(), None
    if tokens is not None and use is not None and isinstance(use.engine, VllmEngineConfig):
        size = planned_size(_sampled_model(use, config))
        if size is not None:
            reached = config.hardware.peak_tflops * 1e12 * _PRODUCTS_REACH
            hours = _flops(size, tokens, longest, operations=_FORWARD_FLOPS) / reached / 3600
    limit = "at most " if job.domain and answers else ""
    by_whom = "the teacher" if use else "the teacher, which is served"
    note = f"{limit}{answers or 'unknown number of'} answers scored by {by_whom}"
    return StageEstimate(stage=stage.name, max_tokens=tokens, memory_gb=None, gpu_hours=hours, note=note)


def _opd(stage: Stage, job: OpdJob, config: PipelineConfig, size: ModelSize | None) -> StageEstimate:
    train, training = job.train, job.train.as_rl(job.rollouts)
    longest = job.rollouts.max_prompt_tokens + job.rollouts.sampling.max_new_tokens
    tokens, hours = train.num_steps * train.rows_per_step * longest, None
    if size is not None and train.dtype == "bfloat16":
        flops = training_flops(training, size, tokens, longest)
        hours = flops / learning_speed(config.hardware, size, training, longest) / 3600
    note = f"{train.num_steps} steps of {train.rows_per_step} answers"
    found = _training(config, stage, training, size, tokens=tokens, note=note)
    return replace(found, gpu_hours=hours)


def _sft(stage: Stage, config: PipelineConfig, sft: SftConfig, size: ModelSize | None) -> StageEstimate:
    all_rows = sft_rows(config, sft)
    rows = [all_rows] if all_rows else []
    if sft.max_steps:
        rows.append(sft.max_steps * sft.rows_per_step)
    tokens = min(rows) * sft.max_tokens if rows else None
    return _training(config, stage, sft, size, tokens=tokens, note=f"rows of up to {sft.max_tokens} tokens")


def _rl(config: PipelineConfig, stage: Stage, cfg: RlConfig, size: ModelSize | None) -> StageEstimate:
    prompts_a_round = round(cfg.rollout.groups_per_step * cfg.rollout.oversample)
    rollouts = cfg.num_steps * cfg.rollout.max_rounds * prompts_a_round * cfg.rollout.samples_per_group
    tokens = rollouts * cfg.rollout.sampling.max_new_tokens
    note = f"at most {rollouts} rollouts in {cfg.num_steps} steps"
    if cfg.distill is not None and config.rl_teacher is not None:
        scored = cfg.num_steps * cfg.rollout.groups_per_step * cfg.rollout.samples_per_group
        where = "which is served" if config.rl_teacher.runtime.endpoints else "on the driver's CPU"
        note += f"; at most {scored} scored by the teacher, {where}"
    return _training(config, stage, cfg, size, tokens=tokens, note=note)


def _training(
    config: PipelineConfig,
    stage: Stage,
    training: SftConfig | RlConfig,
    size: ModelSize | None,
    *,
    tokens: int | None,
    note: str,
) -> StageEstimate:
    peak = None if size is None else learner_peak(size, learner_load(training))
    return StageEstimate(
        stage=stage.name,
        max_tokens=tokens,
        memory_gb=None if peak is None else peak.num_bytes / 1e9,
        peak=peak,
        gpu_hours=gpu_hours(config, stage, size, max_tokens=tokens),
        note=note + _on_host(size, training),
    )


def _on_host(size: ModelSize | None, training: SftConfig | RlConfig) -> str:
    """Return in words what the ranks of an offloaded training hold in host memory together; else nothing."""
    if size is None or not training.runtime.cpu_offload:
        return ""
    load = learner_load(training)
    total_gb = load.num_ranks * (state_bytes(size, load) + reference_bytes(size, load)) / 1e9
    return f"; {total_gb:.0f} GB of host memory over all ranks"


def _evaluate(config: PipelineConfig, size: ModelSize | None, stages: Collection[Stage]) -> StageEstimate:
    """Return the estimate of all evaluations together: only their models differ."""
    counts = [benchmark_rows(b) for b in config.benchmarks]
    use = next(iter(stages)).engine()
    memory = None if size is None or use is None else _weights_gb(size, use)
    unknown = [b.name for b, count in zip(config.benchmarks, counts, strict=True) if count is None]
    if unknown:
        note = f"unknown number of problems in {', '.join(unknown)}"
        return StageEstimate(stage="evaluate", max_tokens=None, memory_gb=memory, note=note)
    answers = 0
    num_wordings = 1 + len(config.evaluate.templates)
    for num_problems, benchmark in zip(counts, config.benchmarks, strict=True):
        answers += (num_problems or 0) * (benchmark.num_samples * num_wordings + config.evaluate.greedy)
    tokens = len(stages) * answers * config.evaluate.sampling.max_new_tokens
    first = next(iter(stages))
    return StageEstimate(
        stage="evaluate",
        max_tokens=tokens,
        memory_gb=memory,
        gpu_hours=gpu_hours(config, first, size, max_tokens=tokens),
        note=f"{len(stages)} models, {answers} answers each; weights only",
    )


def _weights_gb(size: ModelSize, use: EngineUse) -> float:
    assert not isinstance(use.engine, HttpEngineConfig), "evaluation has engines of its own"
    return size.num_params * VALUE_BYTES[use.engine.dtype] / 1e9


# ---- cost ----
# Estimate the GPU-hours of a stage: arithmetic of training at an assumed MFU, and decoding at an assumed bandwidth.


_TRAINING_FLOPS = 6
"""Operations per weight and token: multiply and add, once forward and twice backward. Recomputation is not counted, as
is usual for MFU."""
_FORWARD_FLOPS = 2
"""The same of a forward pass alone."""
_ASSUMED_GPU_GB = 80.0
"""Memory of a GPU, for the size of the KV cache, where `hardware.gpu_memory_gb` is not set."""


def gpu_hours(config: PipelineConfig, stage: Stage, size: ModelSize | None, *, max_tokens: int | None) -> float | None:
    """Return the GPU-hours in which a stage trains on or samples `max_tokens`; None if they are not known.

    Stages whose engine is not vLLM, and training that may run on a CPU, have none.
    """
    if size is None or max_tokens is None:
        return None
    hardware, training, use = config.hardware, stage.job.training(), stage.engine()
    sampling = 0.0
    if use is not None:
        hours = sampling_hours(hardware, size, use, max_tokens)
        if hours is None:
            return None
        sampling = hours
    match training:
        case None:
            return sampling if use is not None else None
        case SftConfig():
            if training.dtype != "bfloat16":
                return None
            flops = _flops(size, max_tokens, training.max_tokens, operations=_TRAINING_FLOPS)
            return flops / learning_speed(hardware, size, training, training.max_tokens) / 3600
        case RlConfig():
            longest = training.rollout.sampling.max_new_tokens
            learning = _rl_flops(training, size) / learning_speed(hardware, size, training, longest) / 3600
            return _rl_gpu_hours(training, use, learning=learning, sampling=sampling)
        case _:
            assert_never(training)


def _rl_gpu_hours(rl: RlConfig, use: EngineUse | None, *, learning: float, sampling: float) -> float:
    """Return the hours of all GPUs of the stage: those of the learner wait while engines sample, and vice versa."""
    assert use is not None
    assert isinstance(use.engine, VllmEngineConfig)
    learners = rl.runtime.num_workers
    engines = rl.runtime.num_rollout_actors * use.engine.runtime.tensor_parallel
    if rl.runtime.learner_gpus is not None and rl.runtime.learner_gpus < 1:
        return learning + sampling  # they share the GPUs, and take turns
    # The two sides run one after the other in this bound, and all GPUs are held for both.
    return (learning / learners + sampling / engines) * (learners + engines)


def gpus_held(stage: Stage) -> float | None:
    """Return the GPUs that a stage holds while it runs, if it runs on GPUs; None if the settings leave it open."""
    training, use = stage.job.training(), stage.engine()
    engine_ranks = use.engine.runtime.tensor_parallel if use and isinstance(use.engine, VllmEngineConfig) else 1
    if isinstance(training, RlConfig):
        runtime = training.runtime
        per_learner = 1.0 if runtime.learner_gpus is None else runtime.learner_gpus
        per_engine = engine_ranks if runtime.rollout_gpus is None else runtime.rollout_gpus
        return runtime.num_workers * per_learner + runtime.num_rollout_actors * per_engine
    match stage.job:
        case SftJob(sft=sft):
            return sft.runtime.num_workers
        case OpdJob(train=train):
            return train.runtime.num_workers
        case OpdRolloutsJob(rollouts=OpdRolloutsConfig(runtime=engines)):
            num_engines = engines.num_engines
        case OpdScoresJob(runtime=OpdTeacherConfig(runtime=engines)):
            num_engines = engines.num_engines
        case TagJob(tag=TagConfig(runtime=engines)):
            num_engines = engines.num_engines
        case DistillJob(distill=DistillConfig(teacher=LocalTeacherConfig(runtime=engines))):
            num_engines = engines.num_engines
        case EvaluateJob(evaluate=evaluate):
            num_engines = evaluate.runtime.num_engines
        case _:
            return 0
    return None if num_engines == "auto" else num_engines * engine_ranks


def _rl_flops(rl: RlConfig, size: ModelSize) -> float:
    """Return the operations of all updates, if every row is of full length; surplus rollouts are not trained on."""
    rollout = rl.rollout
    longest = rollout.max_prompt_tokens + rollout.sampling.max_new_tokens
    num_tokens = rl.num_steps * rollout.groups_per_step * rollout.samples_per_group * longest
    return training_flops(rl, size, num_tokens, longest)


def training_flops(rl: RlConfig, size: ModelSize, num_tokens: int, row_tokens: int) -> float:
    """Return the operations of updates over so many tokens in rows of `row_tokens`, with the forward passes before
    them: of the old policy, of the initial model, and of M2PO's cutoff."""
    needs_old = rl.old_logps == "learner" or rl.erc is not None
    num_forward = needs_old + (rl.kl_coef > 0) + isinstance(rl.loss, M2poConfig)
    operations = _TRAINING_FLOPS + num_forward * _FORWARD_FLOPS
    return _flops(size, num_tokens, row_tokens, operations=operations)


def sampling_hours(hardware: HardwareConfig, size: ModelSize, use: EngineUse, max_tokens: int) -> float | None:
    """Return the GPU-hours in which an engine samples so many tokens; None if it is not vLLM."""
    if not isinstance(use.engine, VllmEngineConfig):
        return None
    known = hardware
    if hardware.gpu_memory_gb is None:
        known = hardware.model_copy(update={"gpu_memory_gb": _ASSUMED_GPU_GB})
    fit = engine_fit(size, use.engine, known, longest=longest_sequence(use))
    if not fit.tokens_per_s:
        return None
    return max_tokens / fit.tokens_per_s * use.engine.runtime.tensor_parallel / 3600


def longest_sequence(use: EngineUse) -> int:
    """Return the most tokens of a row: the window that an engine is given, else those of an answer alone."""
    limit = use.engine.max_model_len if isinstance(use.engine, VllmEngineConfig) else None
    return limit or use.sampling.max_new_tokens


def _flops(size: ModelSize, num_tokens: int, row_tokens: int, *, operations: int) -> float:
    """Return the operations of matrix products and attention over rows of `row_tokens`, as `train.flops` counts."""
    weights = size.num_layers * size.active_layer_params + size.vocab_size * size.hidden_size
    # Attention is causal, so a token attends to half of its row; it has two products, scores and weighted values.
    attention = 2 * size.num_layers * size.query_size * row_tokens / 2
    # The embedding is a look-up, so of embedding and head only the head counts, also where they are not tied.
    return operations * num_tokens * (weights + attention)


_PRODUCTS_REACH = 0.51
"""Share of the peak that a training step's matrix products reach, with all that is between them."""
_ATTENTION_REACHES = {"torch": 0.31, "FA3": 0.54, "FA4": 0.54}
"""The same of attention, by kernel. Both computed from published speeds on an H100; `klear bench gpu` measures them."""


def assumed_mfu(hardware: HardwareConfig, size: ModelSize, runtime: TrainRuntime, row_tokens: int) -> float:
    """Return the share of the peak that training rows of this length reaches, recomputation not counted.

    The configured one, or the useful operations over the time that products and attention take at their own shares.
    """
    if hardware.mfu is not None:
        return hardware.mfu
    layers, head = size.num_layers * size.layer_params, size.vocab_size * size.hidden_size
    # Of a token, in units of the products forward: backward is twice that, and attention computes its scores again.
    attention = size.num_layers * size.query_size * row_tokens
    again = 1 - runtime.keep_layers / size.num_layers if runtime.activation_checkpointing else 0.0
    products_s = ((6 + 2 * again) * layers + 6 * head) / _PRODUCTS_REACH
    attention_s = (7 + 2 * again) * attention / _ATTENTION_REACHES[runtime.attention]
    return (6 * (layers + head) + 6 * attention) / (products_s + attention_s)


def learning_speed(hardware: HardwareConfig, size: ModelSize, training: SftConfig | RlConfig, row_tokens: int) -> float:
    """Return the useful operations per second of a GPU that trains rows of this length."""
    return hardware.peak_tflops * 1e12 * assumed_mfu(hardware, size, training.runtime, row_tokens)
