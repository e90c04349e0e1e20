"""Loads for tests and for ``soak.py``: the same crowds, in sizes that the caller chooses."""

import asyncio
import contextlib
import gc
import random
import time
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from whole_builders import TEXT, Answer, Visitor, Whole, completion, percentile, turn
from wire_builders import http


async def mixed(stack: Whole, count: int, *, seed: int = 0, users: int = 64, leave: float = 0.2) -> Counter[str]:
    """``count`` requests of ``users`` clients on kept connections; a share leaves, in all phases and ways.

    The device says the first byte of the prompt: what does not is counted as "wrong". Returns what each came to.
    """
    outcomes: Counter[str] = Counter()
    numbers = iter(range(count))

    async def user(choose: random.Random) -> None:
        visitor: Visitor | None = None
        for number in numbers:
            if visitor is None:
                visitor = await stack.visit()
            letter = chr(97 + number % 26)
            wanted = completion(
                letter * choose.randint(1, 60), max_tokens=choose.randint(1, 30), stream=choose.random() < 0.5, seed=1
            )
            visitor.post(TEXT, wanted)
            if choose.random() < leave:
                how = choose.choice(["fin", "rst", "half", "delete"])
                if how == "delete":
                    await turn(choose.randint(1, 5))
                    for ident in stack.request_ids[-1:]:
                        stack.engine.abort(ident)
                    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                        outcomes[f"deleted {(await visitor.answer()).status}"] += 1
                await turn(choose.randint(0, 40))
                if how == "half":
                    visitor.writer.write_eof()
                elif how == "rst":
                    visitor.reset()
                visitor.close()
                stack.visitors.remove(visitor)
                visitor = None
                outcomes["left"] += 1
                continue
            try:
                answer = await visitor.answer()
            except (asyncio.IncompleteReadError, ConnectionError):
                outcomes["cut"] += 1
                visitor.close()
                stack.visitors.remove(visitor)
                visitor = None
                continue
            if answer.status == 200 and answer.finish == "length":
                outcomes["whole" if answer.text == letter * wanted["max_tokens"] else "wrong"] += 1
            else:  # somebody's abort may have met this one
                outcomes["aborted" if b"request_aborted" in answer.body else f"status {answer.status}"] += 1
            if answer.headers.get("connection") == "close" or b"request_aborted" in answer.body:
                visitor.close()
                stack.visitors.remove(visitor)
                visitor = None
        if visitor is not None:
            visitor.close()

    await asyncio.gather(*(user(random.Random(seed * 1000 + index)) for index in range(users)))
    return outcomes


def first_letter(context: Any, index: int) -> int:
    """The script of ``mixed``: the letter behind BOS."""
    return int(context[1])


# --- loop lag


@dataclass
class Lag:
    values_s: list[float] = field(default_factory=list)

    @property
    def max_ms(self) -> float:
        return max(self.values_s, default=0.0) * 1000

    def percentile_ms(self, share: float) -> float:
        return percentile(self.values_s, share) * 1000


@asynccontextmanager
async def loop_lag(interval_s: float = 0.002) -> AsyncIterator[Lag]:
    """How late a timer fires while the block runs, and no more than this process has computed meanwhile: what other
    processes take of a busy machine is not the loop's fault."""
    lag = Lag()

    async def tick() -> None:
        while True:
            due, computed = time.perf_counter() + interval_s, time.process_time()
            await asyncio.sleep(interval_s)
            late = max(0.0, time.perf_counter() - due)
            lag.values_s.append(min(late, time.process_time() - computed))

    task = asyncio.create_task(tick())
    try:
        yield lag
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# --- good streams and a hostile crowd


async def inter_token_s(stack: Whole, num_streams: int, num_tokens: int) -> list[float]:
    """Gaps between the events of streams that start together."""
    gaps: list[float] = []

    async def stream() -> None:
        visitor = await stack.visit()
        visitor.post(TEXT, completion(stream=True, max_tokens=num_tokens), close=True)
        await visitor.head()
        last = None
        async for _ in visitor.chunks():
            now = time.perf_counter()
            if last is not None:
                gaps.append(now - last)
            last = now
        visitor.close()
        stack.visitors.remove(visitor)

    await asyncio.gather(*(stream() for _ in range(num_streams)))
    return gaps


