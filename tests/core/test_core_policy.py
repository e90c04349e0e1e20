"""When the next step is due, by a clock that the test moves: ``late`` on a made-up device, and what it is told."""

import math
import random
from collections import deque

import numpy as np
import pytest
from core_builders import World
from hypothesis import given, settings
from hypothesis import strategies as st

from aserve.core.actions import Launch, WakeAt
from aserve.core.events import AlarmRang, LaunchPossible
from aserve.core.plan import BatchPlan
from aserve.core.policy import PROBED_LAUNCHES, WINDOW, FixedDepth, Late
from aserve.core.prediction import FIRST_STEPS, STREAK

MARGIN_S = 0.0002


def plan(step: int, rows: int = 4) -> BatchPlan:
    return BatchPlan(step=step, rows=np.array([[row, 100] for row in range(rows)], np.int32))


class Drive:
    """One policy, and a device whose steps take ``step_s``: launches as soon as it may, and remembers when.

    cost_s: of a launch. late_s(): of an alarm. seen_late_s(): of a landing. Times of steps: composed, begun, ended.
    """

    def __init__(self, policy=None, *, step_s=0.010, cost_s=0.0003, late_s=lambda: 0.0, seen_late_s=lambda: 0.0):
        self.policy = policy or Late(4, MARGIN_S)
        self.step_s, self.cost_s, self.late_s, self.seen_late_s = step_s, cost_s, late_s, seen_late_s
        self.now = 0.0
        self.probe_s = math.inf
        self.num_steps = 0
        self.num_alarms = 0
        self.composed: list[float] = []
        self.begun: list[float] = []
        self.ended: list[float] = []
        self.out: deque[int] = deque()

    @property
    def bubbles(self) -> list[float]:
        """Between one step's end and the next one's beginning."""
        return [begun - ended for begun, ended in zip(self.begun[1:], self.ended, strict=False)]

    @property
    def leads(self) -> list[float]:
        """Between a step's composing and the end of the one before it."""
        return [ended - composed for composed, ended in zip(self.composed[1:], self.ended, strict=False)]

    def launch(self) -> None:
        self.num_steps += 1
        self.out.append(self.num_steps)
        self.composed.append(self.now)
        self.policy.composed(plan(self.num_steps), self.now)
        self.now += self.cost_s
        self.probe_s = self.policy.launched(self.num_steps, self.now) or math.inf
        self.begun.append(max(self.now, self.ended[-1] if self.ended else 0.0))
        self.ended.append(self.begun[-1] + self.step_s)

    def land(self) -> None:
        step = self.out.popleft()
        self.now = max(self.now, self.ended[step - 1] + self.seen_late_s())
        self.policy.landed(step, self.now, failed=False)

    def run(self, num: int) -> "Drive":
        """Until so many more steps have been launched."""
        wanted = self.num_steps + num
        while self.num_steps < wanted:
            due_s = self.policy.due_s(self.now)
            if due_s <= self.now + 1e-9:
                self.launch()
            elif self.probe_s < due_s:
                self.policy.woken(self.probe_s, self.probe_s + self.late_s())
                self.probe_s = math.inf
            elif self.out and self.ended[self.out[0] - 1] <= due_s:
                self.land()
            else:
                self.num_alarms += 1
                self.now = due_s + self.late_s()
                self.policy.woken(due_s, self.now)
        return self


# --- late


def test_an_idle_device_is_given_work_at_once():
    """Whatever is known or not."""
    assert Late(4, MARGIN_S).due_s(5.0) == -math.inf
    drive = Drive().run(50)
    while drive.out:
        drive.land()
    assert drive.policy.due_s(drive.now) == -math.inf


def test_before_it_knows_the_device_it_is_overlap():
    """A second step behind the first at once, and no third before a landing."""
    drive = Drive(Late(4, MARGIN_S)).run(2)

    assert drive.composed[1] == pytest.approx(0.0003)
    assert drive.policy.due_s(drive.now) == math.inf


def test_a_long_step_has_one_behind_it_at_its_very_end():
    """The lead is what a launch costs, what the loop is late, and the margin; the device is never idle."""
    drive = Drive(late_s=lambda: 0.0001).run(100)

    assert drive.leads[-50:] == pytest.approx([0.0003 + MARGIN_S] * 50, abs=2e-5)
    assert max(drive.bubbles[10:]) == 0.0
    assert drive.num_alarms <= drive.num_steps


