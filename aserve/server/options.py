"""The server's options: where it listens and who may talk to it, and how much one client may take."""

from dataclasses import dataclass, field
from typing import Any, Literal

MIN_BODY_CAP = 1 << 20
"""The body cap never falls below this, however small the context."""
BODY_BYTES_PER_TOKEN = 8
"""English text has about 4 bytes a token; JSON escapes and other scripts take the rest."""


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Section ``[server]``."""

    host: str = _option("127.0.0.1", "Address to listen on.")
    port: int = _option(8000, "Port to listen on; 0 lets the system choose.")
    api_keys: tuple[str, ...] = _option(
        (), "Keys that clients must send as `Authorization: Bearer KEY`; none means no check."
    )
    cors_origins: tuple[str, ...] = _option(
        (), 'Origins of web pages that may call the server, such as "https://chat.example"; "*" is any.'
    )
    allowed_hosts: tuple[str, ...] = _option(
        (),
        "Names that the Host header may carry besides loopback ones; if none is given, only a loopback address checks.",
    )
    keepalive_comment_s: float = _option(15.0, "Silence after which a stream carries a keep-alive comment.")
    websocket_heartbeat_s: float = _option(
        20.0, "Silence of a websocket's client after which it is pinged; half as long again, and it is cut off."
    )
    drain_timeout_s: float = _option(30.0, "How long running requests may go on after the first SIGTERM.")
    queue_full_status: Literal[503, 429] = _option(503, "Status of the answer while the queue is full.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitOptions:
    """Section ``[limits]``. Every bound here exists because a client without it could hold the loop, a socket or
    memory."""

    idle_timeout_s: float = _option(30.0, "A connection without a request is closed after this.")
    headers_timeout_s: float = _option(10.0, "From the first byte of a request to the end of its headers.")
    body_timeout_s: float = _option(30.0, "From the end of the headers to the end of the body.")
    write_stall_s: float = _option(30.0, "A peer that takes nothing of a full send buffer for this long is cut off.")
    write_buffer_bytes: int = _option(65536, "Bytes a connection may hold unsent before its writer waits.")
    max_connections: int = _option(0, "Connections open at once; 0 takes the limit on file descriptors less 64.")
    max_body_bytes: int = _option(0, "Largest request body; 0 is 8 bytes a token of context, at least 1 MiB.")
    max_json_depth: int = _option(64, "Deepest nesting of arrays and objects in a body.")
    max_requests_per_key: int = _option(0, "Generations that one key may have open at once; 0 is no limit.")
    max_prompts: int = _option(64, "Sequences that one request may create: prompts times n.")
    max_stored_responses: int = _option(256, "Finished responses that can be retrieved or gone on from by id.")
    max_stored_bytes: int = _option(1 << 24, "Bytes of those responses and their conversations; the oldest go first.")
    max_websockets: int = _option(0, "Websockets open at once, beyond which one is closed with 1013; 0 is no limit.")
    max_lanes: int = _option(32, "Lanes (stream_id) that run at once on one websocket.")
    max_lane_requests: int = _option(64, "Requests that may wait in the lanes of one websocket.")
    max_socket_responses: int = _option(64, "Responses of one websocket that a later one may go on from.")
    max_socket_history_bytes: int = _option(1 << 22, "Bytes of the conversations that one websocket is remembered by.")
    # A 4 KiB text takes 1 to 2.3 ms to tokenise; the loop's other streams wait for no longer than that.
    offload_bytes: int = _option(4096, "Bodies above this are parsed, templated and tokenised in a worker thread.")
    num_workers: int = _option(2, "Threads that parse, template and tokenise.")
    max_pending_work: int = _option(64, "Bodies that may wait for a worker thread; a further one is refused with 503.")

    def body_cap(self, max_model_len: int) -> int:
        """Bytes that a body may have when the context holds ``max_model_len`` tokens."""
        return self.max_body_bytes or max(MIN_BODY_CAP, BODY_BYTES_PER_TOKEN * max_model_len)
