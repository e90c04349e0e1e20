"""The HTTP side: aiohttp's protocol below, our own routing, validation, framing and timers above it."""
