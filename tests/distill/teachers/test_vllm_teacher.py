"""The HTTP teacher against vLLM's own OpenAI server, on CPU, with a tiny random model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from distill_fakes import collect, make_problem

sys.path += [str(Path(__file__).parents[2] / folder) for folder in ("generate", "flows")]
from loopback import free_port
from vllm_marks import HAS_VLLM, VLLM_MARKS

from klear_core.artifacts.manifest import StageSummary
from klear_core.artifacts.records import read_shards
from klear_core.config.distill import DistillConfig, DistillRuntime
from klear_core.config.settings import RareYieldLimits, YieldLimits
from klear_core.config.train import TinyModelConfig
from klear_core.distill.shards import UnusedReply
from klear_core.metrics import NullTelemetry
from klear_core.train.base_model import model_folder, prepare_base
from klear_core.types import Dropped, TeacherTrace

pytestmark = list(VLLM_MARKS)

MODEL = TinyModelConfig(
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    intermediate_size=96,
    max_position_embeddings=1024,
)
"""Its choices are nearly even, so that `</think>` and the end of a reply come by chance, once in 270 tokens each."""
OPTIONS = ("--enforce-eager", "--dtype=float32", "--kv-cache-memory-bytes=64M", "--max-num-seqs=32")
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
START_S = 600.0
PROBLEMS = [make_problem(i) for i in range(6)]


@pytest.fixture(scope="module")
def base_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve the model with a reasoning parser, as R1 is served."""
    assert HAS_VLLM
    folder = tmp_path_factory.mktemp("served")
    prepare_base(MODEL, seed=0, workdir=folder, telemetry=NullTelemetry())
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model_folder(folder)}"]
    command += [f"--port={port}", "--host=127.0.0.1", "--served-model-name=tiny", "--reasoning-parser=deepseek_r1"]
    log = folder / "log"
    with log.open("wb") as out:
        server = subprocess.Popen(
            [*command, *OPTIONS], stdout=out, stderr=out, env=os.environ | ENVIRONMENT, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/health", server, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            if httpx.get(url, timeout=5).is_success:
                return
        except httpx.HTTPError:
            time.sleep(0.5)
    pytest.fail(log.read_text()[-4000:])


def distill(base_url: str, workdir: Path) -> StageSummary:
    teacher = {"kind": "http", "base_url": base_url, "model": "tiny", "max_tokens": 600, "math_instruction": ""}
    anything = DistillRuntime(complete=YieldLimits(stop_below=0), selected=RareYieldLimits(stop_below=0))
    settings = {"teacher": teacher | {"temperature": 1.0, "top_p": 1.0}, "samples_per_problem": 4}
    cfg = DistillConfig.model_validate(settings | {"runtime": anything})
    return collect(cfg, PROBLEMS, workdir)


def test_vllms_server_streams_reasoning_and_answer_with_token_counts_and_seeds(base_url: str, tmp_path: Path) -> None:
    summary = distill(base_url, tmp_path / "a")
    traces = list(read_shards(tmp_path / "a" / "traces", TeacherTrace))
    dropped = list(read_shards(tmp_path / "a" / "dropped", Dropped))
    unused = list(read_shards(tmp_path / "a" / "unused", UnusedReply))
    assert len(traces) + len(dropped) == 24
    assert {drop.step for drop in dropped} == {"complete"}  # no request failed
    assert len({trace.reasoning for trace in traces}) == len(traces) > 1
    for trace in traces:
        assert trace.finish_reason == "stop"
        assert trace.reasoning
        assert trace.answer
        assert "</think>" not in trace.answer
    truncated = [reply for reply in unused if reply.reason == "truncated"]
    assert {(reply.num_tokens, reply.finish_reason) for reply in truncated} == {(600, "length")}
    assert not [note for note in summary.notes if "without token counts" in note]
    replies = (*traces, *unused)
    assert summary.counts["paid_tokens"] > sum(reply.num_tokens for reply in replies) > 24 * 50

    distill(base_url, tmp_path / "b")
    again = {(t.problem_id, t.sample_idx): t.reasoning for t in read_shards(tmp_path / "b" / "traces", TeacherTrace)}
    same = [trace for trace in traces if again.get((trace.problem_id, trace.sample_idx)) == trace.reasoning]
    # a batch of another size rounds otherwise, which changes a reply now and then; without its seed each would change
    assert len(same) > len(traces) / 2
