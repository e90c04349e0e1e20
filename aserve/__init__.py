"""aserve: an asyncio-first server for language models. Importing it loads neither torch nor aiohttp."""

__version__ = "0.1.0"
