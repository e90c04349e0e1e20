"""What the server needs from the other layers, as narrow as it uses them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, GenerationRequest, Usage
from aserve.engine.ports import RunnerInfo
from aserve.engine.stream import Timings


class Stream(Protocol):
    """One call's deltas, for a single reader (``engine/stream.py``)."""

    @property
    def usage(self) -> Usage: ...

    @property
    def timings(self) -> Timings: ...

    @property
    def num_choices(self) -> int: ...

    @property
    def finished(self) -> bool:
        """Whether the last delta of every choice was taken."""
        ...

    async def next(self) -> list[Delta]:
        """What is new, waiting for it; [] once all has been taken. Loses nothing when cancelled."""
        ...

    def push_to(self, sink: Callable[[Delta], bool]) -> None:
        """Hand further deltas but the last ones to ``sink`` as they arrive; those that it does not take are read."""
        ...

    def close(self) -> None:
        """Abort what still runs. Idempotent."""
        ...


class Health(Protocol):
    """alive: the engine's loop ticked lately. ready: it would take a request now. reason: why not, for people."""

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def reason(self) -> str: ...


class Engine(Protocol):
    """The engine's facade (``engine/engine.py``)."""

    @property
    def info(self) -> RunnerInfo: ...

    @property
    def tokenizer(self) -> "Vocabulary": ...

    @property
    def caches_prefixes(self) -> bool:
        """Whether what a prompt leaves in the KV cache can serve later requests."""
        ...

    def fit(self, num_prompt_tokens: int, max_tokens: int | None, default: int | None = None) -> int: ...

    def submit_nowait(self, request: GenerationRequest) -> Stream: ...

    def abort(self, request_id: str, reason: FinishReason = ..., *, owner: str | None = None) -> bool: ...

    async def drain(self, timeout_s: float) -> None: ...

    def flush_prefix_cache(self) -> int: ...

    def statistics(self) -> Any:
        """A dataclass of plain figures."""
        ...

    def health(self) -> Health: ...


class Vocabulary(Protocol):
    """The tokenizer, as far as the wire needs it: ids to text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = False) -> list[int]: ...

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token: int) -> bytes: ...


class Renderer(Protocol):
    """Prompts to token ids. Called from worker threads too; faults of the client's are ``errors.InvalidRequest``."""

    def encode_prompt(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> list[int]:
        """Messages are {"role", "content"} with plain text; markers inside the content are text."""
        ...

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        """The text that ``encode_chat`` would encode."""
        ...


class Logger(Protocol):
    """structlog's calls. Never blocks, never raises."""

    def debug(self, event: str, /, **fields: Any) -> Any: ...

    def info(self, event: str, /, **fields: Any) -> Any: ...

    def warning(self, event: str, /, **fields: Any) -> Any: ...

    def error(self, event: str, /, **fields: Any) -> Any: ...


class Metrics(Protocol):
    """Counters for the wire, and the page that Prometheus reads."""

    def http_request(self, route: str, method: str, status: int, seconds: float) -> None:
        """One answered request. All labels come from closed sets: the route table, its methods, our statuses."""
        ...

    def render(self, statistics: Any) -> bytes:
        """The text format, with the engine's figures of this moment."""
        ...


class TraceCut(Protocol):
    """A part of the trace that changes no more."""

    def pieces(self) -> Iterator[bytes]:
        """The file in parts. May be called in any thread."""
        ...


class Trace(Protocol):
    """What the engine did lately (``engine/trace.py``)."""

    def cut(self, seconds: float) -> TraceCut:
        """The last ``seconds`` as they stand. Called on the loop."""
        ...
