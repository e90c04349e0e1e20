"""The event encoder: pure, so that every split of a text can be tried."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from aserve.core.request import FinishReason
from aserve.engine.generation import Delta, Usage
from aserve.errors import GenerationFailed
from aserve.server.sse import ChatChunks, ChunkOptions, error_event, json_text


def encoder(model: str = "m", **options: Any) -> ChatChunks:
    return ChatChunks(
        id="id",
        created=1,
        model=model,
        num_choices=1,
        usage=Usage(),
        token_bytes=lambda token: bytes((token,)),
        options=ChunkOptions(**options),
    )


@given(st.text())
def test_text_survives_and_has_no_line_breaks(text: str) -> None:
    """Whatever the text, the JSON string decodes to it and splits into one line for every kind of client."""
    encoded = json_text(text).decode()

    assert json.loads(encoded) == text
    assert len(encoded.splitlines()) == 1


@given(st.lists(st.text()))
def test_pieces_join_to_the_text(pieces: list[str]) -> None:
    """However the text is cut, the chunks' contents join to it, and none of them is empty."""
    chunks = encoder()

    body = b"".join(chunks.encode(Delta(index=0, text=piece, tokens=(1,))) for piece in pieces)
    payloads = [json.loads(event[6:]) for event in body.decode().split("\n\n")[:-1]]

    contents = [payload["choices"][0]["delta"]["content"] for payload in payloads]
    assert "".join(contents) == "".join(pieces)
    assert contents[1:] == [piece for piece in pieces if piece]


def test_fast_and_detailed_frames_agree() -> None:
    """A stream with logprobs switched on writes the same plain chunk as one without, where there are none."""
    fast, detailed = encoder(), encoder(logprobs=0)
    for each in (fast, detailed):
        each.encode(Delta(index=0, text="a", tokens=(1,)))

    delta = Delta(index=0, text="x\u2028\0", tokens=(2,))
    assert fast.encode(delta) == detailed.encode(delta)


def test_mark_in_the_model_name_does_no_harm() -> None:
    """The place of the text is found behind the fields that others choose."""
    chunks = encoder(model='a"\0b')
    chunks.encode(Delta(index=0, text="a", tokens=(1,)))

    payload = json.loads(chunks.encode(Delta(index=0, text="b", tokens=(2,)))[6:])
    assert (payload["model"], payload["choices"][0]["delta"]) == ('a"\0b', {"content": "b"})


def test_nothing_is_sent_before_the_first_token() -> None:
    """A delta that carries neither token nor end makes no event, least of all the role."""
    assert encoder().encode(Delta(index=0)) == b""


def test_answer_of_no_tokens_still_has_role_and_finish() -> None:
    """A choice that ends at once opens and closes."""
    body = encoder().encode(Delta(index=0, finish=FinishReason.STOP, stop_reason="end")).decode()

    first, last = (json.loads(event[6:])["choices"][0] for event in body.split("\n\n")[:-1])
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert (last["delta"], last["finish_reason"], last["stop_reason"]) == ({}, "stop", "end")


def test_error_event_survives_lone_surrogates() -> None:
    """A message that is not Unicode is escaped, not raised over."""
    event = error_event(GenerationFailed("bad \ud83d path"))

    assert json.loads(event[6:])["error"]["message"] == "bad \\ud83d path"
