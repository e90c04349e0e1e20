"""One task, first in first out: tokens -> text -> stop check -> streams, sliced so that the loop gets its turns.

Everything that happens to a choice after its token is known happens here, in the order of the scheduler's actions, so a
stream's deltas are never reordered. ``Choice.end`` is the one way in which a choice ends.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from aserve.core.actions import DeliverPromptLogprobs, DeliverTokens, Finish, StartPrefill
from aserve.core.ids import SequenceId
from aserve.core.plan import Logprobs
from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, GenerationRequest, TokenLogprob
from aserve.engine.ports import Observer, TextDecoder
from aserve.engine.stream import TokenStream
from aserve.faults import hit
from aserve.text.stops import StopMatcher

Parcel = StartPrefill | DeliverTokens | DeliverPromptLogprobs | Finish


@dataclass(slots=True, eq=False, kw_only=True)
class Choice:
    """Delivery's state of one sequence. Written by the deliverer only.

    is_first: the first child of its prompt, which counts for prompt usage. stop_ids: eos_ids and the client's own.
    held, held_logprobs: tokens whose text has not been sent yet (half a character, a possible stop string): they travel
    with the delta that carries it, so that tokens and text of a delta belong together. is_queued: a token of it went
    through the queue, so no later one may go past that.
    """

    sequence: SequenceId
    index: int
    request: GenerationRequest
    stream: TokenStream
    is_first: bool
    decoder: TextDecoder
    matcher: StopMatcher | None
    eos_ids: frozenset[int]
    stop_ids: frozenset[int]
    num_output: int = 0
    first_token_s: float | None = None
    last_token_s: float = 0.0
    held: list[int] = field(default_factory=list)
    held_logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    is_queued: bool = False
    has_ended: bool = False


def _logprob(logprobs: Logprobs, row: int, token: int, k: int) -> TokenLogprob:
    ids, values = logprobs.top_ids[row, :k].tolist(), logprobs.top_logprobs[row, :k].tolist()
    return TokenLogprob(
        token=token,
        logprob=float(logprobs.token_logprobs[row]),
        rank=int(logprobs.ranks[row]),
        top=tuple(zip(ids, values, strict=True)),
    )


class Deliverer:
    """choices: the engine's table of choices that have not ended, by sequence; entries leave it through ``end``.

    on_stop(sequence, token_index): a stop string matched. on_end(choice, reason): a choice ended, once for each.
    """

    def __init__(
        self,
        slice_size: int,
        observer: Observer,
        *,
        on_stop: Callable[[SequenceId, int], None],
        on_end: Callable[[Choice, FinishReason], None],
        clock: Callable[[], float],
    ) -> None:
        self.choices: dict[SequenceId, Choice] = {}
        self._slice_size = slice_size
        self._observer = observer
        self._on_stop = on_stop
        self._on_end = on_end
        self._clock = clock
        self._parcels: deque[Parcel] = deque()
        self._has_parcels = asyncio.Event()

    @property
    def num_queued(self) -> int:
        return len(self._parcels)

    def post(self, parcel: Parcel) -> None:
        """Queue what the scheduler said. Bounded by the steps in flight and the sequences that run."""
        self._parcels.append(parcel)
        self._has_parcels.set()

    def take_first_tokens(self, parcel: DeliverTokens) -> DeliverTokens | None:
        """Deliver at once the rows that are their choice's first token, up to a slice; returns the other rows, if any.

        A choice without a token has nothing queued before it but its start, so this overtakes nothing.
        """
        rest: list[tuple[SequenceId, int, int]] = []
        num_left = self._slice_size
        for sequence, token, row in parcel.entries:
            choice = self.choices.get(sequence)
            if choice is None:
                continue
            if num_left and choice.num_output == 0 and not choice.is_queued:
                num_left -= 1
                self._deliver(choice, token, row, parcel.logprobs, self._clock())
            else:
                choice.is_queued = True
                rest.append((sequence, token, row))
        return DeliverTokens(parcel.step, rest, parcel.logprobs) if rest else None

    async def run(self) -> None:
        """Deliver for ever; a slice at a time, with a turn for the loop in between. Cancel to stop."""
        num_since_turn = 0
        while True:
            await self._has_parcels.wait()
            hit("deliver.push")
            parcel = self._parcels.popleft()
            if not self._parcels:
                self._has_parcels.clear()
            if isinstance(parcel, DeliverTokens):
                now = self._clock()
                for sequence, token, row in parcel.entries:
                    choice = self.choices.get(sequence)
                    if choice is not None:
                        self._deliver(choice, token, row, parcel.logprobs, now)
                    num_since_turn += 1
                    if num_since_turn >= self._slice_size:
                        num_since_turn = 0
                        await asyncio.sleep(0)
            else:
                self.deliver_now(parcel)
                num_since_turn += 1
                if num_since_turn >= self._slice_size:
                    num_since_turn = 0
                    await asyncio.sleep(0)

    def deliver_now(self, parcel: StartPrefill | DeliverPromptLogprobs | Finish) -> None:
        choice = self.choices.get(parcel.sequence)
        if choice is None:
            return  # ended before: by a stop string, or its reader left
        if isinstance(parcel, StartPrefill):
            self._start(choice, parcel)
        elif isinstance(parcel, DeliverPromptLogprobs):
            self._add_prompt_logprobs(choice, parcel)
        else:
            is_eos = parcel.stop_token is None or parcel.stop_token in choice.eos_ids
            self.end(choice, parcel.reason, None if is_eos else parcel.stop_token, parcel.detail or None)

    def _start(self, choice: Choice, parcel: StartPrefill) -> None:
        if parcel.resumed:
            return
        timings = choice.stream.timings
        if timings.started_s is None:
            timings.started_s = self._clock()
            self._observer.queue_time(timings.started_s - timings.submitted_s)
        if choice.is_first:
            choice.stream.usage.cached_tokens += parcel.cached_tokens

    def _add_prompt_logprobs(self, choice: Choice, parcel: DeliverPromptLogprobs) -> None:
        prompt = choice.request.prompts[choice.index // choice.request.n]
        if choice.prompt_logprobs is None:
            choice.prompt_logprobs = [None]
        k = choice.request.params.prompt_logprobs or 0
        tokens = prompt[parcel.first : parcel.first + len(parcel.logprobs.token_logprobs)].tolist()
        choice.prompt_logprobs += [_logprob(parcel.logprobs, row, token, k) for row, token in enumerate(tokens)]

    def _deliver(self, choice: Choice, token: int, row: int, logprobs: Logprobs | None, now: float) -> None:
        """One token: into text, past the stop strings, into the stream's mailbox."""
        request, timings = choice.request, choice.stream.timings
        if choice.num_output == 0:
            choice.first_token_s = now
            if timings.first_token_s is None:
                timings.first_token_s = now
            self._observer.first_token(now - timings.submitted_s)
        else:
            self._observer.inter_token(now - choice.last_token_s)
        choice.last_token_s = timings.last_token_s = now
        choice.num_output += 1
        choice.stream.usage.completion_tokens += 1
        choice.held.append(token)
        params = request.params
        if logprobs is not None and params.logprobs is not None:
            choice.held_logprobs.append(_logprob(logprobs, row, token, params.logprobs))
        if token in choice.stop_ids and choice.num_output > params.min_tokens:
            if not request.include_stop_str_in_output:
                return  # it counts, but it is not text; its Finish is next in line
        try:
            text = choice.decoder.push(token)
        except BaseException as error:  # native code that panics raises no Exception
            self._on_stop(choice.sequence, choice.num_output - 1)
            self.end(choice, FinishReason.ERROR, error=f"A token could not be made into text: {error}", text="")
            return
        if choice.matcher is not None and choice.num_output >= params.min_tokens:
            result = choice.matcher.push(text)
            if result.matched is not None:
                self._on_stop(choice.sequence, choice.num_output - 1)
                self.end(choice, FinishReason.STOP, result.matched, None, text=result.text)
                return
            text = result.text
        if text or choice.num_output == 1:
            self._put(choice, text)

    def _put(self, choice: Choice, text: str) -> None:
        tokens = tuple(choice.held)
        choice.held.clear()
        if choice.request.params.logprobs is None and choice.prompt_logprobs is None:
            choice.stream.put(Delta(index=choice.index, text=text, tokens=tokens, num_output=choice.num_output))
            return
        logprobs = None
        if choice.request.params.logprobs is not None:
            logprobs, choice.held_logprobs = tuple(choice.held_logprobs), []
        choice.stream.put(
            Delta(
                index=choice.index,
                text=text,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=self._take_prompt_logprobs(choice),
                num_output=choice.num_output,
            )
        )

    def _take_prompt_logprobs(self, choice: Choice) -> tuple[TokenLogprob | None, ...] | None:
        entries, choice.prompt_logprobs = choice.prompt_logprobs, None
        return None if entries is None else tuple(entries)

    def end(
        self,
        choice: Choice,
        reason: FinishReason,
        stop_reason: str | int | None = None,
        error: str | None = None,
        *,
        text: str | None = None,
    ) -> None:
        """End a choice, once: flush what is held unless a stop string cut it (``text``), and tell the stream."""
        if choice.has_ended:
            return
        choice.has_ended = True
        del self.choices[choice.sequence]
        if text is None:
            text = choice.decoder.finish()
            if choice.matcher is not None:
                result = choice.matcher.push(text)
                text = result.text
                if result.matched is not None:
                    reason, stop_reason = FinishReason.STOP, result.matched
                else:
                    text += choice.matcher.finish()
        has_logprobs = choice.request.params.logprobs is not None
        choice.stream.put(
            Delta(
                index=choice.index,
                text=text,
                tokens=tuple(choice.held),
                logprobs=tuple(choice.held_logprobs) if has_logprobs else None,
                prompt_logprobs=self._take_prompt_logprobs(choice),
                finish=reason,
                stop_reason=stop_reason,
                error=error,
                num_output=choice.num_output,
            )
        )
        self._on_end(choice, reason)
