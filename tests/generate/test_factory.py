import asyncio
import subprocess
import sys
from pathlib import Path

from decoder_folder import build_model, write_folder

from klear_core.config.evaluate import HttpEngineConfig, TorchEngineConfig
from klear_core.generate.factory import build_engine, build_trainable_engine


def test_each_kind_of_config_gives_its_engine(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, build_model())

    async def main() -> None:
        torch_engine = await build_engine(TorchEngineConfig(), folder, num_threads=1, seed=0)
        http_engine = await build_engine(
            HttpEngineConfig(base_url="http://localhost/v1", model="m"), folder, num_threads=1, seed=0
        )
        resumed = await build_trainable_engine(TorchEngineConfig(), folder, num_threads=1, seed=0, version=12)
        assert [type(e).__name__ for e in (torch_engine, http_engine)] == ["TorchEngine", "HttpEngine"]
        assert resumed.version == 12
        for engine in (torch_engine, http_engine, resumed):
            await engine.close()

    asyncio.run(main())


def test_importing_the_factory_and_the_light_engines_loads_nothing_heavy() -> None:
    program = """
import sys, klear_core.generate.factory, klear_core.generate.engine, klear_core.generate.http_engine, klear_core.generate.vllm_engine
print(sorted({m.split(".")[0] for m in sys.modules} & {"torch", "transformers", "vllm", "ray", "prefect", "mlflow", "pyarrow"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_torch_engine_needs_torch_and_nothing_heavier() -> None:
    program = """
import sys, klear_core.generate.decoder.torch_engine
print(sorted({m.split(".")[0] for m in sys.modules} & {"transformers", "vllm", "ray", "prefect", "mlflow", "pyarrow"}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
