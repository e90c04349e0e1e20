"""The trace of a real server, and NVTX asked of a machine without CUDA."""

import asyncio
import json

import aiohttp
import pytest
from aserve_process import ServerProcess, serving
from trace_rules import read_trace

pytestmark = pytest.mark.torch


async def asked_and_traced(server: ServerProcess, num: int, num_tokens: int) -> bytes:
    """The trace after ``num`` completions side by side."""
    async with server.client() as client:

        async def ask(client: aiohttp.ClientSession) -> None:
            body = {"prompt": "Hello", "max_tokens": num_tokens, "ignore_eos": True}
            async with client.post("/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()

        await asyncio.gather(*(ask(client) for _ in range(num)))
        async with client.get("/v1/trace?seconds=600") as answer:
            return await answer.read()


def test_what_a_server_did(tiny_model: list[str]) -> None:
    """Every step in each lane and every request to its end; the file says of what it is. NVTX without CUDA is a warning
    and nothing else."""
    with serving(*tiny_model, "--trace.nvtx", "true", "--model.device", "cpu") as server:
        file = asyncio.run(asked_and_traced(server, num=3, num_tokens=8))
        warnings = server.logged("trace.nvtx_ignored")
        num_steps = server.get("/v1/stats")["engine"]["num_steps"]

    [process] = read_trace(file)
    for lane in ("launch", "device"):
        assert [args["step"] for _, _, _, args in process.lanes[lane]] == list(range(1, num_steps + 1))
    assert [track.args["finish_reason"] for track in process.tracks] == ["length"] * 3
    assert [track.args["output_tokens"] for track in process.tracks] == [8] * 3
    about = json.loads(file)["otherData"]
    assert about["device"].startswith("cpu") and about["policy"] and about["version"]
    assert len(warnings) == 1
