"""A device with a cost model in place of arithmetic: the real engine, scheduler and policy without a GPU or a wait.

    async def main():
        device = VirtualDevice(h200_costs("1b"), HostCosts(launch_s=0.3e-3), seed=1)
        loop = asyncio.get_running_loop()
        engine = Engine(device, device.tokenizer(), ..., clock=loop.time, make_alarm=VirtualAlarm)
        ...

    run_virtual(main())

Tokens are a script's (``ScriptedRunner``); only time is made up. The device's own time line is exact however busy the
loop is: a step starts when it has been launched and the steps before it on its stream have ended.
"""

import asyncio
import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from aserve.core.plan import BatchPlan
from aserve.engine.ports import TextDecoder
from aserve.testing.manual import ManualEvent
from aserve.testing.scripted import Script, ScriptedRunner
from aserve.testing.text import ByteTokenizer
from aserve.testing.virtual_costs import HostCosts, StepCosts, StepShape
from aserve.testing.virtual_loop import VirtualLoop, running_virtual_loop


@dataclass(slots=True, eq=False, kw_only=True)
class VirtualStep:
    """One step's way, in seconds of the loop's clock; nan until it happened. Written by the device only.

    composed_s: its plan reached the device. launched_s: the loop was done with it. started_s, ended_s: on the device.
    landed_s: its flight was completed. alone_s: how long it takes with the device to itself.
    """

    step: int
    stream: int
    shape: StepShape
    num_sampled: int
    num_on_host: int
    alone_s: float
    composed_s: float
    launched_s: float = float("nan")
    started_s: float = float("nan")
    ended_s: float = float("nan")
    landed_s: float = float("nan")


@dataclass(slots=True, eq=False)
class _Lane:
    """A stream of the device: steps in their order, the first of which runs. left_s: of it, with the device alone."""

    steps: deque[VirtualStep]
    left_s: float = 0.0


