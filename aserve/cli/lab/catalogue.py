"""Which experiments there are, and how all of them are run."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Final

from aserve.cli.lab.experiments_backlog import cpu_bound, device_bound, matched, one_at_a_time, prefill_between_decodes
from aserve.cli.lab.experiments_batching import dynamic_batching
from aserve.cli.lab.experiments_low_load import low_load
from aserve.cli.lab.experiments_modes import prefill_modes, samplers
from aserve.cli.lab.experiments_tuning import tuning
from aserve.cli.lab.findings import Experiment
from aserve.cli.lab.laboratory import Lab
from aserve.cli.lab.sweep import cost_sweep

EXPERIMENTS: Final[dict[int, Callable[[Lab], Experiment]]] = {
    1: one_at_a_time,
    2: device_bound,
    3: cpu_bound,
    4: matched,
    5: prefill_between_decodes,
    6: dynamic_batching,
    7: low_load,
    8: tuning,
    9: samplers,
    10: prefill_modes,
    0: cost_sweep,
}
"""0 is the sweep, which comes last."""

ON_A_REAL_DEVICE: Final = (6, 7, 8, 9, 10)
"""The others state their steps' times, which no real device can be given."""

_LONGEST_FIRST: Final = (0, 6, 7, 8)


def run_all(numbers: Sequence[int], lab: Lab, *, num_processes: int) -> Iterator[Experiment]:
    """In the order of the numbers, each as soon as it and those before it are done."""
    if num_processes == 1:
        for number in numbers:
            yield EXPERIMENTS[number](lab)
        return
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        order = sorted(numbers, key=lambda number: number not in _LONGEST_FIRST)
        running = {number: pool.submit(EXPERIMENTS[number], lab) for number in order}
        for number in numbers:
            yield running[number].result()
