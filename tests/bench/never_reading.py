"""Half as many clients again as there are slots, none of which reads: what a newcomer's first token takes beside them.

    python tests/bench/never_reading.py [--slots 64] [--newcomers 50]

Starts ``scripted_server.py`` with the default options of engine and server. Prints one JSON object: the time to the
first token alone, while the crowd fills the slots, and once all of it is parked; and what the crowd still holds then.
"""

import argparse
import asyncio
import json
import socket
import statistics
import sys
import time
from typing import Any, Final

import uvloop
from connections import Server, chat_request

SMALL_BUFFER: Final = 4096
PARKING_TIMEOUT_S: Final = 20.0


async def first_token_s(port: int) -> float:
    """From before the connection to the first text."""
    start_s = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(chat_request(2))
    await reader.readuntil(b'"content":"T')
    seconds = time.perf_counter() - start_s
    writer.close()
    return seconds


def never_reading(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER)
    client.connect(("127.0.0.1", port))
    client.sendall(chat_request(8000))
    return client


async def all_parked(server: Server, num_clients: int) -> None:
    end_s = time.monotonic() + PARKING_TIMEOUT_S
    while (await server.statistics())["engine"]["num_parked"] < num_clients:
        if time.monotonic() > end_s:
            raise SystemExit(f"The crowd was not parked within {PARKING_TIMEOUT_S:.0f} s.")
        await asyncio.sleep(0.05)


async def measure(server: Server, num_slots: int, num_newcomers: int) -> dict[str, Any]:
    async def newcomers() -> list[float]:
        return [await first_token_s(server.port) for _ in range(num_newcomers)]

    await newcomers()  # the first ones meet cold caches
    alone = await newcomers()
    num_clients = num_slots * 3 // 2
    crowd = [never_reading(server.port) for _ in range(num_clients)]
    try:
        filling = await first_token_s(server.port)
        await all_parked(server, num_clients)
        beside = await newcomers()
        engine = (await server.statistics())["engine"]
    finally:
        for client in crowd:
            client.close()
    ms = {name: round(statistics.median(values) * 1000, 2) for name, values in (("alone", alone), ("parked", beside))}
    return {
        "num_slots": num_slots,
        "num_never_reading": num_clients,
        "first_token_ms_p50": ms,
        "ratio": round(ms["parked"] / ms["alone"], 2),
        "first_token_ms_max": {"alone": round(max(alone) * 1000, 2), "parked": round(max(beside) * 1000, 2)},
        "first_token_ms_while_the_crowd_fills_the_slots": round(filling * 1000, 1),
        "num_running": engine["num_running"],
        "num_parked": engine["num_parked"],
        "kv_cache_usage": engine["kv_cache_usage"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--newcomers", type=int, default=50)
    arguments = parser.parse_args()
    server = Server("--step-ms", "1", "--max-num-seqs", str(arguments.slots), "--send-buffer", str(SMALL_BUFFER))
    try:
        report = uvloop.run(measure(server, arguments.slots, arguments.newcomers))
    finally:
        server.close()
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
