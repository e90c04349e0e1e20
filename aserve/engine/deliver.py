"""One task, first in first out: tokens -> text -> stop check -> streams, sliced so that the loop gets its turns.

Everything that happens to a choice after its token is known happens here, in the order of the scheduler's actions, so a
stream's deltas are never reordered. On a busy loop, several steps' tokens go out together (``joining.py``).
``Deliverer.end`` is the one way in which a choice ends.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from aserve.core.actions import DeliverPromptLogprobs, DeliverTokens, Finish, NoteRequeue, StartPrefill
from aserve.core.ids import SequenceId
from aserve.core.plan import Logprobs
from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, GenerationRequest, TokenLogprob
from aserve.engine.joining import Joining
from aserve.engine.ports import Observer, RequestMove, RequestPhase, TextDecoder
from aserve.engine.stream import TokenStream
from aserve.faults import hit
from aserve.text.stops import StopMatcher

Parcel = DeliverTokens | DeliverPromptLogprobs | Finish
Deliverable = StartPrefill | NoteRequeue | Parcel


@dataclass(slots=True, eq=False, kw_only=True)
class Choice:
    """Delivery's state of one sequence. Written by the deliverer only.

    is_first: the first child of its prompt, which counts for prompt usage. stop_ids: eos_ids and the client's own.
    held, held_logprobs: tokens whose text has not been sent yet (half a character, a possible stop string): they travel
    with the delta that carries it, so that tokens and text of a delta belong together. held_text: waits for that of the
    next step's token, and ``num_joined`` of the held tokens with it. num_unspaced: tokens since ``last_token_s``, whose
    times will be told with the next one's. is_plain: its deltas carry text and tokens only. is_queued: its first token
    went through the queue, so no later one may go past that.
    started_s, num_cached: when its first step was composed, and what the prefix cache had of its prompt then.
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
    is_plain: bool
    num_output: int = 0
    num_cached: int = 0
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    held: list[int] = field(default_factory=list)
    held_logprobs: list[TokenLogprob] = field(default_factory=list)
    held_text: str = ""
    num_joined: int = 0
    num_unspaced: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    is_queued: bool = False
    has_ended: bool = False

    @property
    def prompt(self) -> NDArray[np.int32]:
        return self.request.prompts[self.index // self.request.n]


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
    max_joined_steps: see ``Joining``.
    """

    def __init__(
        self,
        slice_size: int,
        max_joined_steps: int,
        observer: Observer,
        *,
        on_stop: Callable[[SequenceId, int], None],
        on_end: Callable[[Choice, FinishReason], None],
        clock: Callable[[], float],
    ) -> None:
        self.choices: dict[SequenceId, Choice] = {}
        self._slice_size = slice_size
        self._joining = Joining(max_joined_steps)
        self._observer = observer
        self._on_stop = on_stop
        self._on_end = on_end
        self._clock = clock
        self._parcels: deque[Parcel] = deque()
        self._has_parcels = asyncio.Event()
        self._num_since_turn = 0
        # Streams of one landing got their last token in one landing, so nearly all gaps are the same number.
        self._gap_s = 0.0
        self._num_gaps = 0

    @property
    def num_queued(self) -> int:
        return len(self._parcels)

    def post(self, action: Deliverable) -> None:
        """Queue what the scheduler said. Bounded by the steps in flight and the sequences that run.

        What nothing comes of that a reader sees is noted at once.
        """
        if self._queue(action):
            self._has_parcels.set()

    def post_landing(self, actions: Iterable[Deliverable], landed_s: float, *, is_next_short: bool) -> None:
        """``post`` all that came of a step's landing. It goes out now, or with what comes of the next one's.

        is_next_short: whether another step is on the device, and of rows alone: it lands soon.
        """
        tokens = None
        for action in actions:
            self._queue(action)
            if isinstance(action, DeliverTokens):
                tokens = action
        if tokens is not None:
            self._joining.note_landing(landed_s)
            num_queued = sum(isinstance(parcel, DeliverTokens) for parcel in self._parcels)
            if is_next_short and self._joining.should_wait(len(tokens.sequences), num_queued):
                return
        if self._parcels:
            self._has_parcels.set()

    def _queue(self, action: Deliverable) -> bool:
        """Returns whether it became a parcel."""
        if isinstance(action, StartPrefill):
            self._start(action)
            return False
        if isinstance(action, NoteRequeue):
            self.note_move(action.sequence, "queued", action.at_s)
            return False
        self._parcels.append(action)
        return True

    def note_move(self, sequence: SequenceId, phase: RequestPhase, now: float, num_tokens: int = 0) -> None:
        """Tell the observer of a sequence that has not ended."""
        choice = self.choices.get(sequence)
        if choice is not None:
            self._observer.request_moved(
                RequestMove(
                    sequence=sequence,
                    request_id=choice.request.request_id,
                    index=choice.index,
                    phase=phase,
                    at_s=now,
                    num_tokens=num_tokens,
                )
            )

    def take_first_tokens(self, parcel: DeliverTokens) -> DeliverTokens | None:
        """Deliver at once the rows that are their choice's first token, up to a slice; returns the other rows, if any.

        A choice without a token has nothing queued before it, so this overtakes nothing. The parcel is the caller's no
        more.
        """
        firsts = range(parcel.num_decoded, len(parcel.sequences))
        if not firsts:
            return parcel
        now = self._clock()
        kept = list(range(parcel.num_decoded))
        num_left = self._slice_size
        for index in firsts:
            choice = self.choices.get(parcel.sequences[index])
            if choice is None:
                continue
            self.note_move(choice.sequence, "decode", now)
            if num_left and choice.num_output == 0 and not choice.is_queued:
                num_left -= 1
                self._deliver(choice, parcel.tokens[index], parcel.rows[index], parcel.logprobs, now)
            else:
                choice.is_queued = True
                kept.append(index)
        if not kept:
            return None
        return DeliverTokens(
            parcel.step,
            [parcel.sequences[index] for index in kept],
            [parcel.tokens[index] for index in kept],
            [parcel.rows[index] for index in kept],
            parcel.num_decoded,
            parcel.logprobs,
        )

    async def run(self) -> None:
        """Deliver for ever; a slice at a time, with a turn for the loop in between. Cancel to stop."""
        while True:
            await self._has_parcels.wait()
            hit("deliver.push")
            parcel = self._parcels.popleft()
            if not self._parcels:
                self._has_parcels.clear()
            if isinstance(parcel, DeliverTokens):
                await self._deliver_tokens(parcel)
            else:
                self.deliver_now(parcel)
                self._num_since_turn += 1
                if self._num_since_turn >= self._slice_size:
                    await self._give_turn()

    async def _deliver_tokens(self, parcel: DeliverTokens) -> None:
        followed = self._followed_in(parcel)
        entries = zip(parcel.sequences, parcel.tokens, parcel.rows, strict=True)
        now = began_s = self._clock()
        num_left = len(parcel.sequences)
        try:
            while num_left:
                num_now = min(num_left, self._slice_size - self._num_since_turn)
                self._deliver_entries(itertools.islice(entries, num_now), parcel.logprobs, now, followed)
                num_left -= num_now
                self._num_since_turn += num_now
                ended_s = self._clock()
                self._observer.delivered(began_s, ended_s, num_now)
                if not followed:
                    self._joining.note_delivery(ended_s - began_s, num_now)
                if self._num_since_turn >= self._slice_size:
                    await self._give_turn()
                    began_s = self._clock()
        except asyncio.CancelledError:  # the end: what has landed is not lost
            self._deliver_entries(entries, parcel.logprobs, now, followed)
            raise
        self._flush_gaps()

    def _followed_in(self, parcel: DeliverTokens) -> Container[SequenceId]:
        """Those whose text may wait for that of their next token, which is in the queue."""
        followed: Container[SequenceId] = ()
        if self._joining.may_be_followed(len(parcel.sequences)):
            behind = next((each for each in self._parcels if isinstance(each, DeliverTokens)), None)
            followed = () if behind is None else set(behind.sequences)
        self._joining.note_followed(is_followed=bool(followed))
        return followed

    def _deliver_entries(
        self,
        entries: Iterable[tuple[SequenceId, int, int]],
        logprobs: Logprobs | None,
        now: float,
        followed: Container[SequenceId],
    ) -> None:
        choices = self.choices
        for sequence, token, row in entries:
            choice = choices.get(sequence)
            if choice is not None:
                self._deliver(choice, token, row, logprobs, now, is_followed=sequence in followed)

    def deliver_rest(self) -> None:
        """All that is queued, in one go: before an end that nothing comes after."""
        now = self._clock()
        while self._parcels:
            parcel = self._parcels.popleft()
            if isinstance(parcel, DeliverTokens):
                entries = zip(parcel.sequences, parcel.tokens, parcel.rows, strict=True)
                self._deliver_entries(entries, parcel.logprobs, now, ())
            else:
                self.deliver_now(parcel)
        self._flush_gaps()

    async def _give_turn(self) -> None:
        self._num_since_turn = 0
        await asyncio.sleep(0)

    def _flush_gaps(self) -> None:
        if self._num_gaps:
            self._observer.inter_token(self._gap_s, self._num_gaps)
            self._num_gaps = 0

    def deliver_now(self, parcel: DeliverPromptLogprobs | Finish) -> None:
        choice = self.choices.get(parcel.sequence)
        if choice is None:
            return  # ended before: by a stop string, or its reader left
        if isinstance(parcel, DeliverPromptLogprobs):
            self._add_prompt_logprobs(choice, parcel)
        else:
            is_eos = parcel.stop_token is None or parcel.stop_token in choice.eos_ids
            self.end(choice, parcel.reason, None if is_eos else parcel.stop_token, parcel.detail or None)

    def _start(self, parcel: StartPrefill) -> None:
        now = parcel.at_s
        self.note_move(parcel.sequence, "prefill", now, parcel.cached_tokens)
        choice = self.choices.get(parcel.sequence)
        if choice is None or parcel.resumed:
            return
        choice.started_s, choice.num_cached = now, parcel.cached_tokens
        timings = choice.stream.timings
        if timings.started_s is None:
            timings.started_s = now
        if choice.is_first:
            choice.stream.usage.cached_tokens += parcel.cached_tokens
        self._observer.request_started(now - timings.submitted_s, len(choice.prompt), parcel.cached_tokens)

    def _add_prompt_logprobs(self, choice: Choice, parcel: DeliverPromptLogprobs) -> None:
        prompt = choice.prompt
        if choice.prompt_logprobs is None:
            choice.prompt_logprobs = [None]
        k = choice.request.params.prompt_logprobs or 0
        tokens = prompt[parcel.first : parcel.first + len(parcel.logprobs.token_logprobs)].tolist()
        choice.prompt_logprobs += [_logprob(parcel.logprobs, row, token, k) for row, token in enumerate(tokens)]

    def _deliver(
        self,
        choice: Choice,
        token: int,
        row: int,
        logprobs: Logprobs | None,
        now: float,
        *,
        is_followed: bool = False,
    ) -> None:
        """One token: into text, past the stop strings, into the stream's mailbox.

        is_followed: the choice's next token is in the queue, and their text goes out together.
        """
        choice.num_output = num_output = choice.num_output + 1
        if num_output == 1:
            is_followed = False  # nobody waits for a first token
            self._note_first(choice, now)
        elif is_followed:
            choice.num_unspaced += 1
        else:
            self._note_gaps(choice, now)
        choice.stream.usage.completion_tokens += 1
        choice.held.append(token)
        request = choice.request
        params = request.params
        if logprobs is not None and params.logprobs is not None:
            choice.held_logprobs.append(_logprob(logprobs, row, token, params.logprobs))
        if token in choice.stop_ids and num_output > params.min_tokens:
            if not request.include_stop_str_in_output:
                return  # it counts, but it is not text; its Finish is next in line
        try:
            text = choice.decoder.push(token)
        except BaseException as error:  # native code that panics raises no Exception
            self._on_stop(choice.sequence, num_output - 1)
            self.end(choice, FinishReason.ERROR, error=f"A token could not be made into text: {error}", text="")
            return
        if choice.matcher is not None and num_output >= params.min_tokens:
            result = choice.matcher.push(text)
            if result.matched is not None:
                self._on_stop(choice.sequence, num_output - 1)
                self.end(choice, FinishReason.STOP, result.matched, None, text=result.text)
                return
            text = result.text
        if is_followed:
            if text:
                choice.held_text += text
                choice.num_joined = len(choice.held)
        elif text or num_output == 1:
            self._put(choice, text, len(choice.held))
        elif choice.held_text:
            self._put(choice, "", choice.num_joined)

    def _note_first(self, choice: Choice, now: float) -> None:
        timings = choice.stream.timings
        choice.first_token_s = choice.last_token_s = now
        if timings.first_token_s is None:
            timings.first_token_s = now
        self._observer.first_token(now - timings.submitted_s)

    def _note_gaps(self, choice: Choice, now: float) -> None:
        """Tokens that go out together share the time since the one before them."""
        num_tokens = choice.num_unspaced + 1
        gap_s = (now - choice.last_token_s) / num_tokens
        if gap_s == self._gap_s:
            self._num_gaps += num_tokens
        else:
            self._flush_gaps()
            self._gap_s, self._num_gaps = gap_s, num_tokens
        choice.last_token_s, choice.num_unspaced = now, 0

    def _put(self, choice: Choice, text: str, num_tokens: int) -> None:
        """Send ``text`` behind that which waits, with the first ``num_tokens`` of the held tokens."""
        tokens = tuple(choice.held[:num_tokens])
        del choice.held[:num_tokens]
        num_output = choice.num_output - len(choice.held)
        if choice.held_text:
            text, choice.held_text = choice.held_text + text, ""
        if choice.is_plain:
            choice.stream.put(Delta(index=choice.index, text=text, tokens=tokens, num_output=num_output))
            return
        logprobs = None
        if choice.request.params.logprobs is not None:
            logprobs = tuple(choice.held_logprobs[:num_tokens])
            del choice.held_logprobs[:num_tokens]
        choice.stream.put(
            Delta(
                index=choice.index,
                text=text,
                tokens=tokens,
                logprobs=logprobs,
                prompt_logprobs=self._take_prompt_logprobs(choice),
                num_output=num_output,
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
        if choice.num_unspaced:
            choice.num_unspaced -= 1  # the last of them is the one that ends it
            self._note_gaps(choice, self._clock())
        if choice.num_output:
            timings = choice.stream.timings
            timings.last_token_s = max(timings.last_token_s or 0.0, choice.last_token_s)
        if text is None:
            try:
                text = choice.decoder.finish()
            except BaseException as fault:  # native code that panics raises no Exception
                text, reason, stop_reason = "", FinishReason.ERROR, None
                error = f"The last tokens could not be made into text: {fault}"
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
                text=choice.held_text + text,
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
