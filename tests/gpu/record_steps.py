"""Records what steps take, for the virtual device: decode rows x KV lengths, chunks, and both at once.

    python tests/gpu/record_steps.py [--shapes 8b 1b] [--out aserve/testing/steps_h200.json]
    python tests/gpu/record_steps.py --device cpu --shapes tiny --out /tmp/steps.json

Every step is a BatchPlan that goes through ``Runner.launch``, two in flight, so that the time between two landings is
the device's alone; each entry is the median of some repetitions. Weights and cache are random. The output takes the
place of the log that is shipped; what is fitted to it, and how well, is printed.
"""

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np
import uvloop
from make_models import write_model

from aserve.core.ids import Epoch, Slot, StepNumber
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, Chunk, Join
from aserve.core.request import SamplingParams
from aserve.device.threads import prepare_process
from aserve.engine.ports import Runner
from aserve.model.options import ModelOptions
from aserve.testing import STEP_LOG, StepShape, read_step_log

MODELS: Final = {"8b": "llama8b", "1b": "llama1b", "tiny": "tiny"}
ROWS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS: Final = (128, 640, 2048, 4096)
CHUNKS: Final = (16, 64, 128, 256, 512, 1024, 2048)
BEHIND: Final = (0, 4096)
MIXED: Final = ((16, 128), (16, 496), (16, 1008), (64, 128), (64, 448), (64, 960), (128, 896))
MIXED_CONTEXT: Final = 640
NUM_STEPS: Final = 24
NUM_FIRST: Final = 4
"""Steps of each point before those that count."""
NUM_FOR_SPREAD: Final = 10
NUM_CHUNKS: Final = 5
MAX_MODEL_LEN: Final = 16_384
GREEDY: Final = SamplingParams(temperature=0.0)


