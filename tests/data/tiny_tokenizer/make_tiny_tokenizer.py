"""Makes the tokenizer of this folder: ByteLevel BPE with a few hundred merges and ChatML tokens, small enough to read.

Run it to write tokenizer.json again; training is deterministic. All 256 bytes are tokens, so any text has ids, and most
characters outside ASCII take several tokens: what streaming has to put together again.
"""

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
NUM_MERGES = 300
CORPUS = [
    "system user assistant You are a helpful assistant. Hello! How can I help you today? Thank you very much.",
    "The quick brown fox jumps over the lazy dog, and then the dog sleeps in the sun for the rest of the day.",
    "What is the capital of France? The capital of France is Paris. It lies on the river Seine.",
    "Once upon a time there was a king who had three daughters, and the youngest was the most beautiful of them all.",
    "One event loop schedules the device and streams the tokens; nothing on the loop ever blocks.",
    "def add(first, second):\n    return first + second\n\nfor number in range(10):\n    print(add(number, 1))\n",
    "Viele Grüße aus München! Schöne Straßen, große Bäume. Le café est fermé, la forêt est près d'ici. Dědí ď.",
    "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12 and 2024: all numbers are written with digits.",
    "你好，世界。今天天气很好。こんにちは世界。🙂 👍 🎉",
]


def main() -> None:
    """Train on CORPUS and write tokenizer.json beside this file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=len(SPECIAL_TOKENS) + 256 + NUM_MERGES,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    spec = json.loads(tokenizer.to_str())
    path = Path(__file__).with_name("tokenizer.json")
    path.write_text(json.dumps(spec, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
