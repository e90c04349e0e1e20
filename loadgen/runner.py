"""A whole run: one process, or several that start together and whose samples become one result.

All processes read the same monotonic clock of the machine, so their times compare; the parent names the start once
every one of them is warm.
"""

import asyncio
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import perf_counter, time
from typing import Any

from loadgen import probe
from loadgen.driver import Driver, Progress
from loadgen.errors import LoadgenError
from loadgen.options import RunOptions
from loadgen.result import DriverResult, RunResult

START_DELAY_S = 0.05
"""From the parent's word to the common start: time for the word to arrive everywhere."""


Tell = Callable[[Progress], None]


def run(options: RunOptions, *, tell: Tell | None = None) -> RunResult:
    """Make a run and return when its last request has ended. SIGINT ends it early, with what there is.

    ``tell`` hears twice a second how each process is getting on. Blocks. Raises LoadgenError when a process of several
    dies.
    """
    started_at = time()
    _raise_file_limit(options.max_inflight)
    before = probe.queue_histogram(options.target)
    drivers = [_run_here(options, 0, None, tell)] if options.num_processes == 1 else _run_children(options, tell)
    samples = sorted((s for driver in drivers for s in driver.samples), key=lambda s: (s.index, s.turn))
    return RunResult(
        options=options,
        started_at=started_at,
        loop_name=loop_factory().__module__.partition(".")[0],
        samples=samples,
        drivers=drivers,
        server_queue=probe.queue_between(before, None if before is None else probe.queue_histogram(options.target)),
    )


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return uvloop's loop where it is installed, else the standard one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def _run_here(options: RunOptions, process: int, pipe: "Pipe[Any, Any] | None", tell: Tell | None) -> DriverResult:
    async def agree_start() -> float:
        if pipe is None:
            return perf_counter()
        pipe.send("ready")
        start_s: float = await asyncio.to_thread(pipe.recv)
        return start_s

    async def main() -> DriverResult:
        driver = Driver(options, process, agree_start=agree_start, tell=tell)
        with _on_sigint(driver.interrupt):
            return await driver.run()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(main())


@contextmanager
def _on_sigint(handler: Callable[[], None]) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, handler)
    except (NotImplementedError, RuntimeError, ValueError):  # not the main thread, or no signals here
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _run_children(options: RunOptions, tell: Tell | None) -> list[DriverResult]:
    # Spawned, not forked: a fork would copy whatever threads and loops the caller has.
    context = get_context("spawn")
    children: list[tuple[BaseProcess, Pipe[Any, Any]]] = []
    try:
        for process in range(options.num_processes):
            ours, theirs = context.Pipe()
            child: BaseProcess = context.Process(
                target=_child_main, args=(options, process, theirs, tell is not None), daemon=True
            )
            child.start()
            theirs.close()
            children.append((child, ours))
        pipes = [pipe for _, pipe in children]
        with _forwarding_sigint([child for child, _ in children]):
            _receive_all(pipes, tell)
            start_s = perf_counter() + START_DELAY_S
            for pipe in pipes:
                pipe.send(start_s)
            return _receive_all(pipes, tell)
    finally:
        for child, pipe in children:
            pipe.close()
            child.join(timeout=5)
            if child.is_alive():
                child.terminate()
                child.join()


@contextmanager
def _forwarding_sigint(children: list[BaseProcess]) -> Iterator[None]:
    """Let the children end the run at the first SIGINT and send what they have; a second one interrupts as usual."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.getsignal(signal.SIGINT)

    def forward(*_: object) -> None:
        signal.signal(signal.SIGINT, previous)
        # A terminal has told the children too, a kill of this process alone has not; hearing it twice does no harm.
        for child in children:
            if child.pid is not None and child.is_alive():
                os.kill(child.pid, signal.SIGINT)

    signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _child_main(options: RunOptions, process: int, pipe: "Pipe[Any, Any]", tells: bool) -> None:
    with pipe:
        pipe.send(_run_here(options, process, pipe, pipe.send if tells else None))


def _receive_all(pipes: "list[Pipe[Any, Any]]", tell: Tell | None) -> list[Any]:
    """Return one message of each pipe, in their order; what they tell of their progress is passed on meanwhile."""
    received: dict[int, Any] = {}
    while len(received) < len(pipes):
        for ready in wait([pipe for number, pipe in enumerate(pipes) if number not in received]):
            number = next(i for i, pipe in enumerate(pipes) if pipe is ready)
            try:
                message = pipes[number].recv()
            except EOFError as error:
                raise LoadgenError(f"process {number} of {len(pipes)} died; its message is above") from error
            if not isinstance(message, Progress):
                received[number] = message
            elif tell is not None:
                tell(message)
    return [received[number] for number in range(len(pipes))]


def _raise_file_limit(max_inflight: int) -> None:
    """Make room for a socket a request, as far as the system allows without asking."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max_inflight + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
