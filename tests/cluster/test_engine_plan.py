from __future__ import annotations

import pytest

from klear_core.cluster.nodes import EnginePlan, check_engines_have_gpus, plan_engines
from klear_core.config.evaluate import (
    EvaluateRuntime,
    TorchEngineConfig,
    TorchEngineRuntime,
    VllmEngineConfig,
    VllmRuntime,
)
from klear_core.errors import ResourceError

TORCH = TorchEngineConfig()
VLLM_2 = VllmEngineConfig(runtime=VllmRuntime(tensor_parallel=2))


def test_auto_uses_every_gpu_that_makes_a_whole_engine() -> None:
    assert plan_engines("auto", TORCH, [8], key="evaluate") == EnginePlan(num_engines=8, gpus_per_engine=1)
    assert plan_engines("auto", VLLM_2, [32], key="evaluate") == EnginePlan(num_engines=16, gpus_per_engine=2)
    assert plan_engines("auto", VLLM_2, [7], key="evaluate") == EnginePlan(num_engines=3, gpus_per_engine=2)


def test_the_gpus_of_an_engine_are_on_one_node() -> None:
    assert plan_engines("auto", VLLM_2, [3, 0, 3], key="evaluate") == EnginePlan(num_engines=2, gpus_per_engine=2)
    with pytest.raises(
        ResourceError,
        match=r"need 6 GPUs, and there are 6 \(3, 3 on the nodes; those of an engine must be on one\)\. Lo",
    ):
        plan_engines(3, VLLM_2, [3, 3], key="evaluate")
    with pytest.raises(
        ResourceError, match=r"1 engines with 2 GPUs each need 2 GPUs, and there are 2 \(1, 1 on the no"
    ):
        plan_engines("auto", VLLM_2, [1, 1], key="evaluate")


def test_on_a_cpu_auto_is_one_engine_and_a_number_is_that_number() -> None:
    on_cpu = TorchEngineConfig(runtime=TorchEngineRuntime(device="cpu"))
    assert plan_engines("auto", TORCH, [0], key="tag") == EnginePlan(num_engines=1, gpus_per_engine=0)
    assert plan_engines("auto", on_cpu, [8], key="tag") == EnginePlan(num_engines=1, gpus_per_engine=0)
    assert plan_engines(3, TORCH, [0], key="tag") == EnginePlan(num_engines=3, gpus_per_engine=0)


def test_more_engines_than_gpus_are_refused_with_the_numbers() -> None:
    with pytest.raises(ResourceError, match=r"evaluate.runtime.num_engines = 5: 5 engines with 2 GPUs each need 10 GP"):
        plan_engines(5, VLLM_2, [8], key="evaluate")
    with pytest.raises(ResourceError, match=r"need 2 GPUs, and there are 1\. Lower .*evaluate.engine.runtime.tensor_p"):
        plan_engines("auto", VLLM_2, [1], key="evaluate")


def test_a_large_model_never_falls_back_to_a_cpu_silently() -> None:
    plan = plan_engines("auto", TORCH, [0], key="evaluate")
    check_engines_have_gpus(plan, TORCH, 200_000_000, key="evaluate")
    with pytest.raises(ResourceError, match=r"evaluate\.engine\.runtime\.device = 'auto'"):
        check_engines_have_gpus(plan, TORCH, 8_000_000_000, key="evaluate")


@pytest.mark.parametrize("num_engines", [0, -1, "all", 1.5])
def test_other_numbers_of_engines_are_refused(num_engines: object) -> None:
    with pytest.raises(ValueError, match="num_engines"):
        EvaluateRuntime.model_validate({"num_engines": num_engines})
