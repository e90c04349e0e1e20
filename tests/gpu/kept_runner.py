"""A model that is loaded once for several engines, one after another."""

from dataclasses import replace
from typing import Any

from aserve.core.plan import BatchPlan
from aserve.engine.ports import Flight, Runner, RunnerInfo


class KeptRunner:
    """A runner that outlives the engines that it serves. changes: of its info, such as fewer blocks than it has."""

    def __init__(self, runner: Runner, **changes: Any) -> None:
        self._runner = runner
        self._info = replace(runner.info, **changes)

    @property
    def info(self) -> RunnerInfo:
        return self._info

    def launch(self, plan: BatchPlan) -> Flight:
        return self._runner.launch(plan)

    def go_on(self) -> None:
        self._runner.go_on()

    def statistics(self) -> dict[str, float]:
        return self._runner.statistics()

    async def aclose(self) -> None:
        """Nothing: the next engine needs it."""
