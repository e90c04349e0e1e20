"""The async shell around the core: asyncio, core, text and obs; no torch, no aiohttp."""