@pytest.mark.parametrize("step_s", [0.0004, 0.0007, 0.002, 0.5])
def test_as_many_steps_are_out_as_the_lead_needs(step_s):
    """A loop that is late by up to a millisecond, and a launch of a third of one: short steps have several out."""
    chance = random.Random(1)
    drive = Drive(step_s=step_s, cost_s=0.0001, late_s=lambda: chance.random() * 1e-3).run(300)

    assert sum(drive.bubbles[100:]) < 0.01 * 200 * step_s
    assert max(drive.leads[100:]) < 0.0025


def test_never_more_than_max_inflight():
    """However long the lead."""
    drive = Drive(Late(3, 0.1), step_s=0.001).run(50)

    assert len(drive.out) == 3
    assert drive.policy.due_s(drive.now) == math.inf
    assert Drive(Late(1, 0.1)).run(20).policy.due_s(0.0) == math.inf


def test_one_bad_moment_does_not_change_the_lead():
    """A launch of 100 ms and an alarm 100 ms late, once each in a hundred steps."""
    drive = Drive().run(50)
    before = drive.leads[-1]
    drive.late_s = lambda: 0.1
    drive.run(1)
    drive.late_s, drive.cost_s = (lambda: 0.0), 0.1
    drive.run(1)
    drive.cost_s = 0.0003
    drive.run(50)

    assert drive.leads[-10:] == pytest.approx([before] * 10, abs=1e-4)


def test_a_loop_that_is_late_gets_a_longer_lead_and_loses_it_again():
    """The lead covers all but the worst twentieth of what alarms were late by lately."""
    chance = random.Random(2)
    drive = Drive(late_s=lambda: 0.003 * chance.random()).run(300)
    assert drive.policy.statistics()["lateness_ms_p95"] == pytest.approx(3.0, rel=0.1)
    assert sum(bubble > 0 for bubble in drive.bubbles[100:]) <= 6

    drive.late_s = lambda: 0.0
    drive.run(300)
    assert drive.leads[-1] < 0.001


def test_a_loop_that_was_late_once_is_not_thought_late_for_ever():
    """With steps so short, or a lead so long, that no alarm is needed, one is set now and then to measure."""
    drive = Drive(late_s=lambda: 0.005).run(WINDOW)
    drive.step_s, drive.late_s = 0.0004, lambda: 0.0001
    drive.run(20)
    num_alarms = drive.num_alarms
    drive.run(WINDOW * PROBED_LAUNCHES)

    assert drive.num_alarms == num_alarms
    assert drive.policy.statistics()["lateness_ms_p95"] == pytest.approx(0.1)


def test_an_overdue_step_is_not_asked_for_again_and_again():
    """It should have ended: the next is queued behind it at once, and then a landing is waited for."""
    drive = Drive().run(50)
    while drive.out:
        drive.land()
    drive.launch()
    drive.now += 1.0

    assert drive.policy.due_s(drive.now) <= drive.now
    drive.launch()
    assert drive.policy.due_s(drive.now) == math.inf


def test_landings_that_are_seen_late_leave_the_lead_alone():
    """They and alarms are late by up to 0.4 ms: ends follow the lower edge of what is seen, hardly anything waits."""
    chance = random.Random(3)
    late_s = [0.0004 * chance.random() for _ in range(1000)]
    drive = Drive(late_s=iter(late_s).__next__, seen_late_s=iter(late_s[500:]).__next__).run(400)

    assert sum(drive.bubbles[50:]) < 0.0005 * 350 * drive.step_s
    assert max(drive.leads[50:]) < 0.0025


def test_a_lost_step_costs_nothing_and_teaches_nothing():
    """It never reached the device: what is behind it is due as if it were not there."""
    drive = Drive().run(50)
    while drive.out:
        drive.land()
    before = drive.policy.statistics()
    drive.policy.composed(plan(51), drive.now)
    drive.policy.lost(51)
    behind = drive.policy.composed(plan(52), drive.now)
    drive.policy.landed(51, drive.now + 0.5, failed=True)
    drive.policy.landed(52, drive.now + 0.5, failed=True)

    assert behind.lead_s == pytest.approx(0.0)
    assert behind.predicted_s == pytest.approx(0.010, rel=0.01)
    assert drive.policy.statistics() == before


def test_what_was_predicted_before_all_was_forgotten_is_no_error():
    """Six steps are out when the device becomes half as fast. The third shows that it is another one, and it and those
    behind it teach the new pace, though all of them were predicted at the old one."""
    drive = Drive(Late(8, MARGIN_S)).run(50)
    while drive.out:
        drive.land()
    drive.step_s *= 2
    for _ in range(STREAK + FIRST_STEPS - 1):
        drive.launch()
    while drive.out:
        drive.land()

    assert drive.policy.composed(plan(100), drive.now).predicted_s == pytest.approx(0.020)


