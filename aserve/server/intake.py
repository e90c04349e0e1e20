"""What every endpoint that makes work shares: reading the body, counting what is open, asking the engine."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

from aserve.errors import DeadlineExceeded, Draining, RateLimited
from aserve.server.body import check_json_headers, read_body
from aserve.server.call import Call, plain_names
from aserve.server.options import LimitOptions
from aserve.server.ports import Engine, Logger, Stream
from aserve.server.prepare import Prepared
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
        """elapsed_s: since the request arrived, for its time limit. The others: as ``Prepared.request``."""
        fields: SamplingFields = prepared.fields
        self.check_open()  # once more: the body may have taken its time
        deadline_s = None
        if fields.timeout is not None:
            deadline_s = fields.timeout - elapsed_s
            if deadline_s <= 0:
                raise DeadlineExceeded("The request's time limit passed before it could be queued.")
        return self._engine.submit_nowait(
            prepared.request(
                request_id,
                self._engine.fit,
                prompt_param=prompt_param,
                default_tokens=default_tokens,
                deadline_s=deadline_s,
                owner=owner,
            )
        )
