"""What every endpoint that makes work shares: reading the body, counting what is open, asking the engine."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from aserve.core.request import SamplingParams
from aserve.engine.generation import GenerationRequest
from aserve.errors import ContextLengthExceeded, DeadlineExceeded, Draining, RateLimited
from aserve.server.body import check_json_headers, read_body
from aserve.server.call import Call, plain_names
from aserve.server.options import LimitOptions
from aserve.server.ports import Engine, Logger, Stream
from aserve.server.prepare import Prepared
from aserve.server.sampling import stop_strings, with_length
from aserve.server.schema import SamplingFields
from aserve.server.workers import Workers

T = TypeVar("T")

MAX_NOTED_NAMES: Final = 256
"""Unknown fields that are logged, each once; clients choose the names, so there must be an end."""


class Intake:
    """Takes work in, until the server drains. ``is_draining`` is written by the server only."""

    def __init__(self, engine: Engine, workers: Workers, limits: LimitOptions, log: Logger) -> None:
        self.is_draining = False
        self.body_cap = limits.body_cap(engine.info.max_model_len)
        self._engine = engine
        self._workers = workers
        self._limits = limits
        self._log = log
        self._num_open: Counter[str] = Counter()  # generations by owner
        self._noted_names: set[str] = set()

    # --- bodies

    async def work_body(self, call: Call) -> bytes:
        """The body of a request that makes work, refused before it is read while the server drains."""
        check_json_headers(call.request)
        self.check_open()
        return await read_body(call.request, cap=self.body_cap, timeout_s=self._limits.body_timeout_s)

    def check_open(self) -> None:
        """Raises Draining."""
        if self.is_draining:
            raise Draining("The server is shutting down; try another one.", retry_after_s=1.0)

    async def off_loop(self, num_bytes: int, function: Callable[[], T]) -> T:
        """Run at once for little input, in a worker thread for much."""
        if num_bytes <= self._limits.offload_bytes:
            return function()
        return await self._workers.run(function)

    def note_unknown(self, call: Call, unknown: list[str]) -> None:
        """Name the fields that are ignored, in the answer's header and once in the log."""
        if not unknown:
            return
        names = plain_names(unknown)
        call.headers["x-aserve-ignored-params"] = ", ".join(names)
        for name in names:
            if name not in self._noted_names and len(self._noted_names) < MAX_NOTED_NAMES:
                self._noted_names.add(name)
                self._log.warning("request.unknown_field", name=name, route=call.route)

    # --- generations

    @property
    def num_open(self) -> int:
        """Generations that have not been answered to the end."""
        return self._num_open.total()

    @contextmanager
    def open_generation(self, owner: str) -> Iterator[None]:
        """Counts one among its key's; raises RateLimited where that key has its share already."""
        limit = self._limits.max_requests_per_key
        if owner and limit and self._num_open[owner] >= limit:
            raise RateLimited(f"This key has {limit} requests open already.", retry_after_s=1.0)
        self._num_open[owner] += 1
        try:
            yield
        finally:
            self._num_open[owner] -= 1
            if not self._num_open[owner]:
                del self._num_open[owner]

    def submit(
        self,
        prepared: Prepared[Any],
        *,
        request_id: str,
        owner: str,
        elapsed_s: float,
        prompt_param: str,
        default_tokens: int | None = None,
    ) -> Stream:
        """elapsed_s: since the request arrived, for its time limit. prompt_param: the field to blame for a prompt that
        is too long. default_tokens: None is all the room there is."""
        fields: SamplingFields = prepared.fields
        self.check_open()  # once more: the body may have taken its time
        deadline_s = None
        if fields.timeout is not None:
            deadline_s = fields.timeout - elapsed_s
            if deadline_s <= 0:
                raise DeadlineExceeded("The request's time limit passed before it could be queued.")
        params = self._with_length(prepared, default_tokens, prompt_param)
        return self._engine.submit_nowait(
            GenerationRequest(
                request_id=request_id,
                prompts=tuple(prompt.ids for prompt in prepared.prompts),
                params=params,
                n=prepared.n,
                seed=None if fields.seed is None else fields.seed & 0xFFFF_FFFF_FFFF_FFFF,
                stop=stop_strings(fields),
                include_stop_str_in_output=bool(fields.include_stop_str_in_output),
                ignore_eos=bool(fields.ignore_eos),
                skip_special_tokens=fields.skip_special_tokens is not False,
                priority=fields.priority or 0,
                # Hits across keys would let one client time what another one's prompts begin with.
                cache_salt=f"{owner[:32]}:{fields.cache_salt or ''}" if owner else fields.cache_salt or "",
                deadline_s=deadline_s,
                owner=owner,
            )
        )

    def _with_length(self, prepared: Prepared[Any], default: int | None, prompt_param: str) -> SamplingParams:
        """The params with the length that fits all prompts."""
        try:
            lengths = [self._engine.fit(len(prompt.ids), prepared.max_tokens, default) for prompt in prepared.prompts]
        except ContextLengthExceeded as error:
            error.param = prepared.max_tokens_param if error.param == "max_tokens" else prompt_param
            raise
        return with_length(prepared.params, min(lengths))
