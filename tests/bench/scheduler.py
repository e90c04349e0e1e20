"""What a step costs the scheduler: launching and landing N decode rows, with block growth and publishing.

python tests/bench/scheduler.py
"""

import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from aserve.core import events
from aserve.core.actions import Launch, WakeAt
from aserve.core.options import SchedulerOptions
from aserve.core.plan import BatchPlan, BatchResult
from aserve.core.request import SamplingParams, SequenceSpec
from aserve.core.scheduler import Scheduler

STEP_S = 0.004


def measure(policy: str, num_rows: int, num_steps: int = 2000) -> tuple[float, float]:
    """Median microseconds a step of being launched (all that the scheduler is asked and told of it) and of landing."""
    options = SchedulerOptions(max_num_seqs=num_rows, max_num_batched_tokens=8192, policy=policy)
    scheduler = Scheduler(options, num_blocks=1 << 16, max_model_len=4096, vocab_size=50_000)
    params = SamplingParams(max_tokens=3000, stop_token_ids=(2,))
    for ident in range(1, num_rows + 1):
        prompt = np.arange(ident, ident + 200, dtype=np.int32)
        scheduler.handle(events.SequenceSubmitted(SequenceSpec(id=ident, prompt=prompt, params=params)), 0.0)
    flying: list[BatchPlan] = []
    launches: list[float] = []
    landings: list[float] = []
    now, started_s, launching_s = 0.0, 0.0, 0.0
    while len(landings) < num_steps:
        start = time.perf_counter()
        last = scheduler.handle(events.LaunchPossible(), now)[-1:]
        if last and isinstance(last[0], Launch):
            scheduler.handle(events.StepLaunched(last[0].plan.step), now)
            launching_s += time.perf_counter() - start
            launches.append(launching_s)
            launching_s = 0.0
            started_s = started_s if flying else now
            flying.append(last[0].plan)
            continue
        launching_s += time.perf_counter() - start
        if last and isinstance(last[0], WakeAt) and last[0].when_s < started_s + STEP_S:
            now = last[0].when_s
            start = time.perf_counter()
            scheduler.handle(events.AlarmRang(now), now)
            launching_s += time.perf_counter() - start
            continue
        now = started_s = max(now, started_s + STEP_S)
        plan = flying.pop(0)
        result = BatchResult(
            step=plan.step,
            tokens=np.full((plan.num_sampled, 1), 7, np.int32),
            num_tokens=np.ones(plan.num_sampled, np.int32),
            flags=np.zeros(plan.num_sampled, np.uint8),
        )
        start = time.perf_counter()
        scheduler.handle(events.StepLanded(result), now)
        landings.append(time.perf_counter() - start)
    return float(np.median(launches)) * 1e6, float(np.median(landings)) * 1e6


def main() -> int:
    sys.stdout.write("policy   rows  launch us  land us  us a token\n")
    for policy in ("overlap", "late"):
        for num_rows in (1, 16, 64, 256):
            launch_us, land_us = measure(policy, num_rows)
            per_token = (launch_us + land_us) / num_rows
            sys.stdout.write(f"{policy:7}  {num_rows:4}  {launch_us:9.0f}  {land_us:7.0f}  {per_token:10.2f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
