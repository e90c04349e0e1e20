"""JSON in and out: orjson where it is installed, else the standard library."""

import json
from collections.abc import Callable
from typing import Any

loads: Callable[[bytes], Any]

try:
    import orjson
except ImportError:
    HAS_ORJSON = False
    loads = json.loads

    def dumps(value: Any) -> bytes:
        """Return compact UTF-8 JSON."""
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
else:
    HAS_ORJSON = True
    loads = orjson.loads

    def dumps(value: Any) -> bytes:
        """Return compact UTF-8 JSON."""
        return orjson.dumps(value)
