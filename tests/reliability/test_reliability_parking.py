"""Clients that never read, half as many again as there are slots, and a newcomer beside them."""

import time

from whole_builders import TEXT, Whole, completion, whole
from wire_builders import until

from aserve.testing import ScriptedRunner

NUM_SLOTS = 8
SMALL_BUFFER = 4096


async def newcomer_s(stack: Whole) -> float:
    """Seconds to a short answer, the best of three."""
    took = []
    for _ in range(3):
        start_s = time.perf_counter()
        answer = await stack.complete("hello", max_tokens=3)
        took.append(time.perf_counter() - start_s)
        assert answer.finish == "length"
    return min(took)


async def test_clients_that_never_read_do_not_slow_a_newcomer() -> None:
    """They end up parked, holding nothing; a newcomer takes at most twice as long as alone (and 20 ms of noise)."""
    runner = ScriptedRunner(
        b"A line of text. ", max_num_seqs=NUM_SLOTS, num_blocks=1024, max_model_len=8192, step_time_s=0.0005
    )
    async with whole(
        runner,
        send_buffer=SMALL_BUFFER,
        max_num_batched_tokens=512,
        mailbox_events=16,
        park_after_s=0.05,
        stall_timeout_s=60.0,
        write_stall_s=60.0,
        write_buffer_bytes=SMALL_BUFFER,
    ) as stack:
        alone_s = await newcomer_s(stack)
        for _ in range(NUM_SLOTS * 3 // 2):
            client = await stack.visit(receive_buffer=SMALL_BUFFER)
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            client.post(TEXT, completion(stream=True, max_tokens=8000, ignore_eos=True))
        await until(lambda: stack.figures.num_parked == NUM_SLOTS * 3 // 2)

        assert (stack.figures.num_running, stack.figures.kv_cache_usage) == (0, 0.0)
        assert await newcomer_s(stack) <= 2 * alone_s + 0.02
        await stack.rest()
        assert stack.ends == {"length": 6, "abort": NUM_SLOTS * 3 // 2}
