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
