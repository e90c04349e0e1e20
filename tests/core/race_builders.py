"""A few sequences, five things that can happen to each, and what must come of any order of these.

In a ``Race`` blocks and slots are so few that whatever one sequence gives up, another uses at once. Each event has one
meaning:

- ``land X``: the oldest step in flight that lists X lands, and so do those before it on its stream, since landings of a
  stream are committed in launch order. Newer steps have run first, as far as slots allow.
- ``abort X``: the client's abort, or its socket seen to close: to the core both are ``SequenceEnded``.
- ``disconnect X``: the reader vanishes without a word, which is the disconnect that differs in the core. Its mailbox
  fills, the sequence is parked (``ReaderStalled``), and aborted when the stall limit passes, long after the last event.
- ``preempt X``: the scheduler's own ``preempt``, whoever is next in policy order.
- ``finish X``: the next token that lands for X is its last. Either it is a stop id, which the device sees first, or it
  completes a stop string, which delivery finds after the landing has launched what was due.

After each event steps are launched as the policy allows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from core_builders import World

from aserve.core.ids import SequenceId
from aserve.core.invariants import check
from aserve.core.leaving import preempt
from aserve.core.plan import MAIN_STREAM
from aserve.core.request import FinishReason
from aserve.core.transitions import SequenceState

Case = tuple[str, ...]

WHAT: Final = ("land", "abort", "disconnect", "preempt", "finish")
EVENTS: Final = tuple(f"{what} {who}" for who in "AB" for what in WHAT)
CASES: Final[list[Case]] = [case for length in range(1, 5) for case in permutations(EVENTS, length)]
"""Every ordered choice of up to four events, the shorter ones first."""

_RUNNING = (SequenceState.PREFILLING, SequenceState.DECODING)


class Race:
    """One world, and the naive model of how each of its sequences must end.

    stop_at: the output index at which a stop id ends a sequence, by name; such a sequence does not end otherwise.
    """

    def __init__(self, stop_at: Mapping[str, int] | None = None, **options: object) -> None:
        self.world = World(**{"block_size": 2, "checked": False} | options)
        self.names: dict[str, SequenceId] = {}
        self.reasons: dict[str, FinishReason] = {}
        self._stop_at = dict(stop_at or {})
        self._stop_strings: dict[str, int] = {}
        self._vanished: set[str] = set()

    def submit(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.names[name] = self.world.submit(prompt, max_tokens, seed=ord(name), stop_at=self._stop_at.get(name))

    # --- what happens

    def happen(self, event: str) -> bool:
        """Let it happen. False, and nothing has changed, if it finds nothing to do."""
        what, name = event.split()
        ident = self.names[name]
        if what == "land":
            stream, num_steps = self._steps_to(ident)
            for _ in range(num_steps):
                self.land(stream)
            self.deliver()
            return num_steps > 0
        is_over = name in self.reasons
        match what:
            case "abort":
                self._end(name)
            case "disconnect":
                self.world.stall(ident)
                self._vanished.add(name)
            case "return":
                self.world.catch_up(ident)
                self._vanished.discard(name)
            case "wait":
                self.world.now += 0.05
            case "finish" if is_over:
                self.world.match_stop(ident, 0)
            case "finish" if name not in self._stop_at:
                self._stop_strings.setdefault(name, len(self.world.output(ident)))
            case "preempt":
                sequence = self.world.scheduler.sequences.get(ident)
                if sequence is None or sequence.state not in _RUNNING:
                    return False
                preempt(self.world.scheduler, sequence, self.world.now, [])
        self.launch()
        return not is_over

    def launch(self) -> None:
        """Launch what is due."""
        while (plan := self.world.launch()) is not None:
            for ident in self.world.listed(plan):
                sequence = self.world.scheduler.sequences[ident]
                assert sequence.state in _RUNNING, f"step {plan.step} lists sequence {ident}, which is {sequence.state}"
                assert not sequence.is_stalled, f"step {plan.step} lists sequence {ident}, which nobody reads"

    def land(self, stream: int) -> None:
        """Land the oldest step of a stream and launch what that makes due."""
        if not self.world.runner.num_executed_on(stream):
            self.world.execute(ahead=True, stream=stream)
        self.world.land(stream=stream)
        for name, ident in self.names.items():
            told = self.world.told[ident]
            if name not in self.reasons and len(told.output) == len(told.expected):
                self.reasons[name] = FinishReason.STOP if name in self._stop_at else FinishReason.LENGTH
        self.launch()

    def deliver(self) -> None:
        """What has landed becomes text, in which a stop string may be."""
        for name, index in self._stop_strings.items():
            if name not in self.reasons and len(self.world.output(self.names[name])) > index:
                self.world.match_stop(self.names[name], index)
                self.reasons[name] = FinishReason.STOP
                self.launch()

    def drain(self) -> None:
        """Whoever is read runs to its end; then the stall limit passes, and whoever that lets go on does."""
        self._run()
        for name in sorted(self._vanished):
            self._end(name)
        self._run()

    # --- what must hold

    def verify(self) -> None:
        """The recount; every token is the one that its sequence yields alone; who is over is told so, and why."""
        scheduler = self.world.scheduler
        check(scheduler)
        for step in scheduler.inflight:
            listed = [*step.rows.idents, *(sequence.id for sequence in step.chunks)]
            forgotten = [ident for ident in listed if ident not in scheduler.sequences]
            assert forgotten == [], f"step {step.plan.step} lists {forgotten}, which are forgotten"
        for name, ident in self.names.items():
            told, reason = self.world.told[ident], self.reasons.get(name)
            assert told.output == told.expected[: len(told.output)], f"{name} got {told.output}, not {told.expected}"
            assert self.world.reason(ident) == reason, f"{name} ended in {self.world.reason(ident)}, not {reason}"

    def verify_end(self) -> None:
        """Everything has ended, nothing is missing where the end is a normal one, and all is back."""
        self.verify()
        world, scheduler = self.world, self.world.scheduler
        assert set(self.reasons) == set(self.names), f"no end for {set(self.names) - set(self.reasons)}"
        for name, ident in self.names.items():
            told, matched = world.told[ident], self._stop_strings.get(name)
            if self.reasons[name] is FinishReason.STOP and matched is not None:
                assert len(told.text) == matched + 1, f"{name} got {told.text}, its stop string ends at {matched}"
            elif self.reasons[name] is not FinishReason.ABORT:
                assert told.text == told.expected, f"{name} got {told.text}, not {told.expected}"
        assert scheduler.is_idle
        assert scheduler.marked == []
        assert (world.runner.num_launched, world.runner.num_executed) == (0, 0)
        num_leaves = sum(len(plan.leaves) for plan in world.plans.values()) + len(scheduler.leaves)
        assert num_leaves == scheduler.slots.epoch.sum(), "the device was not told of each slot that was left"
        world.flush()
        assert scheduler.ledger.num_free == scheduler.ledger.num_blocks
        assert scheduler.slots.num_free == scheduler.slots.max_num_seqs

    # --- inside

    def _run(self) -> None:
        self.launch()
        while streams := self.world.streams_inflight:
            self.land(streams[-1])
            self.deliver()

    def _steps_to(self, ident: SequenceId) -> tuple[int, int]:
        """The stream of the oldest step in flight that lists the sequence, and its number of steps up to there."""
        steps = list(self.world.scheduler.inflight)
        for step in steps:
            if any(sequence.id == ident for sequence in step.sequences()):
                stream = step.plan.stream
                return stream, sum(each.plan.stream == stream and each.plan.step <= step.plan.step for each in steps)
        return MAIN_STREAM, 0

    def _end(self, name: str) -> None:
        self.world.end(self.names[name])
        self.reasons.setdefault(name, FinishReason.ABORT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where the ten events of A and B begin; C and D wait for what A and B give up.

    is_running: A decodes when the others come. ends_by_stop_id: which of A and B; a stop string ends the other.
    """

    prompts: Mapping[str, list[int]]
    is_running: bool
    ends_by_stop_id: str
    options: Mapping[str, object]


