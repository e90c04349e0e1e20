"""A load generator for OpenAI-compatible servers: it speaks only the wire, like a customer, and distrusts itself.

``loadgen run chat --base-url http://127.0.0.1:8000`` plays a scenario, reads the streams over SSE or the Responses
websocket, and reports latencies from the *intended* time and from the send side by side, so that a slow server cannot
hide its queue. It reports its own lag and CPU too and says "client-bound" where the figures are its own.

From the wire inwards: ``http_parser``, ``sse_parser``, ``ws_parser`` (bytes to events) -> ``answer`` (events to a
record) -> ``exchange`` (one request: bytes in, ``sample`` out) -> ``client`` (sockets). What to do: ``arrivals``
(when), ``words``, ``lengths``, ``traces``, ``work`` (what), ``scenario`` (files) -> ``options``. Doing it: ``probe``
(the server's own word), ``alarm``, ``driver`` (one process), ``runner`` (several) -> ``result``. What came of it:
``metrics``, ``figures``, ``report``, ``page``, ``chrome``, ``live``; ``sweep`` and ``compare`` make many runs. ``stub``
is a server to try all this on. Only ``alarm``, ``client``, ``driver``, ``runner`` and ``stub`` wait for anything. It
needs nothing but the standard library; uvloop and orjson make it faster where they are installed.
"""

__version__ = "0.1.0"
