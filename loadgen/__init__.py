"""A load generator for OpenAI-compatible servers: it speaks only the wire, like a customer, and distrusts itself.

``python -m loadgen run --base-url http://127.0.0.1:8000 --model NAME`` sends chat or completion requests, reads their
event streams, and reports latencies from the *intended* time and from the send side by side, so that a slow server
cannot hide its queue. It reports its own lag and CPU too and says "client-bound" where the figures are its own.

From the wire inwards: ``http_parser`` and ``sse_parser`` (bytes to events) -> ``answer`` (events to a record) ->
``exchange`` (one request: bytes in, ``sample`` out). Around them: ``client`` (sockets), ``arrivals`` (when), ``work``
(what), ``options``, ``driver`` (one process), ``runner`` (several), ``result``, ``metrics`` and ``report``. Only
``client``, ``driver`` and ``runner`` wait for anything. It needs nothing but the standard library; uvloop and orjson
make it faster where they are installed.
"""

__version__ = "0.1.0"
