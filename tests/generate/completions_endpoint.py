"""A loopback endpoint that speaks vLLM's completions protocol, in front of any engine of ours."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

from klear_core.generate.engine import InferenceEngine, SamplingParams, logps_of

MODEL = "tiny"


@contextlib.asynccontextmanager
async def serve(engine: InferenceEngine, *, max_model_len: int) -> AsyncIterator[str]:
    """The base URL of a server that lives as long as the block. One request a connection, which is all that HTTP asks for."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
        body = await reader.readexactly(int(fields.get("content-length", 0)))
        reply = json.dumps(await _reply(engine, head.split()[1], body, max_model_len=max_model_len)).encode()
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


async def _reply(engine: InferenceEngine, path: str, body: bytes, *, max_model_len: int) -> dict[str, object]:
    if path == "/v1/models":
        return {"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": max_model_len}]}
    asked = json.loads(body)
    if "prompt_logprobs" in asked:
        return await _scored_reply(engine, asked)
    assert (path, asked["model"], asked["return_token_ids"], asked["logprobs"]) == ("/v1/completions", MODEL, True, 0)
    params = SamplingParams(
        num_samples=1,
        temperature=asked["temperature"],
        top_p=asked["top_p"],
        top_k=asked["top_k"],
        repetition_penalty=asked["repetition_penalty"],
        max_new_tokens=asked["max_tokens"],
        seed=asked["seed"],
    )
    (completion,) = await engine.generate(asked["prompt"], params)
    return {
        "object": "text_completion",
        "model": MODEL,
        "choices": [choice(completion.text, completion.token_ids, completion.logps, completion.finish_reason)],
    }


async def _scored_reply(engine: InferenceEngine, asked: dict[str, list[int]]) -> dict[str, object]:
    assert (asked["max_tokens"], asked["temperature"]) == (1, 1.0)
    first, *others = asked["prompt"]
    k = asked["prompt_logprobs"]
    found = await logps_of(engine, [first], others, num_top=k)
    told = []
    for i, (token, logp) in enumerate(zip(others, found.logps, strict=True)):
        top = zip(found.top_ids[i * k : i * k + k], found.top_logps[i * k : i * k + k], strict=True)
        # The token that is there comes first, as in vLLM, and once if it is among the likeliest.
        told.append({str(name): {"logprob": value} for name, value in ((token, logp), *top)})
    return {"object": "text_completion", "model": MODEL, "choices": [{"index": 0, "prompt_logprobs": [None, *told]}]}


def choice(text: str, token_ids: tuple[int, ...], logps: tuple[float, ...], finish_reason: str) -> dict[str, object]:
    """One entry of `choices`, with the fields of vLLM 0.32."""
    logprobs = {"text_offset": [], "token_logprobs": list(logps), "tokens": [], "top_logprobs": []}
    return {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish_reason,
        "stop_reason": None,
        "token_ids": list(token_ids),
    }
