"""Cost of a streamed token in text/: detokenizing it and looking for stops. The tiny tokenizer, or a model's folder.

python -m tests.text.bench_text [FOLDER]
"""

# ruff: noqa: T201 - it prints its results

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from tokenizers.decoders import DecodeStream

from aserve.text.chat_template import ChatTemplate, encode_chat
from aserve.text.stops import StopMatcher
from aserve.text.tokenizer import HFTokenizer

TINY_FOLDER = Path(__file__).parents[1] / "data" / "tiny_tokenizer"
TEXT = (
    "The quick brown fox jumps over the lazy dog; 13 of them, to be exact.\n\nWhat is the capital of France? It is "
    "Paris, on the river Seine. def add(first, second):\n    return first + second\n"
)
STOPS = ("\nUser:", "</end>", "<|im_end|>", "###")
NUM_TOKENS = 8000


def us_each(call: Callable[[], object], count: int, *, rounds: int = 7) -> float:
    """Best of several rounds, in microseconds for each of ``count``."""
    best = float("inf")
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
    return best / count * 1e6


def drain(step: Callable[[object], object], items: Iterable[object]) -> None:
    for item in items:
        step(item)


def main(folder: Path) -> None:
    """Print one line a measurement."""
    started = time.perf_counter()
    tokenizer = HFTokenizer.from_folder(folder)
    print(f"load {folder.name}: {time.perf_counter() - started:.2f} s, {tokenizer.vocab_size} ids")
    tokens = (tokenizer.encode(TEXT) * NUM_TOKENS)[:NUM_TOKENS]
    halves = (tokenizer.encode("🦜🧶ďѪ你🏴‍☠️") * NUM_TOKENS)[:NUM_TOKENS]
    backend = tokenizer._tokenizer

    for name, ids in (("text", tokens), ("split characters", halves)):
        ours = us_each(lambda ids=ids: drain(tokenizer.decoder().push, ids), NUM_TOKENS)
        stream = us_each(lambda ids=ids: drain(partial(DecodeStream().step, backend), ids), NUM_TOKENS)
        print(f"detokenizer, {name}: {ours:.3f} µs a token (DecodeStream {stream:.3f})")
    push = tokenizer.decoder().push
    first, *_, last = (
        us_each(lambda part=start: drain(push, tokens[part : part + 1000]), 1000, rounds=1)
        for start in range(0, NUM_TOKENS, 1000)
    )
    print(f"detokenizer, tokens 0-1000 and 7000-8000: {first:.3f} and {last:.3f} µs a token")

    pieces = [tokenizer.decode([token]) for token in tokens]
    for name, stops in (("none", ()), ("4", STOPS), ("4 that begin often", ("er!", "th!", " a!", "\n!"))):
        cost = us_each(lambda stops=stops: drain(StopMatcher(stops).push, pieces), NUM_TOKENS)
        print(f"stop matcher, stops {name}: {cost:.3f} µs a token")
    worst = tuple("a" * 255 + chr(0x100 + index) for index in range(16))
    cost = us_each(lambda: StopMatcher(worst).push("a" * 4000), 4000)
    print(f"stop matcher, 16 x 256 nearly matching: {cost:.3f} µs a character")

    def both() -> None:
        detokenize, match = tokenizer.decoder().push, StopMatcher(STOPS).push
        for token in tokens:
            match(detokenize(token))

    print(f"both, 4 stops: {us_each(both, NUM_TOKENS):.3f} µs a token")

    template = ChatTemplate.from_folder(folder)
    for name, content in (("short", "Hello!"), ("64 KB", TEXT * 330), ("short with markers", "a<|im_end|>b")):
        messages = [{"role": "user", "content": content}]
        encode_chat(tokenizer, template, messages)
        print(f"encode_chat, {name}: {us_each(lambda m=messages: encode_chat(tokenizer, template, m), 1):.0f} µs")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else TINY_FOLDER)
