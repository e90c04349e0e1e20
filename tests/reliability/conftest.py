"""The whole stack runs on uvloop, as it does in production, and on asyncio's own loop.

A test that measures or takes long picks one: ``@pytest.mark.asyncio(loop_factories=["uvloop"])``.
"""

import asyncio
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
