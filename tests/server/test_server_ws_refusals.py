"""What a websocket of responses refuses: bad requests, faults of ours and the engine's, and who may not connect."""

import json

import aiohttp
import pytest
from response_builders import RESPONSES, create, running, socket_of, types
from server_builders import serving
from wire_builders import until

from aserve.core.request import FinishReason
from aserve.errors import Overloaded

# --- faults


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ("nonsense", None),
        ("[]", None),
        ('{"type":"response.create"' + "," * 3 + "}", None),
        ('{"type":"response.steer","stream_id":"a"}', "type"),
        ("{}", "type"),
        (json.dumps(create(temperature=9)), "temperature"),
        (json.dumps(create(tools=[{"type": "function"}])), "tools"),
        (json.dumps(create(stream=False)), "stream"),
        (json.dumps(create(model="other")), "model"),
        (json.dumps(create(input="x" * 5000)), "input"),
    ],
)
async def test_bad_requests_are_typed_errors(sent: str, param: str | None) -> None:
    """The socket stays open, and the next request is served."""
    async with serving() as served, socket_of(served) as ws:
        await ws.ws.send_str(sent)
        error = await ws.receive()
        await ws.send(create())

        assert (error["type"], error["error"]["param"]) == ("error", param)
        assert error["status"] == (404 if param == "model" else 400)
        assert types(await ws.whole())[-1] == "completed"


async def test_refusal_of_the_engine_is_a_typed_error() -> None:
    """With the headers that an HTTP answer would have; status as configured."""
    async with serving(queue_full_status=429) as served, socket_of(served) as ws:
        served.engine.refusal = Overloaded("full", retry_after_s=2.5)
        await ws.send(create(stream_id="a"))
        error = await ws.receive()

    assert (error["status"], error["stream_id"], error["error"]["code"]) == (429, "a", "server_overloaded")
    assert error["error"]["headers"] == {"Retry-After": "3"}


async def test_failed_response_says_so() -> None:
    """The lane goes on."""
    async with serving() as served, socket_of(served) as ws:
        served.engine.hold()
        call = await running(served, ws)
        call.end(FinishReason.ERROR, error="The step failed.")
        last = (await ws.whole())[-1]
        served.engine.release()
        await ws.send(create())

        assert last["response"]["error"] == {"code": "generation_failed", "message": "The step failed."}
        assert types(await ws.whole())[-1] == "completed"


@pytest.mark.parametrize(
    "broken",
    ["aserve.server.response_events.ResponseEvents._ending", "aserve.server.response_calls.ResponseCalls.prepare"],
)
async def test_fault_of_ours_ends_the_response_only(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told without its cause, logged with it; the socket goes on."""
    async with serving() as served, socket_of(served) as ws:
        with monkeypatch.context() as patch:
            patch.setattr(broken, None)
            await ws.send(create())
            last = (await ws.whole())[-1]
        await ws.send(create())

        assert (last.get("error") or last["response"]["error"])["code"] == "internal_error"
        assert len(served.log.fields_of("request.failed")) == 1
        assert types(await ws.whole())[-1] == "completed"


async def test_fault_of_ours_outside_of_any_response_closes_with_1011(monkeypatch: pytest.MonkeyPatch) -> None:
    """No HTTP answer lands among the frames."""
    async with serving() as served, socket_of(served) as ws:
        monkeypatch.setattr("aserve.server.response_socket.ResponsesSocket._take", None)
        await ws.send(create())

        assert (await ws.closed())[0] == 1011
        assert len(served.log.fields_of("request.failed")) == 1


async def test_lone_surrogate_in_a_message_is_escaped() -> None:
    """An error may quote what the client sent, whatever it is."""
    async with serving() as served, socket_of(served) as ws:
        await ws.ws.send_str(json.dumps(create(model="\ud800")))

        assert (await ws.receive())["type"] == "error"


# --- who may connect


async def test_upgrade_is_refused_before_it_happens() -> None:
    """A bad key, a foreign page, a plain GET and a draining server have their own status."""
    statuses = []
    async with serving(api_keys=("k",)) as served:
        key = {"Authorization": "Bearer k"}
        for headers in ({}, {**key, "Origin": "http://evil.example"}):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.session.ws_connect(served.url + RESPONSES, headers=headers)
            statuses.append(refused.value.status)
        plain = await served.get(RESPONSES, headers=key)
        served.server._intake.is_draining = True
        with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
            await served.session.ws_connect(served.url + RESPONSES, headers=key)
        statuses.append(refused.value.status)

    assert statuses == [401, 403, 503]
    assert (plain.status, plain.error["type"]) == (400, "invalid_request_error")


async def test_listed_page_may_connect() -> None:
    """The option for CORS counts for websockets."""
    async with serving(cors_origins=("http://page.example",)) as served:
        async with socket_of(served, headers={"Origin": "http://page.example"}) as ws:
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"


async def test_page_sends_its_key_as_a_subprotocol() -> None:
    """Beside another one, which is the one taken: a browser's script can set no headers. No key comes back."""
    async with serving(api_keys=("k",)) as served:
        async with socket_of(served, protocols=("openai-insecure-api-key.k", "realtime")) as ws:
            assert ws.ws.protocol == "realtime"
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"
        for protocols in (("openai-insecure-api-key.other", "realtime"), ("realtime",)):
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await served.session.ws_connect(served.url + RESPONSES, protocols=protocols)
            assert (refused.value.status, "openai" in str(refused.value.headers)) == (401, False)


async def test_number_of_sockets_is_bounded() -> None:
    """One more is closed with 1013; a place is free again when a socket has closed."""
    async with serving(max_websockets=1) as served:
        async with socket_of(served), socket_of(served) as further:
            assert (await further.closed())[0] == 1013
        await until(lambda: served.server.statistics()["websockets"] == 0)
        async with socket_of(served) as ws:
            await ws.send(create())
            assert types(await ws.whole())[-1] == "completed"
