"""Keys, origins, host names, request ids, and the endpoints that need none of them."""

import re
from typing import Any

import pytest
from fake_engine import FakeHealth
from server_builders import MODEL, chat, http, serving

from aserve.server.app import Server

CHAT = "/v1/chat/completions"
KEY = "sk-the-right-one"
BEARER = {"Authorization": f"Bearer {KEY}"}


@pytest.mark.parametrize(
    "values",
    [
        [],
        [""],
        ["Bearer"],
        ["Bearer "],
        [f"Basic {KEY}"],
        [KEY],
        *[[f"Bearer {KEY[:n]}"] for n in range(len(KEY))],
        [f"Bearer {KEY}x"],
        [f"Bearer {KEY}", f"Bearer {KEY}"],
        ["Bearer clé"],
        ["Bearer " + "k" * 8000],
    ],
    ids=lambda values: str(values)[:40],
)
async def test_wrong_key_is_refused_before_any_work(values: list[str]) -> None:
    """Missing, cut, doubled, foreign or non-ASCII keys: 401, and the body is not looked at."""
    headers = "".join(f"Authorization: {value}\r\n" for value in values)
    async with serving(api_keys=("sk-other", KEY)) as served:
        raw = await served.raw(http("POST", CHAT, b"not json", headers=headers))

        assert raw.startswith(b"HTTP/1.1 401 ")
        assert b"WWW-Authenticate: Bearer\r\n" in raw and b'"code":"invalid_api_key"' in raw
        assert KEY.encode() not in raw and KEY not in str(served.log.records)


@pytest.mark.parametrize("value", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY}"])
async def test_right_key_is_admitted(value: str) -> None:
    """The scheme's case does not matter."""
    async with serving(api_keys=("sk-other", KEY)) as served:
        answer = await served.post(CHAT, chat(), headers={"Authorization": value})
        request = served.engine.calls[0].request

    assert answer.status == 200
    assert re.fullmatch("[0-9a-f]{64}", request.owner) and KEY not in request.owner


async def test_every_route_but_the_open_ones_needs_a_key() -> None:
    """Deny by default: routes of today, routes of tomorrow, and paths that do not exist."""
    async with serving(api_keys=(KEY,)) as served:
        routes = {(route.method, route.pattern) for route in _routes(served.server)}
        statuses = {route: (await served.request(*route)).status for route in routes}
        unknown = await served.get("/debug")

    assert {route for route, status in statuses.items() if status != 401} == {
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/metrics"),
    }
    assert unknown.status == 401


def _routes(server: Server) -> list[Any]:
    return server._api.routes()


async def test_keys_do_not_share_cached_prefixes() -> None:
    """The salt comes from the key, whatever the client adds, so that nobody can time another's prompts."""
    async with serving(api_keys=("a", "b")) as served:
        for key in ("a", "b", "a"):
            await served.post(CHAT, chat(cache_salt="s"), headers={"Authorization": f"Bearer {key}"})
        salts = [call.request.cache_salt for call in served.engine.calls]

    assert salts[0] == salts[2] != salts[1]
    assert all(salt.endswith(":s") for salt in salts)


async def test_key_with_its_share_open_is_told_to_wait() -> None:
    """429 with Retry-After for that key alone, and only while its requests are open."""
    async with serving(api_keys=("a", "b"), max_requests_per_key=1) as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True), headers="Authorization: Bearer a\r\n"))
        call = await served.engine.call()
        refused = await served.post(CHAT, chat(), headers={"Authorization": "Bearer a"})
        call.end()
        await reader.read()
        writer.close()
        served.engine.release()
        admitted = [await served.post(CHAT, chat(), headers={"Authorization": f"Bearer {key}"}) for key in "ab"]

    assert (refused.status, refused.error["code"], refused.headers["Retry-After"]) == (429, "rate_limit_exceeded", "1")
    assert "x-should-retry" not in refused.headers
    assert [answer.status for answer in admitted] == [200, 200]


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        ("my-id_1.2", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a" * 8000, False),
        ("a\tb", False),
        ("\xc3(", False),
        ('x"},{"level":"error"', False),
        ("", False),
    ],
)
async def test_request_id_is_kept_only_where_it_is_harmless(sent: str, kept: bool) -> None:
    """Letters, digits and ._- up to 128; else a fresh one. The same in the log, on errors too."""
    async with serving() as served:
        raw = await served.raw(http("POST", CHAT, b"{", headers=f"X-Request-ID: {sent}\r\n"))
        logged = served.log.fields_of("request.finished")[0]["request_id"]

    label = re.search(rb"X-Request-ID: ([^\r]*)", raw)[1].decode()  # type: ignore[index]
    assert (label == sent) == kept
    assert re.fullmatch("[A-Za-z0-9._-]{1,128}", label) and logged == label


