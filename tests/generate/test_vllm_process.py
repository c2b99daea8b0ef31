"""What is around vLLM's processes, without vLLM: their output, their numbers, the size of their cache."""

import asyncio
import logging
import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
from decoder_folder import build_model, write_folder
from last_words import fail

from klear_core.config.evaluate import HardwareConfig, VllmEngineConfig, VllmRuntime
from klear_core.generate.engine import EngineStats, combined, engine_stats, limit_of
from klear_core.generate.model_size import engine_fit, size_of_hf
from klear_core.generate.vllm_engine import compare_cache
from klear_core.generate.vllm_process import Gauge, ProcessLog
from klear_core.hf_config import read_hf_config


def output_of(tmp_path: Path, words: str) -> str:
    log = ProcessLog(tmp_path)
    with log.of_children():
        process = multiprocessing.get_context("spawn").Process(target=fail, args=(words,))
        process.start()
    process.join()
    assert process.exitcode == 1
    return log.ending()


def test_the_last_words_of_a_dead_process_and_of_its_children_are_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    ending = output_of(tmp_path, "ncclSystemError: no route to host\n")
    assert ending == (
        "; its log ends with\n  printed by Python\n  written by C\n  said by a grandchild\n  ncclSystemError: no route to host"
    )
    assert capfd.readouterr() == ("", "")  # commands print answers there


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "gpu_memory_utilization"),
        ("ValueError: No available memory for the cache blocks.", "max_model_len"),
        ("ValueError: 4 GiB is needed, which is larger than the available KV cache memory (2 GiB)", "max_model_len"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", "klear doctor --gpu"),
        ("OSError: [Errno 24] Too many open files", "ulimit -n"),
    ],
)
def test_a_cause_that_is_known_comes_with_its_remedy(tmp_path: Path, words: str, remedy: str):
    told, _, last = output_of(tmp_path, words).partition("its log ends with")
    assert remedy in told
    assert words in last


@pytest.mark.parametrize(
    ("words", "may_pass"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", False),
        (
            "(EngineCore pid=7) ERROR 11-24 17:05:25 [core.py:9] ValueError: No available memory for the cache blocks.",
            False,
        ),
        ("ValueError: 4 GiB is needed, which is larger than the available KV cache memory (2 GiB)", False),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", False),
        ("node-1:7:9 [0] NCCL WARN Cuda failure 2 'out of memory'", False),
        ("ValueError: Free memory on device (9/80 GiB) on startup is less than desired GPU memory utilization", True),
        ("WARNING 11-24 17:05:25 [arg_utils.py:9] lower max_num_seqs if you run out of memory\nEOFError: gone", True),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040).", True),
    ],
)
def test_an_engine_too_large_for_its_gpu_is_not_started_again_as_it_was(tmp_path: Path, words: str, may_pass: bool):
    """Unless other processes hold the memory: they may end."""
    log = ProcessLog(tmp_path)
    log.path.write_text(words)
    error = log.error("vLLM did not start")
    assert error.is_permanent is not may_pass
    assert str(error).startswith("vLLM did not start; ")
    assert words.splitlines()[-1] in str(error)


def test_of_a_long_log_the_last_lines_are_told(tmp_path: Path):
    log = ProcessLog(tmp_path)
    assert log.ending() == ""
    log.path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert log.ending().splitlines()[1:] == [f"  line {i}" for i in range(99_960, 100_000)]


def test_the_cause_is_told_though_long_traces_of_other_processes_follow_it(tmp_path: Path):
    log = ProcessLog(tmp_path)
    cause = "(VllmWorker-0 pid=7) ERROR 11-24 17:05:25 [multiproc_executor.py:9] SafetensorError: incomplete metadata"
    trace = [f"(EngineCore pid=6)   File {i}" for i in range(60)]
    log.path.write_text("\n".join([cause, *trace, "(EngineCore pid=6) Exception: WorkerProc failed"]))
    told = log.ending().splitlines()
    assert told[1] == "  SafetensorError: incomplete metadata"
    assert told[-1].endswith("Exception: WorkerProc failed")
    assert len(told) == 1 + 1 + 40


def step(usage: float, waiting: int, *, drafted: int = 0, accepted: int = 0) -> SimpleNamespace:
    guessed = SimpleNamespace(num_draft_tokens=drafted, num_accepted_tokens=accepted) if drafted else None
    return SimpleNamespace(kv_cache_usage=usage, num_waiting_reqs=waiting, spec_decoding_stats=guessed)


def test_the_gauge_keeps_the_fullest_moment_and_counts_until_it_is_asked():
    gauge = Gauge()
    gauge.record(step(0.5, 3, drafted=8, accepted=6), SimpleNamespace(num_preempted_reqs=1))
    gauge.record(step(0.9, 0, drafted=8, accepted=2), SimpleNamespace(num_preempted_reqs=2))
    gauge.record(step(0.2, 1), None)
    gauge.record(None, None)
    load = gauge.take()
    assert load == EngineStats(cache_usage=0.9, num_waiting=3, num_preempted=3, num_drafted=16, num_accepted=8)
    assert load.metrics("rl") == {
        "rl/engine/cache_usage": 0.9,
        "rl/engine/waiting": 3,
        "rl/engine/preempted": 3,
        "rl/engine/accepted_frac": 0.5,
    }
    assert gauge.take() == EngineStats()


def test_of_several_engines_the_fullest_counts_and_those_that_tell_nothing_do_not():
    assert combined([None, None]) is None
    both = combined([EngineStats(cache_usage=0.3, num_preempted=2), None, EngineStats(cache_usage=0.7, num_waiting=5)])
    assert both == EngineStats(cache_usage=0.7, num_waiting=5, num_preempted=2)
    assert asyncio.run(engine_stats(object())) is None


class Cached:
    """An engine of which only the size of its cache is known."""

    def __init__(self, cache_tokens: int | None) -> None:
        self.cache_tokens = cache_tokens

    async def stats(self) -> None:
        return None


def test_an_engine_gets_no_more_answers_than_its_cache_holds_at_their_mean_length():
    # 0.9 of 825,000 tokens, in answers of 0.27 times 32,768 on average.
    assert limit_of(Cached(825_000), 320, 32_768) == 83
    assert limit_of(Cached(10_000_000), 320, 32_768) == 320
    assert limit_of(Cached(100), 320, 32_768) == 1
    assert limit_of(Cached(825_000), 320, None) == 320
    assert limit_of(Cached(None), 320, 32_768) == 320
    assert limit_of(object(), 320, 32_768) == 320


def test_a_cache_much_smaller_than_planned_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder, cfg = write_folder(tmp_path, build_model()), VllmEngineConfig(runtime=VllmRuntime(kv_cache_mb=100))
    hardware = HardwareConfig(gpu_memory_gb=80)
    planned = engine_fit(size_of_hf(read_hf_config(folder)), cfg, hardware, longest=256).cache_tokens
    with caplog.at_level(logging.INFO):
        compare_cache(cfg, folder, tokens=planned, memory_gb=80, longest=256)
        compare_cache(cfg, folder, tokens=planned // 2, memory_gb=80, longest=256)
    fine, small = caplog.records
    assert (fine.levelno, small.levelno) == (logging.INFO, logging.WARNING)
    assert f"holds {planned // 2:,} tokens" in small.getMessage()
    assert f"planned were {planned:,}: something else holds memory" in small.getMessage()
