"""Text to tokens and back: tokenizers, chat templates, incremental decoding, stop strings. No asyncio, no torch."""
