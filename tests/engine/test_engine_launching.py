"""What a launch is kept free of."""

import gc
from typing import Any

import pytest
from engine_builders import read, request, running

from aserve.core.plan import BatchPlan
from aserve.testing import ScriptedRunner


@pytest.mark.parametrize("fails", [False, True])
async def test_no_garbage_is_collected_while_a_step_is_composed_and_launched(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device may be waiting then. Afterwards, the launch failed or not, collections are on again."""
    was_on: list[tuple[str, bool]] = []

    class Runner(ScriptedRunner):
        def launch(self, plan: BatchPlan) -> Any:
            was_on.append(("launch", gc.isenabled()))
            if fails and len(plan.rows):
                raise ValueError("no")
            return super().launch(plan)

    gc.enable()
    async with running(Runner()) as engine:
        compose = engine.scheduler.handle

        def handle(event: Any, now: float) -> Any:
            was_on.append((type(event).__name__, gc.isenabled()))
            return compose(event, now)

        monkeypatch.setattr(engine.scheduler, "handle", handle)
        await read(engine.submit_nowait(request("hello", max_tokens=3)))
        was_on.append(("behind", gc.isenabled()))

    found = dict.fromkeys(was_on)
    assert [each for each in found if each[0] in ("LaunchPossible", "launch", "StepLaunched", "LaunchFailed")] == [
        ("LaunchPossible", False),
        ("launch", False),
        ("StepLaunched", False),
        *([("LaunchFailed", False)] if fails else []),
    ]
    assert ("behind", True) in found


async def test_what_a_launch_left_goes_on_while_requests_arrive() -> None:
    """All that arrive in one turn of the loop keep it; a step in parts does not wait for the last of them."""
    log: list[str] = []

    class Runner(ScriptedRunner):
        def launch(self, plan: BatchPlan) -> Any:
            log.append("launch")
            return super().launch(plan)

        def go_on(self) -> None:
            log.append("go on")

    async with running(Runner()) as engine:
        streams = [engine.submit_nowait(request("hello", max_tokens=1)) for _ in range(3)]
        arrived = list(log)
        for stream in streams:
            await read(stream)

    assert arrived == ["go on"] * 3
    assert "launch" in log
