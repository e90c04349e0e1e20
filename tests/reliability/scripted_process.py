"""``python -m aserve`` with a scripted device and without a model: for tests that need a process to signal or starve.

    python scripted_process.py '{"step_time_s": 0.01}' --port 0

The first argument is JSON: keywords of ``ScriptedRunner``, and ``lost_at`` for a step at which the device is lost. The
script says x for ever.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aserve.main as root
from aserve.__main__ import main
from aserve.core.request import SamplingParams
from aserve.errors import DeviceLost
from aserve.model.hub import ModelSource
from aserve.testing import ByteTokenizer, ScriptedRunner
from aserve.text.chat_template import ChatTemplate

MAX_MODEL_LEN = 20_000
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def run(wanted: dict[str, Any], arguments: list[str]) -> int:
    lost_at = wanted.pop("lost_at", None)

    def load_model(config: Any, source: Any) -> tuple[ScriptedRunner, SamplingParams]:
        runner = ScriptedRunner(
            b"x",
            max_num_seqs=config.scheduler.with_sizes().max_num_seqs,
            max_model_len=MAX_MODEL_LEN,
            num_blocks=2048,
            block_size=config.scheduler.block_size,
            **wanted,
        )
        if lost_at is not None:
            runner.fail_step(lost_at, DeviceLost("an illegal memory access"))
        return runner, SamplingParams(temperature=0.0)

    root.resolve_model = lambda *_, **__: ModelSource(folder=Path(), name="scripted", origin="folder")
    root.HFTokenizer = SimpleNamespace(from_folder=lambda _: ByteTokenizer())  # type: ignore[misc, assignment]
    root.ChatTemplate = SimpleNamespace(from_folder=lambda _: ChatTemplate(TEMPLATE))  # type: ignore[misc, assignment]
    root.load_model = load_model
    return main(["--scheduler.max_model_len", str(MAX_MODEL_LEN), *arguments])


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