SETTINGS: Final = {
    # Nothing in common, and two slots for four.
    "slots": Setting(
        prompts={"A": [1, 2, 3, 4], "B": [5, 6, 7, 8, 9], "C": [10, 11, 12], "D": [13]},
        is_running=False,
        ends_by_stop_id="B",
        options={"max_num_seqs": 2, "num_blocks": 8, "max_num_batched_tokens": 4},
    ),
    # B runs on A's blocks, and there are six for four.
    "blocks": Setting(
        prompts={"A": [1, 2, 3, 4], "B": [1, 2, 3, 4, 5], "C": [1, 2, 3, 6, 7, 8, 9], "D": [1, 2, *range(10, 15)]},
        is_running=True,
        ends_by_stop_id="A",
        options={"max_num_seqs": 4, "num_blocks": 6, "max_num_batched_tokens": 6},
    ),
    # Prompts go to a stream of their own, whose steps land first.
    "streams": Setting(
        prompts={"A": [1, 2, 3, 4], "B": [1, 2, *range(5, 11)], "C": [1, 2, 3, 11], "D": [12, 13]},
        is_running=True,
        ends_by_stop_id="B",
        options={"max_num_seqs": 2, "num_blocks": 9, "max_num_batched_tokens": 4, "prefill": "streams"},
    ),
}
OUTPUT_LENGTHS: Final = {"A": 4, "B": 2, "C": 2, "D": 1}
"""Of A and B: beyond what ``max_inflight`` steps bring, so that at any depth something is left to launch."""