def test_landings_out_of_order_are_a_fault():
    """A stream's steps land in launch order."""
    drive = Drive().run(2)

    with pytest.raises(AssertionError, match="step 2 landed before step 1"):
        drive.policy.landed(2, 1.0, failed=False)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    step_ms=st.floats(0.2, 200.0),
    cost_ms=st.floats(0.0, 2.0),
    late_ms=st.floats(0.0, 2.0),
    noise=st.floats(0.0, 0.1),
    max_inflight=st.integers(1, 8),
    seed=st.integers(0, 3),
)
def test_on_any_device_it_neither_starves_nor_floods_it(step_ms, cost_ms, late_ms, noise, max_inflight, seed):
    """At least as much of the time busy as overlap keeps the same device, never more out than allowed, at most one
    alarm a step."""

    def drive(policy):
        chance = random.Random(seed)
        made = Drive(policy, cost_s=cost_ms / 1000, late_s=lambda: late_ms / 1000 * chance.random())
        for _ in range(200):
            made.step_s = step_ms / 1000 * (1 + noise * chance.uniform(-1, 1))
            made.run(1)
            assert len(made.out) <= max_inflight
        return made

    late = drive(Late(max_inflight, MARGIN_S))
    overlap = drive(FixedDepth(min(2, max_inflight)))

    assert sum(late.bubbles[50:]) <= sum(overlap.bubbles[50:]) + 0.02 * 150 * step_ms / 1000
    assert late.num_alarms <= late.num_steps


# --- the scheduler and its policy


def warmed_up(**options) -> World:
    """A world whose steps of one row take 10 ms, known to the policy; one is out and has just begun."""
    world = World(policy="late", max_inflight=4, late_margin_ms=1.0, num_blocks=256, **options)
    world.submit(4, 200)
    for _ in range(40):
        while world.launch() is None:
            world.land()
        world.now += 0.010
        world.land()
    world.launch()
    return world


def test_a_step_that_is_not_due_is_answered_by_the_time_when_it_is():
    """Nothing is composed, nothing admitted; then the newcomer is in the step that is due."""
    world = warmed_up()
    newcomer = world.submit(3, 2)
    (wake,) = world.handle(LaunchPossible())

    assert isinstance(wake, WakeAt)
    assert world.now < wake.when_s < world.now + 0.010
    assert world.cached_tokens(newcomer) == []
    world.now = wake.when_s - 0.001  # the world's clock moves by that much with each event
    (*_, launch) = world.handle(LaunchPossible())
    assert isinstance(launch, Launch)
    assert (launch.reason, world.num_inflight) == ("lead", 2)
    assert newcomer in world.listed(launch.plan)
    assert 0.0 < launch.lead_s < 0.005 < launch.predicted_s


def test_an_alarm_teaches_every_policy_how_late_the_loop_is():
    """Both streams' where there are two."""
    world = World(policy="late", prefill="streams")
    world.now = 1.0
    world.handle(AlarmRang(0.991))

    assert [policy.statistics()["lateness_ms_p95"] for policy in world.scheduler.policies.values()] == [
        pytest.approx(10.0)
    ] * 2


def test_why_a_step_is_launched():
    """Nothing out, a landing just now, or depth that the policy keeps; a lead only from ``late``."""
    world = World(policy="overlap")
    world.submit(4, 50)
    reasons = [world.handle(LaunchPossible())[-1].reason, world.handle(LaunchPossible())[-1].reason]
    world.land()
    reasons.append(world.handle(LaunchPossible(has_landed=True))[-1].reason)

    assert reasons == ["idle", "depth", "landing"]


@pytest.mark.parametrize("policy", ["sync", "overlap", "eager", "late"])
@pytest.mark.parametrize("prefill", ["mixed", "split"])
def test_tokens_do_not_depend_on_the_policy(policy, prefill):
    """Launches that fail, steps that fail, ends from outside and stop ids in between: what is delivered is right."""
    world = World(policy=policy, prefill=prefill, max_inflight=3, max_num_batched_tokens=24)
    idents = [world.submit(3 + index, 12, stop_at=5 if index % 3 == 0 else None) for index in range(8)]
    world.runner.fail_launch(5, MemoryError("launch"))
    for _ in range(6):
        world.launch()
        if world.num_inflight > 1:
            world.land()
    world.end(idents[1])
    world.run(depth=3)

    assert world.wrong() == []
    assert world.live == []
