"""CPU of a streamed token on the server's side: ``python tests/server/bench_server.py``. Not collected by pytest."""

import asyncio
import sys
import time
from pathlib import Path
from timeit import repeat

import uvloop

sys.path.insert(0, str(Path(__file__).parents[1]))

from fake_engine import FakeEngine
from server_builders import chat, http, serving

from aserve.engine.generation import Delta, Usage
from aserve.server.sse import ChatChunks, ChunkOptions


def frame_us(text: str) -> float:
    """One content frame of ``text``, without writing it."""
    encoder = ChatChunks(
        id="chatcmpl-" + "0" * 32,
        created=1,
        model="SmolLM2-135M-Instruct",
        num_choices=1,
        usage=Usage(),
        token_bytes=lambda token: b"",
        options=ChunkOptions(),
    )
    delta = Delta(index=0, text=text, tokens=(1,))
    encoder.encode(delta)
    number = 100_000
    return min(repeat(lambda: encoder.encode(delta), number=number, repeat=5)) / number * 1e6


async def stream_us(num_streams: int, num_tokens: int) -> float:
    """CPU of the whole process for a token from the engine's delta to the client's socket, its reading included."""
    async with serving(FakeEngine()) as served:
        served.engine.hold()
        connections = []
        for index in range(num_streams):
            reader, writer = await served.connect(limit=1 << 24)
            writer.write(http("POST", "/v1/chat/completions", chat(stream=True)))
            connections.append((reader, writer, await served.engine.call(index)))
        readers = [asyncio.create_task(reader.read()) for reader, _, _ in connections]
        begun = time.process_time()
        delta = Delta(index=0, text=" token", tokens=(1,))
        for _ in range(num_tokens):
            for _, _, call in connections:
                call.push(delta)
            for _ in range(3):
                await asyncio.sleep(0)
        seconds = time.process_time() - begun
        for _, _, call in connections:
            call.end()
        await asyncio.gather(*readers)
        for _, writer, _ in connections:
            writer.close()
    return seconds / num_streams / num_tokens * 1e6


def main() -> None:
    for text in (" token", " naïve", "\u2028"):
        sys.stdout.write(f"frame of {text!r}: {frame_us(text):.2f} us\n")
    for num_streams in (1, 64, 256):
        cost = uvloop.run(stream_us(num_streams, 20_000 // num_streams))
        sys.stdout.write(f"{num_streams} streams: {cost:.1f} us a token, client included\n")


if __name__ == "__main__":
    main()