@asynccontextmanager
async def hostile_crowd(stack: Whole, size: int) -> AsyncIterator[None]:
    """Idle, never-reading, slow-header and slow-body clients, ``size`` of each, and some that reset again and again."""
    for _ in range(size):
        await stack.visit()
    for _ in range(size):
        never = await stack.visit(receive_buffer=4096)
        never.writer.transport.pause_reading()  # type: ignore[attr-defined]
        never.post(TEXT, completion(stream=True, max_tokens=2000))
    slow = [await stack.visit() for _ in range(2 * size)]
    sent = http("POST", TEXT, completion(stream=True))
    for index, visitor in enumerate(slow):
        visitor.writer.write(sent[:20] if index % 2 else sent[:-5])

    async def trickle() -> None:
        while True:
            await asyncio.sleep(0.05)
            for visitor in slow:
                visitor.writer.write(b"x")

    async def resets() -> None:
        while True:
            visitor = await stack.visit()
            visitor.post(TEXT, completion(stream=True, max_tokens=2000))
            await asyncio.sleep(0.01)
            visitor.reset()
            stack.visitors.remove(visitor)

    tasks = [asyncio.create_task(trickle()), asyncio.create_task(resets())]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


# --- overload


@dataclass
class Offered:
    """What came of a load. The first third, in which queues fill, does not count for the goodput."""

    seconds: float
    start_s: float = field(default_factory=time.perf_counter)
    served_s: list[float] = field(default_factory=list)
    refusals_s: list[float] = field(default_factory=list)
    without_retry_after: int = 0

    @property
    def goodput(self) -> float:
        counted = sum(self.seconds / 3 < at_s - self.start_s <= self.seconds for at_s in self.served_s)
        return counted / (self.seconds * 2 / 3)

    def take(self, answer: Answer, sent_s: float) -> None:
        now = time.perf_counter()
        if answer.status == 200:
            self.served_s.append(now)
            return
        assert answer.status == 503, answer.body
        self.refusals_s.append(now - sent_s)
        self.without_retry_after += int(answer.headers.get("retry-after", "0")) < 1


async def closed_loop(stack: Whole, users: int, seconds: float, **wanted: Any) -> Offered:
    """So many users that ask again as soon as they have their answer."""
    offered = Offered(seconds)

    async def user() -> None:
        visitor = await stack.visit()
        while time.perf_counter() < offered.start_s + seconds:
            sent_s = time.perf_counter()
            visitor.post(TEXT, completion(**wanted))
            offered.take(await visitor.answer(), sent_s)
        visitor.close()

    await asyncio.gather(*(user() for _ in range(users)))
    return offered


async def open_loop(stack: Whole, per_second: float, seconds: float, **wanted: Any) -> Offered:
    """Requests at a rate, whatever becomes of them."""
    offered = Offered(seconds)
    tasks: set[asyncio.Task[None]] = set()

    async def client() -> None:
        sent_s = time.perf_counter()
        offered.take(await stack.complete(**wanted), sent_s)

    for number in range(int(per_second * seconds)):
        delay_s = offered.start_s + number / per_second - time.perf_counter()
        if delay_s > 0:
            await asyncio.sleep(delay_s)
        task = asyncio.create_task(client())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return offered


# --- memory


def anonymous_bytes() -> int:
    """RssAnon of this process, garbage collected. Memory that was freed before hides growth: for fresh processes."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("this system does not tell RssAnon")


def traced_bytes() -> int:
    """What Python's allocator has given out and not got back, garbage collected, while tracemalloc runs."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def bytes_a_request(
    stack: Whole,
    size: Callable[[], int],
    *,
    warm_up: int,
    count: int,
    report: Callable[[int, int], None] = lambda number, size: None,
) -> float:
    """I12: by how much ``size`` grows with each of ``count`` requests, a fifth of which leave, after a warm-up."""

    async def measured(number: int, seed: int) -> int:
        await mixed(stack, number, seed=seed, users=16)
        await stack.rest()
        stack.visitors.clear()
        stack.ring.take(1 << 20)
        return size()

    before = now = await measured(warm_up, 0)
    step = min(count, 1000)
    for number in range(step, count + 1, step):
        now = await measured(step, number)
        report(number, now)
    return (now - before) / count
