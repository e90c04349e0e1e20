"""The endpoints of the Responses API: plain, streamed, and over a websocket."""

from functools import partial

import orjson
from aiohttp import web

from aserve.errors import AserveError, InvalidRequest, NotFound
from aserve.server.call import Call
from aserve.server.intake import Intake
from aserve.server.options import LimitOptions, ServerOptions
from aserve.server.ports import Logger, Metrics
from aserve.server.problems import InternalError
from aserve.server.response_calls import ResponseCalls, Run
from aserve.server.response_events import ResponseEvents, sse_frame
from aserve.server.response_socket import ResponsesSocket
from aserve.server.responses import Body, read_body
from aserve.server.schema import parse_json
from aserve.server.sse import KEEP_ALIVE
from aserve.server.stream_sse import SSE_HEADERS, EventWriter, first_deltas
from aserve.server.stream_ws import WebSocket
from aserve.server.websocket import CloseCode, check_upgrade


class ResponsesApi:
    """The handlers, and the sockets that are open."""

    def __init__(
        self,
        *,
        calls: ResponseCalls,
        intake: Intake,
        options: ServerOptions,
        limits: LimitOptions,
        log: Logger,
        metrics: Metrics,
    ) -> None:
        self._calls = calls
        self._intake = intake
        self._options = options
        self._limits = limits
        self._log = log
        self._metrics = metrics
        self._sockets: set[ResponsesSocket] = set()

    @property
    def num_sockets(self) -> int:
        return len(self._sockets)

    def drain(self) -> None:
        """Tell every socket that the server takes nothing new; ``Intake.is_draining`` is set."""
        for socket in tuple(self._sockets):
            socket.drain()

    # --- over HTTP

    async def create(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        sent = await self._intake.off_loop(len(body), partial(self._read, body))
        self._intake.note_unknown(call, sent.unknown)
        ready = await self._calls.prepare(sent, call.owner, None)
        with self._calls.open(ready, owner=call.owner, elapsed_s=call.elapsed_s) as run:
            call.facts |= {"id": run.state.id, "stream": bool(sent.fields.stream)}
            try:
                if sent.fields.stream:
                    return await self._stream(call, run)
                return call.json(await self._calls.collect(run))
            finally:
                call.facts |= run.facts()

    def _read(self, body: bytes) -> Body:
        sent = read_body(parse_json(body, self._limits.max_json_depth), len(body))
        if sent.fields.stream_options is not None and not sent.fields.stream:
            raise InvalidRequest("'stream_options' needs 'stream' to be true.", param="stream_options")
        return sent

    async def _stream(self, call: Call, run: Run) -> web.StreamResponse:
        """The rules of ``stream_sse.stream_events``, with this API's events: the 200 waits for the first token or the
        first keep-alive, a fault before it gets its own status, one after it is the last event."""
        keepalive_s = self._options.keepalive_comment_s
        deltas = await first_deltas(run.stream, keepalive_s)
        if deltas is not None:
            self._calls.check(run, deltas)
        response = web.StreamResponse(headers={**SSE_HEADERS, **call.headers})
        await response.prepare(call.request)
        events = ResponseEvents(run.state, sse_frame)
        writer = EventWriter(call.request, response, keepalive_s)
        try:
            if deltas is None:
                writer.write_nowait(KEEP_ALIVE)
                deltas = await run.stream.next()
            data = await self._calls.encode(run, events, deltas)
            run.stream.push_to(partial(writer.try_write, events.encode))
            while not run.state.has_ended:
                if data:
                    writer.write_nowait(data)
                    if writer.is_paused:
                        await writer.drain()
                data = await self._calls.next_events(run, events)
            self._note_fault(call, run.state.error)
            await writer.finish(data)
        except ConnectionError:
            raise
        except Exception as error:  # a fault of ours: the client must not take the cut for an end
            fault = InternalError("The server failed on this request.")
            self._note_fault(call, fault)
            call.facts["exc_info"] = error
            response.force_close()
            await writer.finish(events.fail(fault))
        finally:
            writer.close()
        return response

    @staticmethod
    def _note_fault(call: Call, fault: AserveError | None) -> None:
        if fault is not None:
            call.facts["fault"] = fault.code

    async def retrieve(self, call: Call) -> web.StreamResponse:
        return call.json(await self._calls.retrieve(call.parameter, call.owner))

    async def cancel(self, call: Call) -> web.StreamResponse:
        """Ends what runs; the object comes as it will be. What has ended already is answered as it is."""
        is_running = self._calls.cancel(call.parameter, call.owner)
        answer = await self._calls.retrieve(call.parameter, call.owner)
        if is_running:
            answer = orjson.dumps({**orjson.loads(answer), "status": "cancelled"})
        return call.json(answer)

    async def delete(self, call: Call) -> web.StreamResponse:
        self._calls.forget(call.parameter, call.owner)
        return call.json(orjson.dumps({"id": call.parameter, "object": "response", "deleted": True}))

    # --- over a websocket

    async def socket(self, call: Call) -> web.StreamResponse:
        if call.request.method != "GET":
            raise NotFound("There is nothing to see at this path.")
        check_upgrade(call.request.headers)
        self._intake.check_open()
        socket = WebSocket(
            call.request,
            max_message_bytes=self._intake.body_cap,
            heartbeat_s=self._options.websocket_heartbeat_s,
        )
        response = await socket.accept(call.headers)
        call.upgraded_s = call.elapsed_s
        limit = self._limits.max_websockets
        if limit and len(self._sockets) >= limit:
            socket.end(CloseCode.TRY_AGAIN_LATER, "The server has too many sockets open.")
        session = ResponsesSocket(
            socket,
            call,
            calls=self._calls,
            intake=self._intake,
            options=self._options,
            limits=self._limits,
            log=self._log,
            metrics=self._metrics,
        )
        self._sockets.add(session)
        try:
            await session.run()
        except Exception as error:  # a fault of ours; no other answer fits behind a 101
            self._log.error("request.failed", request_id=call.label, route=call.route, exc_info=error)
            socket.end(CloseCode.INTERNAL_ERROR, "The server failed on this socket.")
            await socket.close()
        finally:
            self._sockets.discard(session)
            call.facts |= {"close_code": int(socket.close_code), "num_responses": session.num_responses}
        return response
