"""Responses from a checked body to the end: what HTTP and the websocket share."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import orjson

from aserve.core.request import FinishReason, SamplingParams
from aserve.engine.generation import Delta
from aserve.errors import AserveError, GenerationFailed, InvalidRequest
from aserve.server.intake import Intake
from aserve.server.options import LimitOptions
from aserve.server.ports import Engine, Stream
from aserve.server.prepare import Preparer
from aserve.server.problems import fault_of
from aserve.server.response_events import ResponseEvents, ResponseState, ResponseStatus
from aserve.server.response_store import ResponseMemory, StoredResponse, not_found
from aserve.server.responses import Body, Conversation, PreparedResponse, ResponsePreparer, ResponsesRequest
from aserve.server.sse import escape_line_breaks


@dataclass(slots=True, eq=False)
class Run:
    """One response that is being made. memory: where it is remembered besides the server's store."""

    owner: str
    fields: ResponsesRequest
    conversation: Conversation
    state: ResponseState
    stream: Stream
    memory: ResponseMemory | None

    def facts(self) -> dict[str, Any]:
        """For the log."""
        usage = self.stream.usage
        return {
            "id": self.state.id,
            "response_status": str(self.state.status),
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
        }


class ResponseCalls:
    """Makes responses, and knows those that are being made and those that were."""

    def __init__(
        self, *, engine: Engine, preparer: Preparer, intake: Intake, limits: LimitOptions, default_model: str
    ) -> None:
        self._engine = engine
        self._preparer = ResponsePreparer(preparer)
        self._token_bytes = preparer.tokenizer.token_bytes
        self._intake = intake
        self._default_model = default_model
        self._runs: dict[str, Run] = {}
        self._store = ResponseMemory(max_responses=limits.max_stored_responses, max_bytes=limits.max_stored_bytes)

    # --- making one

    async def prepare(self, body: Body, owner: str, memory: ResponseMemory | None) -> PreparedResponse:
        """The prompt, from the body and the conversation that it goes on from. Raises InvalidRequest."""
        previous = None
        if (previous_id := body.fields.previous_response_id) is not None:
            previous = self._previous(previous_id, owner, memory)
        num_bytes = body.num_bytes + (previous.num_bytes if previous is not None else 0)
        return await self._intake.off_loop(num_bytes, partial(self._preparer.prepare, body, previous))

    def _previous(self, response_id: str, owner: str, memory: ResponseMemory | None) -> Conversation:
        """The socket's own memory first; the store also has what an earlier socket left there."""
        found = memory.find(response_id, owner) if memory is not None else None
        found = found or self._store.find(response_id, owner)
        if found is None:
            raise InvalidRequest(
                "There is no finished response with this id, or it is no longer remembered: send the whole input.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return found.conversation

    @contextmanager
    def open(
        self, ready: PreparedResponse, *, owner: str, elapsed_s: float, memory: ResponseMemory | None = None
    ) -> Iterator[Run]:
        """Submit it; on the way out whatever still runs is aborted. elapsed_s: since the request arrived."""
        fields = ready.prepared.fields
        response_id = f"resp_{secrets.token_hex(16)}"
        with self._intake.open_generation(owner):
            stream = self._intake.submit(
                ready.prepared, request_id=response_id, owner=owner, elapsed_s=elapsed_s, prompt_param="input"
            )
            state = ResponseState(
                id=response_id,
                item_id=f"msg_{secrets.token_hex(16)}",
                created_at=int(time.time()),
                model=fields.model or self._default_model,
                echo=_echo(fields, ready.prepared.params),
                usage=stream.usage,
                cache_block_size=self._engine.info.block_size if self._engine.caches_prefixes else None,
                token_bytes=self._token_bytes,
                generates=fields.generates,
                num_top_logprobs=fields.num_top_logprobs,
            )
            run = Run(owner, fields, ready.conversation, state, stream, memory)
            self._runs[response_id] = run
            try:
                yield run
            finally:
                stream.close()
                del self._runs[response_id]

    async def next_events(self, run: Run, events: ResponseEvents) -> bytes:
        """Wait for news; a fault of the engine becomes the last event. What has ended is remembered on return."""
        return await self.encode(run, events, await run.stream.next())

    async def encode(self, run: Run, events: ResponseEvents, deltas: list[Delta]) -> bytes:
        out = []
        try:
            self.check(run, deltas)
        except AserveError as error:
            out.append(events.fail(error))
        else:
            for delta in deltas:
                encode = partial(events.encode, delta)
                is_large = delta.finish is not None and run.state.is_large
                out.append(await asyncio.to_thread(encode) if is_large else encode())
        if run.state.has_ended:
            await self._remember(run)
        return b"".join(out)

    async def collect(self, run: Run) -> bytes:
        """The whole response as JSON. Raises what cut it."""
        while not run.state.has_ended:
            deltas = await run.stream.next()
            self.check(run, deltas)
            for delta in deltas:
                run.state.take(delta)
        await self._remember(run)
        return await _rendered(run.state)

    def check(self, run: Run, deltas: list[Delta]) -> None:
        """Raises what the stream's end stands for, unless it is an end; the abort of a cancelled response is one."""
        if not deltas:
            raise GenerationFailed("The answer ended without a reason.")
        for delta in deltas:
            if delta.finish is FinishReason.ABORT and run.state.is_cancelled:
                continue
            if (fault := fault_of(delta, draining=self._intake.is_draining)) is not None:
                raise fault

    async def _remember(self, run: Run) -> None:
        """What failed is forgotten: it cannot be gone on from."""
        state = run.state
        if state.status is ResponseStatus.FAILED:
            return
        conversation = run.conversation
        if state.generates:
            conversation = conversation.plus(({"role": "assistant", "content": state.text},))
        if run.memory is not None:
            run.memory.put(state.id, StoredResponse(owner=run.owner, conversation=conversation))
        if run.fields.store is not False:
            json = await _rendered(state)
            self._store.put(state.id, StoredResponse(owner=run.owner, conversation=conversation, json=json))

    # --- those that there are

    async def retrieve(self, response_id: str, owner: str) -> bytes:
        """The response object as JSON. Raises NotFound."""
        run = self._runs.get(response_id)
        if run is not None and run.owner == owner:
            return await _rendered(run.state)
        stored = self._store.find(response_id, owner)
        if stored is None:
            raise not_found()
        return stored.json

    def cancel(self, response_id: str, owner: str) -> bool:
        """End a running response where it is: it keeps its text. False if none of this owner's runs by this id."""
        run = self._runs.get(response_id)
        if run is None or run.owner != owner:
            return False
        run.state.is_cancelled = True
        self._engine.abort(response_id, owner=owner)
        return True

    def forget(self, response_id: str, owner: str) -> None:
        """Raises NotFound."""
        self._store.remove(response_id, owner)


async def _rendered(state: ResponseState) -> bytes:
    def render() -> bytes:
        return escape_line_breaks(orjson.dumps(state.resource()))

    return await asyncio.to_thread(render) if state.is_large else render()


def _echo(fields: ResponsesRequest, params: SamplingParams) -> dict[str, Any]:
    """What the response object repeats of the request, defaults filled in."""
    effort = fields.reasoning.effort if fields.reasoning is not None else None
    return {
        "instructions": fields.instructions,
        "previous_response_id": fields.previous_response_id,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": None,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_logprobs": fields.top_logprobs or 0,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "truncation": fields.truncation or "disabled",
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": None if effort is None else {"effort": effort, "summary": None},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "background": False,
        "store": fields.store is not False,
        "service_tier": "default",
        "metadata": fields.metadata or {},
        "safety_identifier": fields.safety_identifier,
        "prompt_cache_key": fields.prompt_cache_key,
        "user": fields.user,
    }
