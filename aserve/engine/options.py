"""The engine's options: how much may wait, and how far a reader may lag."""

from dataclasses import dataclass, field
from typing import Any


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """Section ``[engine]``."""

    max_queue_requests: int = _option(
        1024, "Sequences that may wait; a further request is refused with 503 and Retry-After."
    )
    max_queue_tokens: int = _option(0, "Uncached prompt tokens that may wait; 0 takes eight times the KV pool.")
    mailbox_bytes: int = _option(65536, "Text that a stream holds for its reader before it counts as lagging.")
    mailbox_events: int = _option(256, "Deltas that a stream holds before further ones are joined to the last.")
    park_after_s: float = _option(
        1.0,
        "A reader that lags for this long, or a tenth of it while others wait, has its request parked: off the device "
        "until it has read.",
    )
    stall_timeout_s: float = _option(30.0, "A reader that lags for this long loses its request.")
    request_timeout_s: float = _option(
        0.0, "Time limit of a request from its arrival; 0 is none. A request may ask for less."
    )
    fan_out_slice: int = _option(64, "Streams that a landing is delivered to before the loop gets a turn.")
    max_joined_steps: int = _option(
        2,
        "Steps whose tokens go out in one write to each of 32 streams or more, where writing each by itself would take "
        "the loop more than a quarter of the time between landings; 1 is never.",
    )
    watchdog_s: float = _option(120.0, "A step in flight for longer than this means that the device hangs.")
