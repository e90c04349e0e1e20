"""The server: what every request passes through, and the life of the listening socket."""

import asyncio
import errno
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final, cast

from aiohttp import web

from aserve.core.request import SamplingParams
from aserve.errors import AserveError, ConfigError, InvalidRequest
from aserve.server.access import Hosts, Keys, Origins
from aserve.server.call import Call, request_label
from aserve.server.connection import Connection, HttpServer
from aserve.server.intake import Intake
from aserve.server.options import LimitOptions, ServerOptions
from aserve.server.ports import Engine, Logger, Metrics, Renderer, Trace
from aserve.server.prepare import Preparer
from aserve.server.problems import InternalError, error_body, error_headers, error_status
from aserve.server.response_calls import ResponseCalls
from aserve.server.response_routes import ResponsesApi
from aserve.server.routes import Api, Router, allowed_methods
from aserve.server.sampling import ModelFacts
from aserve.server.workers import Workers

LAST_WORDS_S: Final = 2.0
"""How long answers may take to leave the sockets once the engine has ended them all."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Labels; a client may send any other word."""
SPARE_DESCRIPTORS: Final = 64
"""File descriptors that connections leave to the rest of the process."""


class Server:
    """Serves one engine over HTTP. ``start``, then ``drain_and_stop`` or ``aclose``; the caller owns engine and
    signals."""

    def __init__(
        self,
        *,
        engine: Engine,
        renderer: Renderer,
        model_names: Sequence[str],
        options: ServerOptions,
        limits: LimitOptions,
        log: Logger,
        metrics: Metrics,
        trace: Trace | None = None,
        sampling_defaults: SamplingParams | None = None,
        more_statistics: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """model_names: what clients may call the model, the first one its own. sampling_defaults: for fields that are
        not sent, usually the model's generation_config. more_statistics: further sections of /v1/stats."""
        self._engine = engine
        self._options = options
        self._limits = replace(limits, max_connections=limits.max_connections or _default_connections())
        self._log = log
        self._metrics = metrics
        self._keys = Keys(options.api_keys)
        self._origins = Origins(options.cors_origins)
        self._hosts = Hosts(options.host, options.allowed_hosts)
        self._workers = Workers(limits.num_workers, limits.max_pending_work)
        info = engine.info
        preparer = Preparer(
            renderer=renderer,
            tokenizer=engine.tokenizer,
            facts=ModelFacts(
                vocab_size=info.vocab_size,
                eos_ids=info.eos_ids or engine.tokenizer.eos_ids,
                max_model_len=info.max_model_len,
                max_prompts=limits.max_prompts,
                defaults=sampling_defaults or SamplingParams(),
            ),
            model_names=model_names,
            max_json_depth=limits.max_json_depth,
        )
        self._intake = Intake(engine, self._workers, self._limits, log)
        self._responses = ResponsesApi(
            calls=ResponseCalls(
                engine=engine,
                preparer=preparer,
                intake=self._intake,
                limits=self._limits,
                default_model=model_names[0],
            ),
            intake=self._intake,
            options=options,
            limits=self._limits,
            log=log,
            metrics=metrics,
        )
        self._api = Api(
            engine=engine,
            preparer=preparer,
            intake=self._intake,
            responses=self._responses,
            options=options,
            model_names=model_names,
            log=log,
            metrics=metrics,
            trace=trace,
            more_statistics=lambda: {"server": self.statistics(), **more_statistics()},
        )
        self._router = Router(self._api.routes())
        self._open_calls: set[asyncio.Task[Any]] = set()
        self._http: HttpServer | None = None
        self._listener: asyncio.AbstractServer | None = None
        self._started_s = time.monotonic()

    # --- its life

    async def start(self) -> tuple[str, int]:
        """Listen; returns the address that was bound. Raises ConfigError if it cannot be."""
        self._http = HttpServer(self._handle, limits=self._limits, fault_handler=self._malformed, log=self._log)
        host, port = self._options.host, self._options.port
        if not 0 <= port <= 65535:  # uvloop would take it modulo 65536
            raise ConfigError(f"server.port is {port}, but ports go from 0 to 65535.")
        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(self._http, host, port, backlog=1024, reuse_address=True)
        except OSError as error:
            raise ConfigError(_why_not_bound(error, host, port)) from None
        address = self._listener.sockets[0].getsockname()
        self._log.info("server.listening", host=address[0], port=address[1])
        return address[0], address[1]

    async def drain_and_stop(self) -> None:
        """Refuse new work and let running requests finish, up to ``drain_timeout_s``; what runs then ends with an error
        event. Idle connections close at once. Cancelling it leaves ``aclose`` to do the rest."""
        self._intake.is_draining = True
        self._log.info("server.draining", num_open=self._intake.num_open)
        self._responses.drain()
        if self._http is not None:
            self._http.pre_shutdown()
        await self._engine.drain(self._options.drain_timeout_s)
        if self._open_calls:
            await asyncio.wait(self._open_calls, timeout=LAST_WORDS_S)
        await self.aclose()

    async def aclose(self) -> None:
        """Stop listening and cut every connection; handlers are cancelled and have ended on return. Idempotent."""
        self._intake.is_draining = True
        if self._listener is not None:
            self._listener.close()
        if self._http is not None:
            await self._http.cut_all()
        if self._listener is not None:
            await self._listener.wait_closed()
            self._listener = None
        self._workers.close()

    def statistics(self) -> dict[str, Any]:
        """Plain figures for /v1/stats."""
        counts = asdict(self._http.counts) if self._http is not None else {}
        return {
            "uptime_s": round(time.monotonic() - self._started_s, 3),
            "requests_open": self._intake.num_open,
            "draining": self._intake.is_draining,
            "websockets": self._responses.num_sockets,
            "connections": counts,
        }

    # --- one request

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Every request: checks, the handler, the error's answer, one log line. Raises CancelledError and
        ConnectionError only, when the client has left."""
        connection = cast(Connection, request.protocol)
        connection.request_began(request.content)
        task = asyncio.current_task()
        assert task is not None
        self._open_calls.add(task)
        call = Call(request=request, label=request_label(request))
        status: int | None = None
        try:
            try:
                response = await self._dispatch(call)
            except AserveError as error:
                response = self._problem(call, error)
            except (asyncio.CancelledError, ConnectionError, GeneratorExit, KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # native code that panics raises no Exception
                self._log.error("request.failed", request_id=call.label, route=call.route, exc_info=error)
                response = self._problem(call, InternalError("The server failed on this request."))
            status = response.status
            if self._intake.is_draining:
                response.force_close()
            return response
        finally:
            self._open_calls.discard(task)
            connection.request_ended()
            self._finish(call, call.status_if_gone if status is None else status)

    async def _dispatch(self, call: Call) -> web.StreamResponse:
        request = call.request
        call.headers = {"X-Request-ID": call.label, "Server": "aserve", **self._origins.headers_for(request)}
        path = request.rel_url.raw_path
        routes = self._router.methods(path)
        if routes:
            call.route = next(iter(routes.values())).pattern
        self._hosts.check(request)
        self._origins.check(request)
        if request.method == "OPTIONS":
            methods = allowed_methods(routes)
            return web.Response(status=204, headers={**call.headers, **self._origins.preflight(request, methods)})
        route = routes.get(request.method)
        if route is None or not route.is_open:
            call.owner = self._keys.owner_of(request)
        route, call.parameter = self._router.find(request.method, path)
        call.is_probe = route.is_open
        return await route.handler(call)

    def _problem(self, call: Call, error: AserveError) -> web.Response:
        call.facts["fault"] = error.code or error.type
        response = web.Response(
            status=error_status(error, self._options.queue_full_status),
            body=error_body(error),
            content_type="application/json",
            headers={"X-Request-ID": call.label, **call.headers, **error_headers(error)},
        )
        if error.status == 405:
            response.headers["Allow"] = allowed_methods(self._router.methods(call.request.rel_url.raw_path))
        if error.status in (408, 413) or call.request.content.exception() is not None:  # the body is not read on
            response.force_close()
        return response

    def _finish(self, call: Call, status: int) -> None:
        """The request's one line, and its count. No prompts, no keys, no paths that clients made up."""
        seconds = call.elapsed_s
        method = call.request.method if call.request.method in METHODS else "other"
        latency_s = seconds if call.upgraded_s is None else call.upgraded_s
        self._metrics.http_request(call.route, method, status, latency_s)
        # Probes and scrapes come every few seconds and would drown the rest.
        log = self._log.debug if call.is_probe and status < 400 else self._log.info
        log(
            "request.finished",
            request_id=call.label,
            method=method,
            route=call.route,
            status=status,
            ms=round(seconds * 1000, 3),
            **call.facts,
        )

    def _malformed(self, request: web.BaseRequest, status: int, cause: BaseException | None) -> web.Response:
        """The answer to bytes that are not HTTP; the connection closes after it."""
        call = Call(request=request, label=request_label(request))
        call.headers = {"X-Request-ID": call.label, "Server": "aserve"}
        error: AserveError = InvalidRequest("The request is not valid HTTP.")
        if status >= 500:
            error = InternalError("The server failed on this request.")
            self._log.error("request.failed", request_id=call.label, exc_info=cause)
        response = self._problem(call, error)
        self._finish(call, response.status)
        return response


def _default_connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else max(16, soft - SPARE_DESCRIPTORS)


def check_address(options: ServerOptions) -> None:
    """Raises ConfigError where ``Server.start`` could not listen now. Resolves names, so it may block."""
    host, port = options.host, options.port
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, _, _, address in found:
            if family == socket.AF_INET6 and not _has_ipv6():
                continue  # listening skips it too
            with socket.socket(family, kind) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind(address)
    except OSError as error:
        raise ConfigError(_why_not_bound(error, host, port)) from None


def _has_ipv6() -> bool:
    try:
        socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
    except OSError:
        return False
    return True


def _why_not_bound(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} on {host} is taken by another program; choose another one with --port."
        case errno.EACCES | errno.EPERM:
            return f"Port {port} on {host} may not be opened by this user; choose one above 1023 with --port."
        case errno.EADDRNOTAVAIL:
            return f"This machine has no address {host}; choose another one with --host."
        case _:
            return f"Cannot listen on {host}, port {port}: {error.strerror or error}."
