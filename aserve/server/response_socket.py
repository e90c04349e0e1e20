"""Responses over one websocket: ``response.create`` in lanes, their events out, and the extensions ``aserve:*``."""

import asyncio
import contextlib
import re
import time
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson

from aserve.engine.stream import Timings
from aserve.errors import AserveError, Draining, InvalidRequest, RateLimited
from aserve.server.call import CLIENT_GONE, Call
from aserve.server.intake import Intake
from aserve.server.lanes import Lanes
from aserve.server.options import LimitOptions, ServerOptions
from aserve.server.ports import Logger, Metrics
from aserve.server.problems import InternalError, error_headers, error_object, error_status
from aserve.server.response_calls import ResponseCalls, Run
from aserve.server.response_events import ResponseEvents
from aserve.server.response_store import ResponseMemory, not_found
from aserve.server.responses import read_body
from aserve.server.schema import parse_json
from aserve.server.sse import escape_line_breaks
from aserve.server.stream_ws import WebSocket, text_frame
from aserve.server.websocket import CloseCode

_LANE_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,256}")
MAX_REFUSALS: Final = 64
"""Requests refused one after another for a bound of the lanes until the socket closes: nobody reads the refusals."""
METHOD_LABEL: Final = "WEBSOCKET"
"""In the metrics, where the upgrade itself counts as a GET."""
MAX_TIMINGS: Final = 256
"""Responses whose timing can be asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """A response.create in its lane. received_s: monotonic."""

    raw: dict[str, Any]
    stream_id: str | None
    num_bytes: int
    received_s: float


@dataclass(frozen=True, slots=True)
class _Timing:
    stream_id: str | None
    lane_s: float
    of_engine: Timings


class ResponsesSocket:
    """One client's socket. ``run`` ends when either side closes; whatever still runs then is aborted."""

    def __init__(
        self,
        socket: WebSocket,
        call: Call,
        *,
        calls: ResponseCalls,
        intake: Intake,
        options: ServerOptions,
        limits: LimitOptions,
        log: Logger,
        metrics: Metrics,
    ) -> None:
        self._socket = socket
        self._call = call
        self._calls = calls
        self._intake = intake
        self._queue_full_status = options.queue_full_status
        self._max_json_depth = limits.max_json_depth
        self._log = log
        self._metrics = metrics
        self._lanes: Lanes[_Request] = Lanes(
            max_lanes=limits.max_lanes,
            max_waiting=limits.max_lane_requests,
            max_waiting_bytes=intake.body_cap,
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[str | None, Run] = {}
        self._memory = ResponseMemory(
            max_responses=limits.max_socket_responses, max_bytes=limits.max_socket_history_bytes
        )
        self._timings: OrderedDict[str, _Timing] = OrderedDict()
        self._num_refusals = 0
        self.num_responses = 0

    async def run(self) -> None:
        """Raises CancelledError when the client has left without a close frame."""
        try:
            async with asyncio.TaskGroup() as group:
                with contextlib.suppress(ConnectionError):  # it is being cut: nothing more can be said
                    while (text := await self._socket.receive()) is not None:
                        await self._take(group, text)
                        await self._socket.drain()
                for task in self._tasks:
                    task.cancel()
            await self._socket.close()
        finally:
            self._socket.stop_clocks()

    def drain(self) -> None:
        """Take nothing new. What waits is refused, what runs goes on; the socket closes once its lanes are empty."""
        for stream_id, _ in self._lanes.take_waiting():
            self._send_error(Draining("The server is shutting down; try another one.", retry_after_s=1.0), stream_id)
        self._close_if_drained()

    def _close_if_drained(self) -> None:
        if self._intake.is_draining and not self._lanes.num_open:
            self._socket.end(CloseCode.GOING_AWAY, "The server is shutting down.")

    # --- the client's events

    async def _take(self, group: asyncio.TaskGroup, text: bytes) -> None:
        stream_id: str | None = None
        try:
            raw = await self._intake.off_loop(len(text), partial(parse_json, text, self._max_json_depth))
            stream_id = _lane_name(raw)
            match raw.get("type"):
                case "response.create":
                    self._add(group, _Request(raw=raw, stream_id=stream_id, num_bytes=len(text), received_s=_now()))
                case "aserve:response.cancel":
                    self._cancel(raw, stream_id)
                case "aserve:request.timing":
                    self._tell_timing(raw)
                case _:
                    raise InvalidRequest(
                        "'type' must be 'response.create', 'aserve:response.cancel' or 'aserve:request.timing'.",
                        param="type",
                    )
        except AserveError as error:
            self._send_error(error, stream_id)

    def _add(self, group: asyncio.TaskGroup, request: _Request) -> None:
        self._intake.check_open()
        try:
            runs_now = self._lanes.add(request.stream_id, request, request.num_bytes)
        except RateLimited:
            self._num_refusals += 1
            if self._num_refusals >= MAX_REFUSALS:
                self._socket.end(CloseCode.TRY_AGAIN_LATER, "Too many requests wait on this socket.")
            raise
        self._num_refusals = 0
        if runs_now:
            task = group.create_task(self._run_lane(request))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _cancel(self, raw: dict[str, Any], stream_id: str | None) -> None:
        """The response of ``response_id``, or the one that runs in the lane."""
        response_id = raw.get("response_id")
        if response_id is None and (run := self._running.get(stream_id)) is not None:
            response_id = run.state.id
        if not isinstance(response_id, str | None):
            raise InvalidRequest("'response_id' must be a string.", param="response_id")
        if response_id is None or not self._calls.cancel(response_id, self._call.owner):
            raise not_found()

    def _tell_timing(self, raw: dict[str, Any]) -> None:
        response_id = raw.get("response_id")
        timing = self._timings.get(response_id) if isinstance(response_id, str) else None
        if timing is None:
            raise not_found()
        engine, since_s = timing.of_engine, timing.of_engine.submitted_s
        event = {
            "type": "aserve:request.timing",
            "response_id": response_id,
            "lane_ms": _ms(timing.lane_s),
            "queue_ms": _ms(engine.started_s, since_s),
            "first_token_ms": _ms(engine.first_token_s, since_s),
            "last_token_ms": _ms(engine.last_token_s, since_s),
        }
        self._send(event, timing.stream_id)

    # --- lanes

    async def _run_lane(self, request: _Request) -> None:
        """This request and all that come to wait behind it."""
        turn: _Request | None = request
        try:
            while turn is not None:
                await self._respond(turn)
                turn = self._lanes.next(request.stream_id)
        except ConnectionError:
            return  # the reader of the socket learns of it too
        self._close_if_drained()

    async def _respond(self, request: _Request) -> None:
        """One request to its last event, whatever happens. It counts like an answer to a request of its own."""
        self.num_responses += 1
        status = CLIENT_GONE
        try:
            body = await self._intake.off_loop(request.num_bytes, partial(read_body, request.raw, request.num_bytes))
            if body.fields.stream is False:
                raise InvalidRequest("A websocket always streams: leave 'stream' out.", param="stream")
            self._intake.note_unknown(self._call, body.unknown)
            ready = await self._calls.prepare(body, self._call.owner, self._memory)
            elapsed_s = _now() - request.received_s
            with self._calls.open(ready, owner=self._call.owner, elapsed_s=elapsed_s, memory=self._memory) as run:
                self._running[request.stream_id] = run
                self._note_timing(run, request.stream_id, elapsed_s)
                try:
                    await self._play(run, request.stream_id)
                finally:
                    del self._running[request.stream_id]
                    self._log.info(
                        "response.finished",
                        request_id=self._call.label,
                        ms=round((_now() - request.received_s) * 1000, 3),
                        **run.facts(),
                    )
            status = 200 if run.state.error is None else error_status(run.state.error, self._queue_full_status)
        except AserveError as error:
            status = error_status(error, self._queue_full_status)
            self._send_error(error, request.stream_id)
        except ConnectionError:
            raise
        except Exception as error:
            status = 500
            self._log.error("request.failed", request_id=self._call.label, route=self._call.route, exc_info=error)
            self._send_error(InternalError("The server failed on this request."), request.stream_id)
        finally:
            self._metrics.http_request(self._call.route, METHOD_LABEL, status, _now() - request.received_s)

    async def _play(self, run: Run, stream_id: str | None) -> None:
        socket = self._socket
        events = ResponseEvents(run.state, text_frame, stream_id=stream_id)
        socket.write_nowait(events.opening())
        # Straight from delivery into the socket's next write; behind a full buffer the stream joins deltas.
        run.stream.push_to(partial(socket.try_write, events.encode))
        try:
            while not run.state.has_ended:
                await socket.drain()
                socket.write_nowait(await self._calls.next_events(run, events))
        except ConnectionError:
            raise
        except Exception as error:  # a fault of ours: the client must not wait for more
            self._log.error("request.failed", request_id=self._call.label, route=self._call.route, exc_info=error)
            socket.write_nowait(events.fail(InternalError("The server failed on this request.")))

    def _note_timing(self, run: Run, stream_id: str | None, lane_s: float) -> None:
        self._timings[run.state.id] = _Timing(stream_id, lane_s, run.stream.timings)
        while len(self._timings) > MAX_TIMINGS:
            self._timings.popitem(last=False)

    # --- events that belong to no response

    def _send_error(self, error: AserveError, stream_id: str | None) -> None:
        what = error_object(error)["error"]
        what["code"] = what["code"] or what["type"]
        if headers := error_headers(error):
            what["headers"] = headers
        event = {"type": "error", "status": error_status(error, self._queue_full_status), "error": what}
        self._send(event, stream_id)

    def _send(self, event: dict[str, Any], stream_id: str | None) -> None:
        if stream_id is not None:
            event["stream_id"] = stream_id
        try:
            json = orjson.dumps(event)
        except TypeError:  # a message that quotes a lone surrogate
            event["error"]["message"] = event["error"]["message"].encode("ascii", "backslashreplace").decode()
            json = orjson.dumps(event)
        with contextlib.suppress(ConnectionError):  # whoever reads the socket learns that the client has left
            self._socket.write_nowait(text_frame(event["type"], escape_line_breaks(json)))


def _lane_name(raw: dict[str, Any]) -> str | None:
    name = raw.get("stream_id")
    if name is not None and not (isinstance(name, str) and _LANE_NAME.fullmatch(name)):
        raise InvalidRequest("'stream_id' must be 1 to 256 letters, digits, '_', '.' or '-'.", param="stream_id")
    return name


def _now() -> float:
    return time.monotonic()


def _ms(seconds: float | None, since_s: float = 0.0) -> float | None:
    return None if seconds is None else round((seconds - since_s) * 1000, 3)
