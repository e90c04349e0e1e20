"""What would this model do at so many requests a second? The whole engine on the virtual device answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from statistics import fmean
from typing import Final

from aserve.cli.lab.laboratory import poisson
from aserve.cli.lab.running import Bench, Run, Setup, VirtualBench
from aserve.cli.lab.shapes import ALARM_LATE_S, Machine
from aserve.core.options import SchedulerOptions

_GROWTH: Final = 1.7
"""Of mean waits from the second quarter of the requests to the last, at most: 2.3 where they grow evenly from none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to expect. num_requests: of the run that says so, at least 4."""

    machine: str
    origin: str
    rate: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    run: Run

    @property
    def keeps_up(self) -> bool:
        """Whether waits have stopped to grow: beyond what a model can do they grow with each request."""
        records = self.run.requests
        second, last = (records[len(records) * n // 4 : len(records) * (n + 1) // 4] for n in (1, 3))
        return all(
            fmean(map(wait_s, last)) <= _GROWTH * fmean(map(wait_s, second))
            for wait_s in (attrgetter("ttft_s"), attrgetter("latency_s"))
        )

    def lines(self) -> Iterator[str]:
        run, lengths = self.run, f"{self.num_prompt_tokens} tokens in, {self.num_output_tokens} out"
        yield f"{self.machine} at {self.rate:g} requests/s, {lengths}"
        yield f"({self.num_requests} requests on the virtual device; costs: {self.origin})"
        yield ""
        last_s = max(record.arrived_s for record in run.requests) - run.began_s
        yield f"came              {len(run.requests) / last_s:10.1f} requests/s, by chance of the arrivals"
        yield f"answered          {run.requests_per_s:10.1f} requests/s to the last token"
        yield f"                  {run.tokens_per_s:10,.0f} tokens/s"
        yield f"TTFT              {run.ttft_ms_at(0.5):10.1f} ms p50, {run.ttft_ms_at(0.99):.1f} p99"
        yield f"between tokens    {run.gap_ms_at(0.5):10.2f} ms p50, {run.gap_ms_at(0.99):.2f} p99"
        yield f"device idle       {run.idle:10.1%}"
        yield f"sequences a step  {sum(run.batch_sizes) / run.num_launches:10.1f}"
        if not self.keeps_up:
            yield ""
            yield "It does not keep up: the queue grows, and with it every wait, for as long as this rate lasts."


def plan(
    machine: Machine,
    rate: float,
    options: SchedulerOptions,
    *,
    num_prompt_tokens: int,
    num_output_tokens: int,
    num_requests: int = 400,
    seed: int = 0,
    bench: Bench | None = None,
) -> Plan:
    """Independent arrivals at ``rate`` a second under these options. Takes some tens of seconds where it is busy.

    num_requests: at least 4, for ``keeps_up`` compares quarters of them.
    """
    options = options.with_gpu_sizes(machine.num_layer_parameters)
    setup = Setup(
        name="plan",
        policy=options.policy,
        max_inflight=options.max_inflight,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        prefill=options.prefill,
        sampler=options.sampler,
        costs=machine.costs,
        host=machine.host,
        alarm_late_s=ALARM_LATE_S,
    )
    lengths = {"num_prompt_tokens": num_prompt_tokens, "num_output_tokens": num_output_tokens}
    run = (bench or VirtualBench()).run(
        setup, poisson(rate, num_requests, seed, **lengths), warm_up=poisson(rate, 8, seed + 1, **lengths), seed=seed
    )
    return Plan(
        machine=machine.name,
        origin=machine.origin,
        rate=rate,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens=num_output_tokens,
        num_requests=num_requests,
        run=run,
    )
