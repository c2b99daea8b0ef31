"""Samples greedily from each model folder with vLLM, one after another in this process: `vllm_folders.py FOLDER...`.

A process of its own for each model would take most of the time. Prints a JSON object of tokens and log-probs by folder.
"""

import json
import os
import sys
from pathlib import Path

os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR")

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

from klear_core.config.evaluate import VllmEngineConfig, VllmRuntime
from klear_core.generate.vllm_engine import engine_arguments

PROMPT = [65 + (i * i) % 97 for i in range(24)]
ENGINE = VllmEngineConfig(dtype="float32", runtime=VllmRuntime(enforce_eager=True, kv_cache_mb=16, max_num_seqs=4))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True)


def sample(folder: str) -> dict[str, list[float]]:
    llm = LLM(**engine_arguments(ENGINE, Path(folder), seed=1))
    (request,) = llm.generate({"prompt_token_ids": PROMPT}, GREEDY, use_tqdm=False)
    answer = request.outputs[0]
    logps = [table[token].logprob for token, table in zip(answer.token_ids, answer.logprobs, strict=True)]
    return {"token_ids": list(answer.token_ids), "logps": logps}


if __name__ == "__main__":
    found = {}
    for each in sys.argv[1:]:
        found[each] = sample(each)
        cleanup_dist_env_and_memory()
    print(json.dumps(found))
