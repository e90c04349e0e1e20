"""The endpoints. Each handler takes a Call and returns the answer, or raises an AserveError for the dispatcher to
send."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final, TypeVar
from urllib.parse import unquote

import orjson
from aiohttp import web

import aserve
from aserve.errors import (
    InvalidRequest,
    MethodNotAllowed,
    ModelNotFound,
    NotFound,
    Unsupported,
)
from aserve.obs.metrics import CONTENT_TYPE
from aserve.server.answers import collect, num_logprobs
from aserve.server.call import Call
from aserve.server.dialects import ChatDialect, Dialect, TextDialect
from aserve.server.intake import Intake
from aserve.server.options import ServerOptions
from aserve.server.ports import Engine, Logger, Metrics, Trace
from aserve.server.prepare import Prepared, Preparer
from aserve.server.prompts import TemplateChoices, chat_ids, chat_text, check_ids
from aserve.server.response_routes import ResponsesApi
from aserve.server.schema import (
    ApplyTemplateRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
    convert,
    parse_json,
)
from aserve.server.stream_sse import stream_events
from aserve.server.trace_route import TraceRoute

Handler = Callable[[Call], Awaitable[web.StreamResponse]]
T = TypeVar("T")

MAX_INLINE_LOGPROBS: Final = 1000
"""Entries of logprobs, alternatives included, in an answer that is built on the loop; each takes about 2 us."""


@dataclass(frozen=True, slots=True)
class Route:
    """pattern: a path, with ``{id}`` for its variable part; also the label in metrics. is_open: needs no key."""

    method: str
    pattern: str
    handler: Handler
    is_open: bool = False


class Router:
    """Finds a route: an exact path, or one with a variable part between a prefix and a suffix.

    All routes need a key unless they say otherwise, and so does the search for one that is not there.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self._exact: dict[str, dict[str, Route]] = {}
        self._around: dict[tuple[str, str], dict[str, Route]] = {}
        for route in routes:
            prefix, is_pattern, suffix = route.pattern.partition("{id}")
            table = (
                self._around.setdefault((prefix, suffix), {})
                if is_pattern
                else self._exact.setdefault(route.pattern, {})
            )
            table[route.method] = route
            if route.method == "GET":
                table["HEAD"] = route
        # The longer suffix first: "{id}" alone would take every path of "{id}/cancel".
        self._around = dict(sorted(self._around.items(), key=lambda entry: -len(entry[0][1])))

    def methods(self, path: str) -> dict[str, Route]:
        """Routes of a raw path by method; empty if there is none."""
        return self._match(path)[0]

    def _match(self, path: str) -> tuple[dict[str, Route], str]:
        if path in self._exact:
            return self._exact[path], ""
        for (prefix, suffix), routes in self._around.items():
            if path.startswith(prefix) and path.endswith(suffix) and len(path) >= len(prefix) + len(suffix):
                return routes, path[len(prefix) : len(path) - len(suffix)]
        return {}, ""

    def find(self, method: str, path: str) -> tuple[Route, str]:
        """The route and its parameter, unquoted. Raises NotFound and MethodNotAllowed."""
        routes, parameter = self._match(path)
        if not routes:
            raise NotFound("There is nothing at this path.", code="not_found")
        route = routes.get(method)
        if route is None:
            raise MethodNotAllowed(f"This path takes {allowed_methods(routes)}.", code="method_not_allowed")
        return route, unquote(parameter)


def allowed_methods(routes: dict[str, Route]) -> str:
    return ", ".join(sorted({*routes, "OPTIONS"}))