class VirtualDevice(ScriptedRunner):
    """Follows a script as ``ScriptedRunner`` does, on the virtual time line that the costs give.

    costs: of steps on the device. host: of the processor around them. seed: of the noise.
    shared_rate: how fast each of two streams runs while both have a step, 1 being the speed alone: 0.5 gains nothing.
    history: the newest ``log_steps`` steps launched, oldest first; ``log`` has their plans.

    ``hold`` keeps steps whose time is up in flight, until the test lands them one by one, in any order, by ``release``
    and ``release_step``, which do not ask for the time; ``resume`` lands what is overdue.
    """

    def __init__(
        self,
        costs: StepCosts,
        host: HostCosts | None = None,
        *,
        seed: int = 0,
        shared_rate: float = 0.5,
        script: Script = b"ok ",
        vocab_size: int = 258,
        max_num_seqs: int = 256,
        max_model_len: int = 2048,
        num_blocks: int = 4096,
        block_size: int = 16,
        log_steps: int = 4096,
    ) -> None:
        super().__init__(
            script,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=block_size,
            log_steps=log_steps,
        )
        super().hold()  # the script's own timer never runs: this class lands its steps
        self.costs = costs
        self.host = host or HostCosts()
        self.history: deque[VirtualStep] = deque(maxlen=log_steps)
        self._random = np.random.default_rng(seed)
        self._shared_rate = shared_rate
        self._lanes: dict[int, _Lane] = {}
        self._updated_s = 0.0
        self._timers: dict[int, asyncio.TimerHandle] = {}
        self._wake_up: asyncio.TimerHandle | None = None
        self._is_gate_closed = False
        self._overdue: list[VirtualStep] = []
        self._workers_free_s = [0.0] * max(1, self.host.num_threads - 1)
        self._sampler_free_s = 0.0
        self._after_due_s = 0.0

    def tokenizer(self) -> ByteTokenizer:
        """Bytes, whose decoders hold the loop for what the host does after a step. An engine without it has that free.

        That work is due when the first text of a landing is made, so rows that the engine writes out before the next
        launch delay it, and others do not.
        """
        return _PacedTokenizer(self)

    # --- gates

    def hold(self) -> None:
        self._is_gate_closed = True

    def release(self, num_steps: int = 1) -> None:
        super().release(num_steps)
        self._forget_landed()

    def release_step(self, step: int) -> None:
        super().release_step(step)
        self._forget_landed()

    def resume(self) -> None:
        self._is_gate_closed = False
        overdue, self._overdue = self._overdue, []
        for step in overdue:
            self._land_step(step)

    def _forget_landed(self) -> None:
        flying = {flying.flight.step for flying in self._flying}
        self._overdue = [step for step in self._overdue if step.step in flying]

    # --- the Runner protocol

    def launch(self, plan: BatchPlan) -> ManualEvent:
        """Holds the loop for the host's work before a step, and for the launch."""
        loop = running_virtual_loop()
        shape = StepShape.of(plan)
        step = VirtualStep(
            step=plan.step,
            stream=plan.stream,
            shape=shape,
            num_sampled=plan.num_sampled,
            num_on_host=int(plan.deferred.sum()),
            alone_s=self.costs.seconds(shape) * self.costs.noise_factor(self._random),
            composed_s=loop.time(),
        )
        flight = super().launch(plan)
        num_sequences = len(plan.rows) + len(plan.chunks)
        loop.work(self.host.before_s + self.host.before_row_s * num_sequences + self.host.launch_s)
        step.launched_s = loop.time()
        self.history.append(step)
        self._catch_up(loop)
        lane = self._lanes.setdefault(step.stream, _Lane(deque()))
        lane.steps.append(step)
        if len(lane.steps) == 1:
            self._start(lane, step.launched_s)
        self._set_wake_up(loop)
        return flight

    def go_on(self) -> None:
        """Nothing: a launch leaves nothing."""

    def statistics(self) -> dict[str, float]:
        return super().statistics() | {"device_idle_share": idle_share(self.history)}

    async def aclose(self) -> None:
        """Lands whatever is in flight at once, held or not."""
        for timer in (*self._timers.values(), self._wake_up):
            if timer is not None:
                timer.cancel()
        self._lanes.clear()
        await super().aclose()

    # --- the device's time line

    def _start(self, lane: _Lane, now: float) -> None:
        lane.steps[0].started_s = now
        lane.left_s = lane.steps[0].alone_s

    def _busy(self) -> list[_Lane]:
        return [lane for lane in self._lanes.values() if lane.steps]

    def _rate(self, num_busy: int) -> float:
        return 1.0 if num_busy <= 1 else self._shared_rate

    def _catch_up(self, loop: VirtualLoop) -> None:
        """Bring the time line to now: whatever ended meanwhile ended at its own time, seen now."""
        now = loop.time()
        while busy := self._busy():
            rate = self._rate(len(busy))
            first = min(busy, key=lambda lane: lane.left_s)
            ends_s = self._updated_s + first.left_s / rate
            until_s = min(now, ends_s)
            for lane in busy:
                lane.left_s -= (until_s - self._updated_s) * rate
            self._updated_s = until_s
            if ends_s > now:
                return
            step = first.steps.popleft()
            step.ended_s = ends_s
            if first.steps:
                self._start(first, ends_s)
            self._follow_up(step, loop)
        self._updated_s = now

    def _set_wake_up(self, loop: VirtualLoop) -> None:
        if self._wake_up is not None:
            self._wake_up.cancel()
            self._wake_up = None
        if busy := self._busy():
            left_s = min(lane.left_s for lane in busy) / self._rate(len(busy))
            self._wake_up = loop.call_at(self._updated_s + left_s, self._on_wake_up, loop)

    def _on_wake_up(self, loop: VirtualLoop) -> None:
        self._wake_up = None
        self._catch_up(loop)
        self._set_wake_up(loop)

    def _follow_up(self, step: VirtualStep, loop: VirtualLoop) -> None:
        """What threads beside the loop do with a step that has ended, then its landing."""
        ready_s = step.ended_s
        if step.num_on_host:
            ready_s = max(ready_s, self._sampler_free_s) + self.host.sample_row_s * step.num_on_host
            self._sampler_free_s = ready_s
        if self.host.num_threads > 1:
            worker = self._workers_free_s.index(min(self._workers_free_s))
            ready_s = max(ready_s, self._workers_free_s[worker]) + self._after_s(step)
            self._workers_free_s[worker] = ready_s
        if ready_s <= loop.time():
            self._on_ready(step)
            return
        self._timers[step.step] = loop.call_at(ready_s, self._on_ready, step)

    def _after_s(self, step: VirtualStep) -> float:
        return self.host.after_s + self.host.after_row_s * step.num_sampled if step.num_sampled else 0.0

    def _on_ready(self, step: VirtualStep) -> None:
        self._timers.pop(step.step, None)
        if self._is_gate_closed:
            self._overdue.append(step)
        else:
            self._land_step(step)

    def _land_step(self, step: VirtualStep) -> None:
        """Complete the flight, unless a test has done so before its time."""
        flying = next((flying for flying in self._flying if flying.flight.step == step.step), None)
        if flying is not None:
            self._land(flying)
            step.landed_s = running_virtual_loop().time()
            if self.host.num_threads == 1:
                self._after_due_s += self._after_s(step)

    def pay_for_text(self) -> None:
        """Hold the loop for the host's work after the steps that have landed, once for each. The tokenizer's."""
        if self._after_due_s:
            due_s, self._after_due_s = self._after_due_s, 0.0
            running_virtual_loop().work(due_s)


class _PacedTokenizer(ByteTokenizer):
    def __init__(self, device: VirtualDevice) -> None:
        self._device = device

    def decoder(self, *, skip_special_tokens: bool = True) -> TextDecoder:  # type: ignore[override]
        return _PacedDecoder(self._device, super().decoder(skip_special_tokens=skip_special_tokens))


class _PacedDecoder:
    def __init__(self, device: VirtualDevice, decoder: TextDecoder) -> None:
        self._device = device
        self._decoder = decoder

    def push(self, token: int) -> str:
        self._device.pay_for_text()
        return self._decoder.push(token)

    def finish(self) -> str:
        return self._decoder.finish()


def idle_share(steps: Iterable[VirtualStep]) -> float:
    """Share of the time from the first plan to the last end in which no step ran on any stream; 0 without a step."""
    ended = sorted((step for step in steps if not math.isnan(step.ended_s)), key=lambda step: step.started_s)
    if not ended:
        return 0.0
    busy_s, until_s = 0.0, ended[0].started_s
    for step in ended:
        busy_s += max(0.0, step.ended_s - max(step.started_s, until_s))
        until_s = max(until_s, step.ended_s)
    span_s = until_s - min(step.composed_s for step in ended)
    return 1.0 - busy_s / span_s if span_s else 0.0
