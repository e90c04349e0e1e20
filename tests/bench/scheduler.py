"""What a step costs the scheduler: composing and landing N decode rows, with block growth and publishing.

python tests/bench/scheduler.py
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from aserve.core import events
from aserve.core.actions import Launch
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, BatchResult
from aserve.core.request import SamplingParams, SequenceSpec
from aserve.core.scheduler import Scheduler


def measure(num_rows: int, num_steps: int = 2000) -> tuple[float, float]:
    """Median microseconds of one compose and of one landing."""
    options = SchedulerOptions(max_num_seqs=num_rows, max_num_batched_tokens=8192)
    scheduler = Scheduler(options, num_blocks=1 << 16, max_model_len=4096, vocab_size=50_000)
    params = SamplingParams(max_tokens=3000, stop_token_ids=(2,))
    for ident in range(1, num_rows + 1):
        prompt = np.arange(ident, ident + 200, dtype=np.int32)
        scheduler.handle(events.SequenceSubmitted(SequenceSpec(id=ident, prompt=prompt, params=params)), 0.0)
    flying: list[BatchPlan] = []
    composes: list[float] = []
    landings: list[float] = []
    while len(landings) < num_steps:
        start = time.perf_counter()
        actions = scheduler.handle(events.LaunchPossible(), 0.0)
        composes.append(time.perf_counter() - start)
        flying += [action.plan for action in actions if isinstance(action, Launch)]
        if len(flying) < 2:
            continue
        plan = flying.pop(0)
        result = BatchResult(
            step=plan.step,
            tokens=np.full((plan.num_sampled, 1), 7, np.int32),
            num_tokens=np.ones(plan.num_sampled, np.int32),
            flags=np.zeros(plan.num_sampled, np.uint8),
        )
        start = time.perf_counter()
        scheduler.handle(events.StepLanded(result), 0.0)
        landings.append(time.perf_counter() - start)
    return float(np.median(composes)) * 1e6, float(np.median(landings)) * 1e6


def main() -> int:
    sys.stdout.write("rows  compose us  land us  us a token\n")
    for num_rows in (1, 16, 64, 256):
        compose_us, land_us = measure(num_rows)
        per_token = (compose_us + land_us) / num_rows
        sys.stdout.write(f"{num_rows:4}  {compose_us:10.0f}  {land_us:7.0f}  {per_token:10.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