class Grid:
    """Plays cases of one setting at one depth.

    An event that finds nothing to do changes nothing, so that a case with such an event is the shorter case without it,
    and is played up to there.
    """

    def __init__(self, setting: str, max_inflight: int) -> None:
        self.num_played = 0
        self._name = setting
        self._setting = SETTINGS[setting]
        self._max_inflight = max_inflight
        self._idle: set[Case] = set()
        self._stop_at: dict[Case, dict[str, int]] = {}

    def play(self, case: Case) -> None:
        """Raises whatever is found, with the case noted."""
        if any(case[:length] in self._idle for length in range(1, len(case))):
            return
        try:
            self._play(case)
        except Exception as error:
            error.add_note(f"{', '.join(case)}: at max_inflight {self._max_inflight}, setting {self._name!r}")
            raise

    def _play(self, case: Case) -> None:
        finish = f"finish {self._setting.ends_by_stop_id}"
        race = self._begin(self._stop_after(case[: case.index(finish)]) if finish in case else {})
        for index, event in enumerate(case):
            is_idle = not race.happen(event)
            race.verify()
            if is_idle:
                self._idle.add(case[: index + 1])
                return
        race.drain()
        race.verify_end()
        self.num_played += 1

    def _begin(self, stop_at: Mapping[str, int]) -> Race:
        race = Race(stop_at, max_inflight=self._max_inflight, **self._setting.options)
        for name, prompt in self._setting.prompts.items():
            race.submit(name, prompt, OUTPUT_LENGTHS[name] + (self._max_inflight if name in "AB" else 0))
            if name == "A" and self._setting.is_running:
                race.world.step()
        race.launch()
        return race

    def _stop_after(self, events: Case) -> dict[str, int]:
        """``stop_at`` for a finish after these events: the device has to know its stop ids from the start."""
        if events not in self._stop_at:
            name = self._setting.ends_by_stop_id
            race = self._begin({})
            for event in events:
                race.happen(event)
            self._stop_at[events] = {} if name in race.reasons else {name: len(race.world.output(race.names[name]))}
        return self._stop_at[events]