async def test_same_request_id_twice_is_two_requests() -> None:
    """The header is a label; the engine's ids are ours and unique."""
    async with serving() as served:
        for _ in range(2):
            await served.post(CHAT, chat(), headers={"X-Request-ID": "dup-1"})

        ids = [call.request_id for call in served.engine.calls]
        assert len(set(ids)) == 2 and "dup-1" not in "".join(ids)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/health", 200),
        ("HEAD", "/metrics", 200),
        ("GET", "/nope", 404),
        ("PUT", "/health", 405),
        ("OPTIONS", CHAT, 204),
        ("POST", CHAT, 400),
        ("DELETE", "/v1/requests/x", 404),
    ],
)
async def test_request_id_is_on_every_answer(method: str, path: str, status: int) -> None:
    """Errors, preflights and empty answers included."""
    async with serving() as served:
        answer = await served.request(method, path, headers={"X-Request-ID": "label"})

    assert (answer.status, answer.headers["X-Request-ID"]) == (status, "label")


async def test_request_id_is_on_a_stream() -> None:
    """The stream's headers carry it too."""
    async with serving() as served:
        answer = await served.post(CHAT, chat(stream=True), headers={"X-Request-ID": "label"})

    assert answer.headers["X-Request-ID"] == "label"


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:1", 200),
        ("https://localhost:1", 200),
        ("https://listed.example", 200),
        ("https://evil.example", 403),
        ("https://listed.example.evil", 403),
        ("http://localhost:2", 403),
        ("null", 403),
    ],
)
async def test_foreign_origin_is_refused(origin: str | None, status: int) -> None:
    """A page may call if it is listed or comes from the server itself; no generation starts for another."""
    headers = "" if origin is None else f"Origin: {origin}\r\n"
    sent = http("POST", CHAT, chat(), headers=headers).replace(b"Host: localhost", b"Host: localhost:1")
    async with serving(cors_origins=("https://listed.example/",)) as served:
        raw = await served.raw(sent)

        assert raw.startswith(f"HTTP/1.1 {status} ".encode())
        assert (b"Access-Control-Allow-Origin" in raw) == (origin == "https://listed.example")
        assert len(served.engine.calls) == (status == 200)


async def test_preflight_passes_without_a_key() -> None:
    """OPTIONS from a listed page gets methods and headers; without an origin just Allow."""
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    async with serving(api_keys=(KEY,), cors_origins=("https://a.example",)) as served:
        preflight = await served.request("OPTIONS", CHAT, headers=asked)
        foreign = await served.request("OPTIONS", CHAT, headers={**asked, "Origin": "https://evil.example"})
        plain = await served.request("OPTIONS", CHAT)
        refused = await served.post(CHAT, chat(), headers={"Origin": "https://a.example"})

    assert preflight.status == 204
    assert preflight.headers["Access-Control-Allow-Origin"] == "https://a.example"
    assert preflight.headers["Access-Control-Allow-Methods"] == "OPTIONS, POST"
    assert "Authorization" in preflight.headers["Access-Control-Allow-Headers"]
    assert (foreign.status, plain.status, plain.headers["Allow"]) == (403, 204, "OPTIONS, POST")
    # A page must be able to read why it was refused.
    assert (refused.status, refused.headers["Access-Control-Allow-Origin"]) == (401, "https://a.example")


async def test_any_origin_can_be_allowed() -> None:
    """The star lists every page."""
    async with serving(cors_origins=("*",)) as served:
        answer = await served.post(CHAT, chat(), headers={"Origin": "https://any.example"})

    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://any.example")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("gpu.example:80", 200),
        ("attacker.example", 403),
        ("localhost.attacker.example", 403),
        ("127.0.0.1.attacker.example", 403),
        ("", 403),
    ],
)
async def test_foreign_host_name_is_refused_on_loopback(host: str, status: int) -> None:
    """A page whose own name resolves to us is DNS rebinding."""
    async with serving(allowed_hosts=("gpu.example",)) as served:
        raw = await served.raw(http("GET", "/v1/models").replace(b"Host: localhost", f"Host: {host}".encode()))

    assert raw.startswith(f"HTTP/1.1 {status} ".encode())


async def test_any_host_name_reaches_an_address_of_the_network() -> None:
    """Behind a proxy or in a container the names are not ours to know, unless they are listed."""
    async with serving(host="0.0.0.0") as open_to_all, serving(host="0.0.0.0", allowed_hosts=("a.example",)) as listed:
        sent = http("GET", "/v1/models").replace(b"Host: localhost", b"Host: b.example")
        answers = [await open_to_all.raw(sent), await listed.raw(sent)]

    assert [answer.split()[1] for answer in answers] == [b"200", b"403"]


async def test_models_are_listed_by_every_name() -> None:
    """The list, one by name (percent-encoded too), and 404 for another."""
    async with serving() as served:
        models = (await served.get("/v1/models")).json
        alias = await served.get("/v1/models/%61lias")
        unknown = await served.get("/v1/models/a/b")

    assert [entry["id"] for entry in models["data"]] == [MODEL, "alias"]
    assert alias.json == models["data"][1]
    assert alias.json["max_model_len"] == 512 and alias.json["object"] == "model"
    assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")


