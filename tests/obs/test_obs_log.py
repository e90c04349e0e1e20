"""The logger makes records and nothing else; the standard library's logging ends in the same ring."""

import logging
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from aserve.obs.log import Level, Logger, Record, RingHandler, StdlibRoute
from aserve.obs.ring import Ring


def records(ring: Ring[Record]) -> list[dict[str, Any]]:
    """What the ring holds, without the times."""
    return [
        {key: value for key, value in record.items() if key != "t"}
        for record in ring.take(1000)
        if isinstance(record, dict)
    ]


@pytest.fixture
def ring() -> Ring[Record]:
    return Ring(1024)


@pytest.fixture
def route(ring: Ring[Record]) -> Iterator[StdlibRoute]:
    route = StdlibRoute(ring, "info")
    yield route
    route.remove()


def test_record_holds_event_level_and_fields(ring: Ring[Record]) -> None:
    """A call appends one dict."""
    Logger(ring).info("request.finished", num_tokens=3)

    assert records(ring) == [{"level": "info", "event": "request.finished", "num_tokens": 3}]


def test_record_carries_its_time(ring: Ring[Record]) -> None:
    """The time is the call's, not the writing's."""
    before = time.time()
    Logger(ring).info("a")
    after = time.time()

    (record,) = ring.take(1)
    assert isinstance(record, dict)
    assert before <= record["t"] <= after


def test_bound_fields(ring: Ring[Record]) -> None:
    """Bound fields come first, add up over several binds, and give way to the call's own."""
    log = Logger(ring, component="engine").bind(request_id="a")

    log.warning("slow", request_id="b", wait_ms=7)

    assert records(ring) == [
        {"component": "engine", "request_id": "b", "wait_ms": 7, "level": "warning", "event": "slow"}
    ]


def test_fields_cannot_forge_the_event(ring: Ring[Record]) -> None:
    """Fields named like the record's own keys lose."""
    Logger(ring).error("real", event="forged", level="forged", t=0)

    assert records(ring) == [{"level": "error", "event": "real"}]


@pytest.mark.parametrize(
    ("level", "kept"),
    [
        ("debug", ["debug", "info", "warning", "error"]),
        ("info", ["info", "warning", "error"]),
        ("warning", ["warning", "error"]),
        ("error", ["error"]),
    ],
)
def test_level_filter(ring: Ring[Record], level: Level, kept: list[str]) -> None:
    """Calls below the level make no record, through bound loggers too."""
    log = Logger(ring, level).bind(component="engine")
    for name in ("debug", "info", "warning", "error"):
        getattr(log, name)("event")

    assert [record["level"] for record in records(ring)] == kept
    assert [name for name in ("debug", "info", "warning", "error") if log.enabled(name)] == kept


def test_silent_logger_makes_no_record() -> None:
    """A silent logger and what is bound to it drop every call."""
    log = Logger.silent()
    log.error("a")
    log.bind(component="engine").error("b")

    assert log._ring.pushed == 0


class Unfriendly:
    """An object all of whose conversions raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __bool__(self) -> bool:
        raise RuntimeError("no")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no")

    __hash__ = None  # type: ignore[assignment]


def test_call_does_not_touch_its_values(ring: Ring[Record]) -> None:
    """Values that cannot even be shown pass through the call."""
    Logger(ring).info("a", value=Unfriendly())

    assert ring.pushed == 1


def test_call_costs_little(ring: Ring[Record]) -> None:
    """The 99th percentile of a call is at most 20 us, with ten rings' worth pushed."""
    log = Logger(ring).bind(component="engine")
    clock = time.perf_counter
    durations = []
    for number in range(10 * ring.capacity):
        start = clock()
        log.info("request.finished", request_id="a", num_tokens=number, wait_ms=1.5)
        durations.append(clock() - start)

    assert sorted(durations)[int(len(durations) * 0.99)] <= 20e-6
    assert ring.pushed == 10 * ring.capacity
    assert ring.dropped == 9 * ring.capacity


def test_stdlib_records_arrive_unformatted(ring: Ring[Record], route: StdlibRoute) -> None:
    """A record of ``logging`` is pushed as it is; below the level it is not made."""
    logging.getLogger("aiohttp.server").warning("took %d ms", 5)
    logging.getLogger("aiohttp.server").debug("not this")

    (record,) = ring.take(10)
    assert isinstance(record, logging.LogRecord)
    assert (record.name, record.msg, record.args) == ("aiohttp.server", "took %d ms", (5,))


def test_warnings_arrive(ring: Ring[Record], route: StdlibRoute) -> None:
    """``warnings.warn`` ends in the ring."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # pytest had put its own recorder in between
        warnings.warn("old", DeprecationWarning, stacklevel=1)

        (record,) = ring.take(10)
    assert isinstance(record, logging.LogRecord)
    assert "DeprecationWarning: old" in record.getMessage()


def test_adopted_logger_stops_printing(
    ring: Ring[Record], route: StdlibRoute, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library's own handler is taken off while the route stands, and put back."""
    library = logging.getLogger("a_library_that_prints")
    own_handler = logging.StreamHandler()
    library.addHandler(own_handler)
    library.propagate = False

    route.adopt("a_library_that_prints")
    library.warning("hello")
    assert len(ring) == 1
    assert capsys.readouterr().err == ""

    route.remove()
    assert (library.handlers, library.propagate) == ([own_handler], False)
    library.removeHandler(own_handler)


def test_removed_route_leaves_logging_as_it_was(ring: Ring[Record]) -> None:
    """After ``remove``, twice even, root has its old level and handlers."""
    root = logging.getLogger()
    before = (root.level, root.handlers[:])
    route = StdlibRoute(ring, "debug")
    route.remove()
    route.remove()

    assert (root.level, root.handlers) == before


def test_handler_has_no_lock(ring: Ring[Record]) -> None:
    """Nothing in the handler can block the loop."""
    assert RingHandler(ring).lock is None