class Api:
    """The handlers, and what they share."""

    def __init__(
        self,
        *,
        engine: Engine,
        preparer: Preparer,
        intake: Intake,
        responses: ResponsesApi,
        options: ServerOptions,
        model_names: Sequence[str],
        log: Logger,
        metrics: Metrics,
        trace: Trace | None,
        more_statistics: Callable[[], dict[str, Any]],
    ) -> None:
        self._engine = engine
        self._preparer = preparer
        self._intake = intake
        self._responses = responses
        self._options = options
        self._model_names = tuple(model_names)
        self._log = log
        self._metrics = metrics
        self._trace = TraceRoute(trace)
        self._more_statistics = more_statistics
        self._scraping = asyncio.Lock()
        self._started_at = int(time.time())

    def routes(self) -> list[Route]:
        return [
            Route("POST", "/v1/chat/completions", self.chat_completions),
            Route("POST", "/v1/completions", self.completions),
            Route("GET", "/v1/models", self.models),
            Route("GET", "/v1/models/{id}", self.model),
            Route("POST", "/tokenize", self.tokenize),
            Route("POST", "/detokenize", self.detokenize),
            Route("POST", "/apply-template", self.apply_template),
            Route("GET", "/health", self.health, is_open=True),
            Route("GET", "/ready", self.ready, is_open=True),
            Route("GET", "/metrics", self.metrics, is_open=True),
            Route("GET", "/version", self.version),
            Route("GET", "/v1/stats", self.stats),
            Route("GET", "/v1/trace", self._trace.get),
            Route("POST", "/reset_prefix_cache", self.reset_prefix_cache),
            Route("DELETE", "/v1/requests/{id}", self.abort_request),
            Route("POST", "/v1/responses", self._responses.create),
            Route("GET", "/v1/responses", self._responses.socket),
            Route("GET", "/v1/responses/{id}", self._responses.retrieve),
            Route("DELETE", "/v1/responses/{id}", self._responses.delete),
            Route("POST", "/v1/responses/{id}/cancel", self._responses.cancel),
            Route("POST", "/v1/embeddings", partial(self._not_yet, "The embeddings API")),
            Route("POST", "/v1/messages", partial(self._not_yet, "The Messages API")),
        ]

    # --- generation

    async def chat_completions(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        prepared = await self._intake.off_loop(len(body), partial(self._preparer.chat, body))
        return await self._generate(
            call, prepared, ChatDialect(prepared, self._name_of(prepared), self._preparer.tokenizer)
        )

    async def completions(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        prepared = await self._intake.off_loop(len(body), partial(self._preparer.completion, body))
        return await self._generate(
            call, prepared, TextDialect(prepared, self._name_of(prepared), self._preparer.tokenizer)
        )

    def _name_of(self, prepared: Prepared[Any]) -> str:
        """The model's name in the answer: the alias that the client used."""
        return prepared.fields.model or self._model_names[0]

    async def _generate(self, call: Call, prepared: Prepared[Any], dialect: Dialect) -> web.StreamResponse:
        self._intake.note_unknown(call, prepared.unknown)
        fields: SamplingFields = prepared.fields
        with self._intake.open_generation(call.owner):
            stream = self._intake.submit(
                prepared,
                request_id=dialect.id,
                owner=call.owner,
                elapsed_s=call.elapsed_s,
                prompt_param=dialect.prompt_param,
                default_tokens=dialect.default_tokens,
            )
            call.facts |= {"id": dialect.id, "stream": bool(fields.stream)}
            try:
                if fields.stream:
                    outcome = await stream_events(
                        call.request,
                        stream,
                        dialect.encoder(stream),
                        headers=call.headers,
                        keepalive_s=self._options.keepalive_comment_s,
                        is_draining=lambda: self._intake.is_draining,
                    )
                    if outcome.fault is not None:
                        call.facts["fault"] = outcome.fault.code
                    if outcome.cause is not None:
                        call.facts["exc_info"] = outcome.cause
                    return outcome.response
                choices = await collect(stream, prepared.num_choices, is_draining=lambda: self._intake.is_draining)
                build = partial(dialect.answer, stream, choices)
                is_small = num_logprobs(choices) <= MAX_INLINE_LOGPROBS
                return call.json(build() if is_small else await asyncio.to_thread(build))
            finally:
                stream.close()
                usage = stream.usage
                call.facts |= {
                    "prompt_tokens": usage.prompt_tokens or prepared.num_prompt_tokens,
                    "cached_tokens": usage.cached_tokens,
                    "completion_tokens": usage.completion_tokens,
                }

    # --- text and tokens

    async def tokenize(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        return call.json(await self._intake.off_loop(len(body), partial(self._tokenized, body)))

    def _tokenized(self, body: bytes) -> bytes:
        preparer = self._preparer
        fields = convert(parse_json(body, preparer.max_json_depth), TokenizeRequest)
        preparer.check_model(fields.model)
        text = fields.content if fields.prompt is None else fields.prompt
        if fields.messages is not None:
            choices = TemplateChoices.of(
                fields.messages,
                add_generation_prompt=fields.add_generation_prompt,
                continue_final_message=fields.continue_final_message,
                chat_template_kwargs=fields.chat_template_kwargs,
                reasoning_effort=fields.reasoning_effort,
            )
            ids = chat_ids(preparer.renderer, fields.messages, choices)
        elif text is not None:
            ids = preparer.renderer.encode_prompt(text, add_special_tokens=fields.add_special_tokens is not False)
        else:
            raise InvalidRequest("'prompt' or 'messages' is required.", param="prompt")
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": preparer.facts.max_model_len, "tokens": ids}
        if fields.return_token_strs:
            answer["token_strs"] = [preparer.tokenizer.token_bytes(token).decode("utf-8", "replace") for token in ids]
        return orjson.dumps(answer)

    async def detokenize(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        return call.json(await self._intake.off_loop(len(body), partial(self._detokenized, body)))

    def _detokenized(self, body: bytes) -> bytes:
        preparer = self._preparer
        fields = convert(parse_json(body, preparer.max_json_depth), DetokenizeRequest)
        preparer.check_model(fields.model)
        ids = check_ids(fields.tokens, preparer.facts.vocab_size, "tokens")
        return orjson.dumps({"prompt": preparer.tokenizer.decode(ids, skip_special_tokens=False)})

    async def apply_template(self, call: Call) -> web.StreamResponse:
        body = await self._intake.work_body(call)
        return call.json(await self._intake.off_loop(len(body), partial(self._templated, body)))

    def _templated(self, body: bytes) -> bytes:
        preparer = self._preparer
        fields = convert(parse_json(body, preparer.max_json_depth), ApplyTemplateRequest)
        preparer.check_model(fields.model)
        return orjson.dumps(
            {"prompt": chat_text(preparer.renderer, fields.messages, preparer.template_choices(fields))}
        )

    # --- what is served, and how it is

    async def models(self, call: Call) -> web.StreamResponse:
        return call.json(orjson.dumps({"object": "list", "data": [self._model(name) for name in self._model_names]}))

    async def model(self, call: Call) -> web.StreamResponse:
        if call.parameter not in self._model_names:
            raise ModelNotFound(f"The model '{call.parameter[:128]}' is not served here.", param="model")
        return call.json(orjson.dumps(self._model(call.parameter)))

    def _model(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "aserve",
            "root": self._model_names[0],
            "parent": None,
            "max_model_len": self._engine.info.max_model_len,
        }

    async def health(self, call: Call) -> web.StreamResponse:
        health = self._engine.health()
        return self._condition(call, health.alive, health.reason)

    async def ready(self, call: Call) -> web.StreamResponse:
        if self._intake.is_draining:
            return self._condition(call, False, "draining")
        health = self._engine.health()
        return self._condition(call, health.alive and health.ready, health.reason)

    @staticmethod
    def _condition(call: Call, is_well: bool, reason: str) -> web.Response:
        if is_well:
            return call.json(b'{"status":"ok"}')
        return call.json(orjson.dumps({"status": "unavailable", "reason": reason}), status=503)

    async def metrics(self, call: Call) -> web.StreamResponse:
        async with self._scraping:  # one page at a time: they share a thread pool with what is in a hurry
            page = await asyncio.to_thread(self._metrics.render, self._engine.statistics())
        return web.Response(body=page, headers={**call.headers, "Content-Type": CONTENT_TYPE})

    async def version(self, call: Call) -> web.StreamResponse:
        return call.json(orjson.dumps({"version": aserve.__version__}))

    async def stats(self, call: Call) -> web.StreamResponse:
        figures = {"engine": asdict(self._engine.statistics()), **self._more_statistics()}
        return call.json(orjson.dumps(figures, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS))

    async def reset_prefix_cache(self, call: Call) -> web.StreamResponse:
        return call.json(orjson.dumps({"num_blocks": self._engine.flush_prefix_cache()}))

    async def abort_request(self, call: Call) -> web.StreamResponse:
        if not call.parameter:
            raise InvalidRequest("The id of the request is required.", param="id")
        if not self._engine.abort(call.parameter, owner=call.owner):
            raise NotFound("No running request of yours has this id.", param="id", code="request_not_found")
        return call.json(orjson.dumps({"id": call.parameter, "object": "request", "aborted": True}))

    async def _not_yet(self, what: str, call: Call) -> web.StreamResponse:
        raise Unsupported(f"{what} is not supported by this server yet.")
