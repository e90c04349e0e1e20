"""The logger: a call makes a dict and appends it to the ring. Rendering and writing happen later, in ``drain``."""

import logging
from time import time
from typing import Any, Final, Literal

from aserve.obs.ring import Ring

Level = Literal["debug", "info", "warning", "error"]

LEVELS: Final[dict[str, int]] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_DEBUG, _INFO, _WARNING, _ERROR = LEVELS.values()
_OFF: Final = logging.CRITICAL + 1

Record = dict[str, Any] | logging.LogRecord
"""What the ring holds: our own are dicts of "t" (seconds since the epoch), "level", "event" and the fields."""


class Logger:
    """Names what happened and gives the particulars as fields: ``log.info("request.finished", request_id=id, num=3)``.

    A call never raises, blocks, renders or writes, and is safe from any thread. Fields are rendered up to
    ``flush_interval_ms`` later in another thread: pass values that do not change any more. A field ``exc_info=error``
    shows the traceback, an exception in any other field its one-line form. Keys that name secrets or texts of clients
    are redacted (``render.py``).
    """

    __slots__ = ("_bound", "_ring", "_threshold")

    def __init__(self, ring: Ring[Record], level: Level = "info", **bound: Any) -> None:
        self._ring = ring
        self._threshold = LEVELS[level]
        self._bound = bound

    @classmethod
    def silent(cls) -> "Logger":
        """A logger that drops every call: for parts that are used without a log."""
        logger = cls(Ring(1))
        logger._threshold = _OFF
        return logger

    def bind(self, **fields: Any) -> "Logger":
        """A logger that adds ``fields`` to each of its records."""
        logger = Logger.__new__(Logger)
        logger._ring = self._ring
        logger._threshold = self._threshold
        logger._bound = {**self._bound, **fields}
        return logger

    def enabled(self, level: Level) -> bool:
        """Whether a record of this level would be kept: ask before computing fields that cost something."""
        return self._threshold <= LEVELS[level]

    def debug(self, event: str, /, **fields: Any) -> None:
        if self._threshold <= _DEBUG:
            self._ring.push({**self._bound, **fields, "t": time(), "level": "debug", "event": event})

    def info(self, event: str, /, **fields: Any) -> None:
        if self._threshold <= _INFO:
            self._ring.push({**self._bound, **fields, "t": time(), "level": "info", "event": event})

    def warning(self, event: str, /, **fields: Any) -> None:
        if self._threshold <= _WARNING:
            self._ring.push({**self._bound, **fields, "t": time(), "level": "warning", "event": event})

    def error(self, event: str, /, **fields: Any) -> None:
        if self._threshold <= _ERROR:
            self._ring.push({**self._bound, **fields, "t": time(), "level": "error", "event": event})


class RingHandler(logging.Handler):
    """Takes records of the standard library's ``logging`` into the ring, unformatted and without a lock."""

    def __init__(self, ring: Ring[Record]) -> None:
        super().__init__()
        self._ring = ring

    def createLock(self) -> None:
        self.lock = None  # the ring needs none, and a lock is what the loop could block on

    def handle(self, record: logging.LogRecord) -> bool:
        self._ring.push(record)
        return True

    def emit(self, record: logging.LogRecord) -> None:
        self._ring.push(record)


class StdlibRoute:
    """Routes ``logging`` and ``warnings`` (aiohttp, asyncio, transformers) into the ring until ``remove``.

    Handlers that others put on the root logger stay. Mutates the process-wide logging tree; one at a time.
    """

    def __init__(self, ring: Ring[Record], level: Level) -> None:
        self._handler = RingHandler(ring)
        root = logging.getLogger()
        self._level_before = root.level
        self._adopted: dict[str, tuple[list[logging.Handler], bool]] = {}
        root.addHandler(self._handler)
        root.setLevel(LEVELS[level])
        logging.captureWarnings(True)

    def adopt(self, *names: str) -> None:
        """Take over loggers that print by themselves. Call it after their library was imported."""
        for name in names:
            logger = logging.getLogger(name)
            self._adopted.setdefault(name, (logger.handlers[:], logger.propagate))
            logger.handlers.clear()
            logger.propagate = True

    def remove(self) -> None:
        """Put everything back as it was. Idempotent."""
        root = logging.getLogger()
        if self._handler not in root.handlers:
            return
        logging.captureWarnings(False)
        root.removeHandler(self._handler)
        root.setLevel(self._level_before)
        for name, (handlers, propagate) in self._adopted.items():
            logger = logging.getLogger(name)
            logger.handlers[:] = handlers
            logger.propagate = propagate
