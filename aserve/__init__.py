"""aserve: an asyncio-first server for language models. Importing it loads neither torch nor aiohttp.

``Engine`` (``aserve.embedding``) is loaded when it is first asked for.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aserve.embedding import Engine

__version__ = "0.1.0"

__all__ = ["Engine", "__version__"]


def __getattr__(name: str) -> object:
    if name == "Engine":
        from aserve.embedding import Engine

        return Engine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