async def test_abort_by_our_own_id_and_key_only() -> None:
    """Another key, an unknown id and an empty one match nothing; the right one ends the stream with an error event."""
    async with serving(api_keys=("a", "b")) as served:
        served.engine.hold()
        reader, writer = await served.connect()
        writer.write(http("POST", CHAT, chat(stream=True), headers="Authorization: Bearer a\r\n"))
        call = await served.engine.call()
        call.say("x")
        a, b = {"Authorization": "Bearer a"}, {"Authorization": "Bearer b"}
        by_other = await served.request("DELETE", f"/v1/requests/{call.request_id}", headers=b)
        unknown = await served.request("DELETE", "/v1/requests/chatcmpl-1", headers=a)
        empty = await served.request("DELETE", "/v1/requests/", headers=a)
        own = await served.request("DELETE", f"/v1/requests/{call.request_id}", headers=a)
        rest = await reader.read()
        writer.close()

    assert [answer.status for answer in (by_other, unknown, empty, own)] == [404, 404, 400, 200]
    assert b"request_aborted" in rest and b"[DONE]" not in rest


async def test_tokenize_and_back() -> None:
    """Text and chats to ids with the context's length, ids to text, messages to the prompt."""
    async with serving() as served:
        text = (await served.post("/tokenize", {"prompt": "hé", "return_token_strs": True})).json
        other_name = (await served.post("/tokenize", {"content": "h"})).json
        chatted = (await served.post("/tokenize", {"messages": [{"role": "user", "content": "x"}]})).json
        back = (await served.post("/detokenize", {"tokens": text["tokens"]})).json
        template = (await served.post("/apply-template", {"messages": [{"role": "user", "content": "x"}]})).json
        neither = await served.post("/tokenize", {})
        outside = await served.post("/detokenize", {"tokens": [1, 258]})

    assert text == {
        "count": 3,
        "max_model_len": 512,
        "tokens": [104, 195, 169],
        "token_strs": ["h", "\ufffd", "\ufffd"],
    }
    assert other_name["tokens"] == [104]
    assert bytes(chatted["tokens"]).decode() == template["prompt"] == "user:x\nassistant:"
    assert back == {"prompt": "hé"}
    assert (neither.status, neither.error["param"]) == (400, "prompt")
    assert (outside.status, outside.error["param"]) == (400, "tokens[1]")


async def test_health_and_readiness_follow_the_engine() -> None:
    """Alive and ready are two questions; each no is a 503 with a reason."""
    async with serving() as served:
        well = [(await served.get(path)).status for path in ("/health", "/ready")]
        served.engine.state = FakeHealth(ready=False, reason="the queue is full")
        full = [(await served.get(path)).status for path in ("/health", "/ready")]
        served.engine.state = FakeHealth(alive=False, reason="the loop has died")
        dead = await served.get("/health")

    assert (well, full) == ([200, 200], [200, 503])
    assert (dead.status, dead.json["reason"]) == (503, "the loop has died")


async def test_figures_for_people_and_machines() -> None:
    """Metrics, stats and version; labels are routes, never paths; HEAD has no body."""
    async with serving() as served:
        for i in range(50):
            await served.get(f"/nope/{i}")
        await served.get("/v1/models/nope")
        page = await served.get("/metrics")
        head = await served.request("HEAD", "/metrics")
        stats = (await served.get("/v1/stats")).json
        version = (await served.get("/version")).json
        flushed = (await served.post("/reset_prefix_cache")).json

    text = page.body.decode()
    assert 'aserve_http_responses_total{method="GET",route="other",status="404"} 50.0' in text
    assert 'route="/v1/models/{id}"' in text and "nope" not in text
    assert page.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert (head.status, head.body) == (200, b"")
    assert stats["engine"] == {"num_running": 0, "num_waiting": 0}
    assert stats["server"]["connections"]["open"] == 1
    assert list(version) == ["version"] and flushed == {"num_blocks": 3}


async def test_probes_are_logged_for_debugging_only() -> None:
    """A probe every second would drown the log; one that fails is told."""
    async with serving() as served:
        await served.get("/health")
        served.engine.state = FakeHealth(alive=False, reason="dead")
        await served.get("/health")

        lines = [(level, fields["status"]) for level, name, fields in served.log.records if name == "request.finished"]
    assert lines == [("debug", 200), ("info", 503)]


async def test_one_line_is_logged_for_a_request_and_no_prompt_in_it() -> None:
    """Ids, route, status, counts and time; nothing that the client said."""
    async with serving() as served:
        await served.post(CHAT, chat(messages=[{"role": "user", "content": "a secret"}]), headers={"X-Request-ID": "r"})
        [line] = served.log.fields_of("request.finished")
        call = served.engine.calls[0]

        expected = {"request_id": "r", "method": "POST", "route": CHAT, "status": 200, "id": call.request_id}
        assert {name: line[name] for name in expected} == expected
        assert (line["completion_tokens"], line["stream"]) == (12, False)
        assert line["ms"] > 0
        assert "secret" not in str(served.log.records)
