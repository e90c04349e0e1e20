"""What would this model do at so many requests a second? The whole engine on the virtual device answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from aserve.cli.lab.laboratory import poisson
from aserve.cli.lab.running import Bench, Run, Setup, VirtualBench
from aserve.cli.lab.shapes import ALARM_LATE_S, Machine
from aserve.core.options import GPU_BATCHED_TOKENS, SchedulerOptions

_STEADY: Final = 0.95
"""Requests that are answered at less than this share of their rate are more than the model can do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to expect. num_requests: of the run that says so."""

    machine: str
    origin: str
    rate: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_requests: int
    run: Run

    @property
    def keeps_up(self) -> bool:
        return self.run.requests_per_s >= _STEADY * self.rate * self._fair_share

    @property
    def _fair_share(self) -> float:
        """A run ends with the last answer, not with the last arrival."""
        last_s = max(record.arrived_s for record in self.run.requests) - self.run.began_s
        return last_s / (last_s + self.run.latency_ms / 1e3)

    def lines(self) -> Iterator[str]:
        run, lengths = self.run, f"{self.num_prompt_tokens} tokens in, {self.num_output_tokens} out"
        yield f"{self.machine} at {self.rate:g} requests/s, {lengths}"
        yield f"({self.num_requests} requests on the virtual device; costs: {self.origin})"
        yield ""
        yield f"answered          {run.requests_per_s:10.1f} requests/s, {run.tokens_per_s:,.0f} tokens/s"
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
    """Independent arrivals at ``rate`` a second under these options. Takes some tens of seconds where it is busy."""
    setup = Setup(
        name="plan",
        policy=options.policy,
        max_inflight=options.max_inflight,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or GPU_BATCHED_TOKENS,
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
