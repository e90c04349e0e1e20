"""Completions with ``echo`` and ``max_tokens: 0``: the prompt and its logprobs, nothing after it."""

from collections.abc import Sequence
from dataclasses import replace

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, Usage
from aserve.server.ports import Stream


class PromptOnly:
    """A stream whose choices end where their prompts do.

    The engine samples at least one token, so where logprobs of the prompt are wanted it runs for one (``inner``), which
    is dropped here; without logprobs nothing has to run at all.
    """

    def __init__(self, inner: Stream | None, *, num_choices: int, num_prompt_tokens: int) -> None:
        self._inner = inner
        self._num_choices = num_choices
        self._num_prompt_tokens = num_prompt_tokens
        self._ended = False

    @property
    def usage(self) -> Usage:
        cached = self._inner.usage.cached_tokens if self._inner else 0
        return Usage(prompt_tokens=self._num_prompt_tokens, cached_tokens=cached)

    @property
    def finished(self) -> bool:
        return self._inner.finished if self._inner else self._ended

    async def next(self) -> list[Delta]:
        if self._inner is not None:
            return _without_output(await self._inner.next())
        if self._ended:
            return []
        self._ended = True
        return [Delta(index=index, finish=FinishReason.LENGTH) for index in range(self._num_choices)]

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()


def _without_output(deltas: Sequence[Delta]) -> list[Delta]:
    return [
        replace(
            delta,
            text="",
            tokens=(),
            logprobs=None,
            finish=FinishReason.LENGTH if delta.finish is FinishReason.STOP else delta.finish,
            stop_reason=None,
            num_output=0,
        )
        for delta in deltas
    ]
