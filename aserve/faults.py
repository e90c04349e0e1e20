"""Named fault points: places where a test makes the program fail, wait or be cancelled.

``faults.hit("pool.alloc")`` does nothing (about 40 ns) until somebody arms the name, in a test with ``armed(...)`` or
for a whole process with ``ASERVE_FAULTS``. The names are declared here, so that a misspelt one is an error and not a
test that tests nothing.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from aserve import errors

if TYPE_CHECKING:
    import asyncio  # loaded by the first armed point that needs it: the core, which is pure, passes through here too

Action = Literal["raise", "delay", "cancel", "hang"]

ENVIRONMENT: Final = "ASERVE_FAULTS"

NAMES: Final = frozenset({
    # the KV ledger and the scheduler
    "pool.alloc", "pool.free", "pool.evict", "prefix.insert", "prefix.lookup",
    "scheduler.admit", "scheduler.compose", "scheduler.land", "scheduler.preempt", "scheduler.finish",
    # the engine
    "engine.start", "engine.submit", "engine.abort", "engine.drain",
    "loop.wake", "loop.launch", "lander.await", "lander.commit", "deliver.decode", "deliver.push",
    "stream.push", "stream.next", "stream.close",
    # the device
    "runner.load", "runner.launch", "runner.launch_rest", "runner.forward", "runner.sample", "runner.land",
    "runner.close",
    # text
    "tokenizer.encode", "tokenizer.decode", "template.render",
    # the server
    "server.start", "server.accept", "server.headers", "server.body", "server.parse", "server.tokenize",
    "server.submit", "server.write", "server.finish", "server.stop",
    # the log
    "log.render", "log.open", "log.write",
    # fetching a model
    "pull.connect", "pull.read", "pull.verify", "pull.convert",
})  # fmt: skip


class FaultInjected(RuntimeError):
    """What an armed point raises unless told otherwise."""


@dataclass(slots=True, eq=False)
class Fault:
    """One armed point. ``num_hits`` counts passes, ``num_trips`` those that did something."""

    name: str
    action: Action
    after: int
    times: int | None
    delay_s: float
    error: BaseException | type[BaseException]
    num_hits: int = 0
    num_trips: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _released: threading.Event = field(default_factory=threading.Event, repr=False)
    _waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list, repr=False)

    def _trips(self) -> bool:
        with self._lock:
            self.num_hits += 1
            if self.num_hits <= self.after or (self.times is not None and self.num_trips >= self.times):
                return False
            self.num_trips += 1
            return True

    def _raise(self) -> None:
        raise self.error if isinstance(self.error, BaseException) else self.error(f"injected at {self.name}")

    def trip(self) -> None:
        """Do what is armed, on the calling thread: a delay or a hang blocks it."""
        if not self._trips():
            return
        if self.action == "raise":
            self._raise()
        elif self.action == "delay":
            self._released.wait(self.delay_s)
        elif self.action == "hang":
            self._released.wait()
        else:
            _cancel_current_task()

    async def trip_async(self) -> None:
        """Do what is armed, blocking only the calling task."""
        if not self._trips():
            return
        import asyncio

        if self.action == "raise":
            self._raise()
        elif self.action == "delay":
            await asyncio.sleep(self.delay_s)
        elif self.action == "hang":
            released = asyncio.Event()
            with self._lock:
                if self._released.is_set():
                    return
                self._waiters.append((asyncio.get_running_loop(), released))
            await released.wait()
        else:
            _cancel_current_task()
            await asyncio.sleep(0)

    def release(self) -> None:
        """Let everything that hangs here go on."""
        with self._lock:
            self._released.set()
            waiters, self._waiters = self._waiters, []
        for loop, released in waiters:
            if not loop.is_closed():
                loop.call_soon_threadsafe(released.set)


_armed: dict[str, Fault] = {}


def hit(name: str) -> None:
    """Pass the point ``name``. Where it may be armed with ``delay`` or ``hang`` on the loop, prefer ``hit_async``."""
    if _armed:
        _trip(name)


async def hit_async(name: str) -> None:
    """Pass the point ``name``; an armed delay, hang or cancel takes effect at this await."""
    if _armed:
        fault = _find(name)
        if fault is not None:
            await fault.trip_async()


def arm(
    name: str,
    action: Action = "raise",
    *,
    after: int = 0,
    times: int | None = 1,
    delay_s: float = 0.01,
    error: BaseException | type[BaseException] = FaultInjected,
) -> Fault:
    """Let the first ``after`` hits pass, then act at ``times`` hits (None: at every one). Replaces what was armed."""
    _check_name(name)
    disarm(name)
    fault = _armed[name] = Fault(name, action, after, times, delay_s, error)
    return fault


def disarm(name: str) -> None:
    """Make the point a no-op again and release what hangs there. Not armed is fine."""
    fault = _armed.pop(name, None)
    if fault is not None:
        fault.release()


def disarm_all() -> None:
    for name in list(_armed):
        disarm(name)


@contextmanager
def armed(
    name: str,
    action: Action = "raise",
    *,
    after: int = 0,
    times: int | None = 1,
    delay_s: float = 0.01,
    error: BaseException | type[BaseException] = FaultInjected,
) -> Iterator[Fault]:
    """``arm`` for the length of a ``with`` block."""
    fault = arm(name, action, after=after, times=times, delay_s=delay_s, error=error)
    try:
        yield fault
    finally:
        if _armed.get(name) is fault:
            disarm(name)
        fault.release()


def arm_from_environment(environment: Mapping[str, str]) -> list[Fault]:
    """Arm what ``ASERVE_FAULTS`` says: ``name=action[:argument][,after=N][,times=N|all]``, parted by ``;``.

    The argument is seconds for ``delay`` and the name of an exception (built in or of ``aserve.errors``) for ``raise``:
    ``runner.forward=raise:MemoryError,after=10;log.write=delay:0.5,times=all``. Raises ConfigError.
    """
    faults = []
    for entry in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(";"))):
        try:
            faults.append(arm(**_parse(entry)))
        except ValueError as error:
            raise errors.ConfigError(f"{ENVIRONMENT}: {entry!r}: {error}.") from error
    return faults


def _trip(name: str) -> None:
    fault = _find(name)
    if fault is not None:
        fault.trip()


def _find(name: str) -> Fault | None:
    fault = _armed.get(name)
    if fault is None:
        _check_name(name)
    return fault


def _check_name(name: str) -> None:
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        raise ValueError(f"there is no fault point {name!r}" + (f"; the nearest is {near[0]!r}" if near else ""))


def _cancel_current_task() -> None:
    import asyncio

    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if task is None:
        raise asyncio.CancelledError
    task.cancel()


def _parse(entry: str) -> dict[str, Any]:
    name, _, rest = entry.partition("=")
    what, *settings = (part.strip() for part in rest.split(","))
    action, _, argument = what.partition(":")
    if action not in get_args(Action):
        raise ValueError(f"the action is one of {', '.join(get_args(Action))}, not {action!r}")
    parsed: dict[str, Any] = {"name": name.strip(), "action": action}
    if argument and action == "delay":
        parsed["delay_s"] = float(argument)
    elif argument and action == "raise":
        parsed["error"] = _exception_named(argument)
    elif argument:
        raise ValueError(f"{action} takes no argument")
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in ("after", "times"):
            raise ValueError(f"{setting!r} is neither after=N nor times=N")
        parsed[key] = None if (key, value) == ("times", "all") else int(value)
    return parsed


def _exception_named(name: str) -> type[BaseException]:
    for module in (builtins, errors):
        found = getattr(module, name, None)
        if isinstance(found, type) and issubclass(found, BaseException):
            return found
    raise ValueError(f"there is no exception {name!r}")
