"""An engine whose deltas a test scripts: no scheduler, no device, no time.

By default every call is answered at once with the text "Hello world!", a token a byte. A test that wants to decide when
things happen calls ``hold()`` and then pushes deltas into the calls it finds in ``engine.calls``.
"""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aserve.core.admission import Limits, fit_max_tokens
from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, GenerationRequest, TokenLogprob, Usage
from aserve.engine.ports import RunnerInfo
from aserve.engine.stream import Timings
from aserve.errors import Draining
from aserve.testing import ByteTokenizer

TEXT = "Hello world!"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeHealth:
    alive: bool = True
    ready: bool = True
    reason: str = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStatistics:
    num_running: int = 0
    num_waiting: int = 0


@dataclass(eq=False)
class FakeCall:
    """One call: what was submitted, and the mailbox that the server reads."""

    request: GenerationRequest
    usage: Usage
    num_choices: int
    is_closed: bool = False
    mail: list[Delta] = field(default_factory=list)
    num_unread: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    timings: Timings = field(default_factory=lambda: Timings(submitted_s=1.0))

    def __post_init__(self) -> None:
        self.num_unread = self.num_choices

    def push_to(self, sink: Callable[[Delta], bool]) -> None:
        """This fake leaves every delta to its reader."""

    # --- the test's side

    def push(self, *deltas: Delta) -> None:
        self.usage.completion_tokens += sum(len(delta.tokens) for delta in deltas)
        self.mail += deltas
        self.news.set()

    def say(self, text: str, index: int = 0) -> None:
        self.push(Delta(index=index, text=text, tokens=tuple(text.encode())))

    def end(self, reason: FinishReason = FinishReason.STOP, *, error: str | None = None) -> None:
        self.push(*(Delta(index=index, finish=reason, error=error) for index in range(self.num_choices)))

    # --- the server's side

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def finished(self) -> bool:
        return self.num_unread == 0

    async def next(self) -> list[Delta]:
        while not self.mail and not self.finished and not self.is_closed:
            self.news.clear()
            await self.news.wait()
        mail, self.mail = self.mail, []
        self.num_unread -= sum(delta.finish is not None for delta in mail)
        return mail

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.closed.set()


def answer(call: FakeCall, text: str = TEXT) -> Iterable[Delta]:
    """What an unheld engine says: the text, cut at the length that was asked for, with logprobs where they were."""
    params = call.request.params
    tokens = tuple(text.encode()[: params.max_tokens])
    finish = FinishReason.LENGTH if len(tokens) < len(text.encode()) else FinishReason.STOP
    of_prompt = None
    for index in range(call.num_choices):
        if params.prompt_logprobs is not None:
            prompt = call.request.prompts[index // call.request.n].tolist()
            of_prompt = (None, *(logprob(token, params.prompt_logprobs) for token in prompt[1:]))
        if not tokens:
            yield Delta(index=index, prompt_logprobs=of_prompt, finish=finish)
        for i, token in enumerate(tokens):
            yield Delta(
                index=index,
                text=chr(token),
                tokens=(token,),
                logprobs=None if params.logprobs is None else (logprob(token, params.logprobs),),
                prompt_logprobs=of_prompt if i == 0 else None,
                finish=finish if i == len(tokens) - 1 else None,
                num_output=i + 1,
            )


def logprob(token: int, num_top: int) -> TokenLogprob:
    """Rank 1 at -0.5; the alternatives are the ids after it."""
    top = tuple(((token + i) % 256, -0.5 - i) for i in range(num_top))
    return TokenLogprob(token=token, logprob=-0.5, rank=1, top=top)


class FakeEngine:
    def __init__(self, *, max_model_len: int = 512) -> None:
        self.info = RunnerInfo(
            model_name="fake",
            device="none",
            vocab_size=258,
            max_model_len=max_model_len,
            num_blocks=64,
            block_size=16,
            max_num_seqs=64,
            eos_ids=(ByteTokenizer.EOS,),
        )
        self.tokenizer = ByteTokenizer()
        self.caches_prefixes = True
        self.state = FakeHealth()
        self.calls: list[FakeCall] = []
        self.refusal: Exception | None = None
        self._arrived = asyncio.Event()
        self._held = False
        self._draining = False

    def hold(self) -> None:
        """From now on calls say nothing by themselves."""
        self._held = True

    def release(self) -> None:
        """Calls made from now on are answered at once again."""
        self._held = False

    async def call(self, index: int = 0) -> FakeCall:
        """The call of this index, waited for."""
        while len(self.calls) <= index:
            self._arrived.clear()
            await self._arrived.wait()
        return self.calls[index]

    # --- the facade

    def fit(self, num_prompt_tokens: int, max_tokens: int | None, default: int | None = None) -> int:
        room = self.info.num_blocks * self.info.block_size
        limits = Limits(
            max_model_len=self.info.max_model_len, pool_tokens=room, max_queue_requests=8, max_queue_tokens=0
        )
        return fit_max_tokens(limits, num_prompt_tokens, max_tokens, default)

    def submit_nowait(self, request: GenerationRequest) -> FakeCall:
        if self.refusal is not None:
            raise self.refusal
        if self._draining:
            raise Draining("The server is shutting down.")
        for prompt in request.prompts:
            self.fit(len(prompt), request.params.max_tokens)
        usage = Usage(prompt_tokens=sum(map(len, request.prompts)), cached_tokens=2)
        call = FakeCall(request, usage, len(request.prompts) * request.n)
        self.calls.append(call)
        self._arrived.set()
        if not self._held:
            call.push(*answer(call))
        return call

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT, *, owner: str | None = None) -> bool:
        for call in self.calls:
            if call.request_id == request_id and not call.is_closed and owner in (None, call.request.owner):
                call.end(reason, error="The request was aborted.")
                return True
        return False

    async def drain(self, timeout_s: float) -> None:
        self._draining = True
        try:
            async with asyncio.timeout(timeout_s):
                for call in self.calls:
                    await call.closed.wait()
        except TimeoutError:
            for call in self.calls:
                if not call.finished:
                    call.end(FinishReason.ABORT, error="The server is shutting down.")

    def flush_prefix_cache(self) -> int:
        return 3

    def statistics(self) -> FakeStatistics:
        return FakeStatistics(num_running=sum(not call.is_closed for call in self.calls))

    def health(self) -> FakeHealth:
        return self.state