class Recorder:
    """Sequences in slots 0, 1, ... of a runner that has nothing else to do."""

    def __init__(self, runner: Runner, budget: int) -> None:
        self._runner = runner
        self._budget = budget
        self._step = itertools.count(1)
        self.entries: list[dict[str, float]] = []

    def _fits(self, lengths: Sequence[int], num_tokens: int) -> bool:
        info = self._runner.info
        num_blocks = sum(-(-length // info.block_size) for length in lengths)
        return (
            len(lengths) <= info.max_num_seqs
            and num_blocks <= info.num_blocks
            and max(lengths) <= info.max_model_len
            and num_tokens <= self._budget
        )

    async def _bind(self, cached: Sequence[int], room: Sequence[int]) -> None:
        """A new sequence in each slot, with so many tokens in the cache and blocks for ``room`` in all."""
        info, blocks = self._runner.info, itertools.count(1)
        table = [
            (slot, index, next(blocks))
            for slot, length in enumerate(room)
            for index in range(-(-length // info.block_size))
        ]
        joins = tuple(
            Join(
                slot=Slot(slot), epoch=Epoch(1), position=length, params=GREEDY, seed=slot, stop_ids=(), min_length=0,
                max_length=1 << 30, num_prompt_tokens=max(length, 1), history=np.empty(0, np.int32),
            )
            for slot, length in enumerate(cached)
        )  # fmt: skip
        leaves = np.arange(info.max_num_seqs, dtype=np.int32)
        await self._launch(leaves=leaves, joins=joins, table_writes=np.array(table, np.int32))[0]

    def _launch(self, **fields: Any) -> tuple[Any, BatchPlan, float]:
        plan = BatchPlan(step=StepNumber(next(self._step)), **fields)
        began_s = time.perf_counter()
        flight = self._runner.launch(plan)
        return flight, plan, time.perf_counter() - began_s

    async def _run(self, plans: Sequence[dict[str, Any]]) -> list[tuple[StepShape, float, float]]:
        """(shape, seconds on the device, seconds of the launch) of all but the first, two in flight."""
        out: deque[tuple[Any, BatchPlan, float]] = deque()
        found: list[tuple[StepShape, float, float]] = []
        landed_s = 0.0

        async def land() -> None:
            nonlocal landed_s
            flight, plan, launch_s = out.popleft()
            await flight
            before_s, landed_s = landed_s, time.perf_counter()
            found.append((StepShape.of(plan), landed_s - before_s, launch_s))

        for plan in plans:
            if len(out) == 2:
                await land()
            out.append(self._launch(**plan))
        while out:
            await land()
        return found[1:]

    def _note(self, steps: Sequence[tuple[StepShape, float, float]]) -> None:
        """Medians; the shape of the one in the middle, for contexts grow as steps go on."""
        device_ms, launch_ms = ([step[index] * 1e3 for step in steps] for index in (1, 2))
        entry: dict[str, float] = asdict(steps[len(steps) // 2][0])
        entry["device_ms"] = round(statistics.median(device_ms), 4)
        if len(steps) >= NUM_FOR_SPREAD:
            entry["device_ms_p90"] = round(float(np.quantile(device_ms, 0.9)), 4)
        entry["launch_ms"] = round(statistics.median(launch_ms), 4)
        self.entries.append(entry)
        sys.stderr.write(f"{self.entries[-1]}\n")

    async def decode(self, num_rows: int, context: int) -> None:
        room = [context + NUM_STEPS + 1] * num_rows
        if not self._fits(room, num_rows):
            return
        await self._bind([context] * num_rows, room)
        plans = [{"rows": _rows([context + step] * num_rows)} for step in range(NUM_STEPS)]
        self._note((await self._run(plans))[NUM_FIRST:])

    async def prefill(self, size: int, behind: int) -> None:
        """Chunks of one prompt, one after another: each has its own context, so each is an entry of its own."""
        end = behind + size * (NUM_CHUNKS + 1)
        if not self._fits([end + 1], size):
            return
        runs = []
        for _ in range(4):
            await self._bind([behind], [end + 1])
            runs.append(await self._run([{"chunks": (_chunk(0, start, size),)} for start in range(behind, end, size)]))
        for steps in zip(*runs[1:], strict=True):
            self._note(steps)

    async def mixed(self, num_rows: int, size: int) -> None:
        rooms = [*([MIXED_CONTEXT + NUM_STEPS + 1] * num_rows), size * (NUM_CHUNKS + 1) + 1]
        if not self._fits(rooms, num_rows + size):
            return
        runs = []
        for _ in range(4):
            await self._bind([*([MIXED_CONTEXT] * num_rows), 0], rooms)
            plans = [
                {"rows": _rows([MIXED_CONTEXT + step] * num_rows), "chunks": (_chunk(num_rows, step * size, size),)}
                for step in range(NUM_CHUNKS + 1)
            ]
            runs.append(await self._run(plans))
        for steps in zip(*runs[1:], strict=True):
            self._note(steps)


def _rows(positions: Sequence[int]) -> np.ndarray:
    return np.array(list(enumerate(positions)), np.int32)


def _chunk(slot: int, start: int, size: int) -> Chunk:
    """Never the last one, which would leave a token behind for the next."""
    tokens = np.random.default_rng(start).integers(100, 40_000, size, dtype=np.int32)
    return Chunk(slot=Slot(slot), start=start, tokens=tokens, last=False, next_token=5)


async def record(runner: Runner, budget: int) -> list[dict[str, float]]:
    recorder = Recorder(runner, budget)
    for num_rows, context in itertools.product(ROWS, CONTEXTS):
        await recorder.decode(num_rows, context)
    for size, behind in itertools.product(CHUNKS, BEHIND):
        await recorder.prefill(size, behind)
    for num_rows, size in MIXED:
        await recorder.mixed(num_rows, size)
    await runner.aclose()
    return recorder.entries


def measure(name: str, device: str, options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """(what it ran on, the model's part of the log)."""
    from aserve.model.runner import load_runner

    scheduler = SchedulerOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=MAX_MODEL_LEN,
    )
    model_options = ModelOptions(load_format="dummy", device=device, kv_cache_gib=options.kv_cache_gib)
    with tempfile.TemporaryDirectory() as folder:
        runner = load_runner(model_options, scheduler, write_model(Path(folder), MODELS[name]))
    info = runner.info
    entries = uvloop.run(record(runner, options.max_num_batched_tokens))
    return info.device, {
        "kv_bytes_per_token": info.kv_bytes_per_token,
        "weight_bytes": info.weight_bytes,
        "steps": entries,
    }


def as_text(origin: str, shapes: dict[str, dict[str, Any]]) -> Iterator[str]:
    """JSON with a line for each step."""
    yield f'{{\n"origin": {json.dumps(origin)},\n"shapes": {{\n'
    for index, (name, shape) in enumerate(shapes.items()):
        steps = ",\n".join(json.dumps(step) for step in shape["steps"])
        head = ", ".join(f'"{key}": {shape[key]}' for key in ("kv_bytes_per_token", "weight_bytes"))
        yield ("" if index == 0 else ",\n") + f'"{name}": {{{head}, "steps": [\n{steps}\n]}}'
    yield "\n}}\n"


def describe(path: Path) -> None:
    for name, model in read_step_log(path).items():
        costs = model.costs()
        errors = [costs.seconds(shape) / took_s - 1 for shape, took_s in zip(model.shapes, model.device_s, strict=True)]
        worst = int(np.argmax(np.abs(errors)))
        sys.stdout.write(
            f"{name}: {costs}\n   {len(errors)} steps, error {float(np.sqrt(np.mean(np.square(errors)))):.1%} rms, "
            f"{errors[worst]:+.1%} at worst ({model.shapes[worst]})\n"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(MODELS), default=["8b", "1b"])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-num-batched-tokens", type=int, default=2304)
    parser.add_argument("--kv-cache-gib", type=float, default=0.0, help="0 takes what is free, as the server does")
    parser.add_argument("--out", type=Path, default=STEP_LOG)
    options = parser.parse_args()
    prepare_process()
    shapes: dict[str, dict[str, Any]] = {}
    ran_on = ""
    for name in options.shapes:
        ran_on, shapes[name] = measure(name, options.device, options)
    day = datetime.now(UTC).date()
    origin = f"tests/gpu/record_steps.py on {ran_on}, {day}: medians of steps with two in flight"
    options.out.write_text("".join(as_text(origin, shapes)), encoding="utf-8")
    describe(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
