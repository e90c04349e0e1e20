"""What a server says of itself beside the load: its models, its token counts, its queue. Blocks; never on a loop."""

import random
import re
from collections.abc import Mapping
from dataclasses import replace
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any

from loadgen import codec, words
from loadgen.client import Target
from loadgen.errors import LoadgenError
from loadgen.lengths import Calibration
from loadgen.work import Ask, BodyTemplate

TIMEOUT_S = 60.0
METRICS_TIMEOUT_S = 5.0
BODY_BYTES_MAX = 16 << 20
CALIBRATION_WORDS = (48, 432)

# aserve and vLLM, SGLang, TGI
_QUEUE_LINE = re.compile(
    r"^((?:[a-z]+[:_])?(?:request_)?queue_(?:time|duration)(?:_seconds)?)_(sum|count|bucket)(\{[^}]*\})? (\S+)",
    re.MULTILINE,
)
_LE = re.compile(r'le="([^"]+)"')


def first_model(target: Target) -> str:
    """Return the name of the server's first model. Raises LoadgenError where it names none."""
    match _json(target, "GET", f"{target.base_path}/models"):
        case {"data": [{"id": str(name)}, *_]}:
            return name
    raise LoadgenError(f"{target.origin} names no model; give --model")


def calibrate(target: Target, template: BodyTemplate, language: str) -> Calibration:
    """Measure how many tokens the server counts for words of a language, on two prompts of different length.

    It asks for one token and reads the usage, which holds the template's own tokens too; where there is no usage it
    asks ``/tokenize``. Raises LoadgenError where the server tells neither.
    """
    counts = []
    for num_words in CALIBRATION_WORDS:
        texts = [
            words.draw(random.Random(f"calibration/{language}/{number}"), num_words, language) for number in range(2)
        ]
        totals = [_usage(target, template, text) or _tokenize(target, template, text) for text in texts]
        if any(total is None for total in totals):
            raise LoadgenError(f"{target.origin} counts no tokens, by usage or /tokenize: give lengths in words")
        counts.append(sum(total for total in totals if total is not None) / len(totals))
    low, high = CALIBRATION_WORDS
    tokens_per_word = (counts[1] - counts[0]) / (high - low)
    if tokens_per_word <= 0:
        raise LoadgenError(f"{target.origin} counts {counts[0]:g} tokens for {low} words and {counts[1]:g} for {high}")
    return Calibration(tokens_per_word=tokens_per_word, overhead_tokens=counts[0] - low * tokens_per_word)


def queue_histogram(target: Target) -> dict[str, float] | None:
    """Return the server's histogram of queue times as it stands: ``sum``, ``count`` and buckets by their bound in s.

    None where there are no metrics, or none of a known name.
    """
    try:
        text = _request(target, "GET", "/metrics", None, timeout_s=METRICS_TIMEOUT_S)
    except (OSError, HTTPException, LoadgenError):
        return None
    return parse_queue_histogram(text.decode("utf-8", "replace"))


def parse_queue_histogram(text: str) -> dict[str, float] | None:
    """Read the first histogram of a known name out of Prometheus' text format; series of several labels add up."""
    histogram: dict[str, float] = {}
    family = None
    for name, kind, labels, value in _QUEUE_LINE.findall(text):
        family = family or name
        if name != family:
            continue
        bound = _LE.search(labels)
        key = bound[1] if kind == "bucket" and bound else kind
        histogram[key] = histogram.get(key, 0.0) + float(value)
    return histogram or None


def queue_between(before: Mapping[str, float] | None, after: Mapping[str, float] | None) -> dict[str, float]:
    """Return count, mean and percentiles in ms of the queue times between two looks; empty where there were none.

    Percentiles interpolate within a bucket, so they are as exact as the buckets are narrow.
    """
    if before is None or after is None or not (count := after.get("count", 0.0) - before.get("count", 0.0)):
        return {}
    figures = {"count": count, "mean_ms": (after["sum"] - before.get("sum", 0.0)) / count * 1e3}
    buckets = sorted(
        (float(key), value - before.get(key, 0.0)) for key, value in after.items() if key not in ("sum", "count")
    )
    for q in (50, 99):
        low, below = 0.0, 0.0
        for bound, cumulative in buckets:
            if cumulative >= count * q / 100:
                if bound != float("inf"):
                    share = (count * q / 100 - below) / (cumulative - below) if cumulative > below else 1.0
                    figures[f"p{q}_ms"] = (low + (bound - low) * share) * 1e3
                break
            low, below = bound, cumulative
    return figures


def _usage(target: Target, template: BodyTemplate, text: str) -> int | None:
    asking = replace(
        template,
        endpoint="responses" if template.endpoint == "responses-ws" else template.endpoint,
        max_tokens=16 if template.endpoint.startswith("responses") else 1,  # the least that this endpoint allows
        is_streamed=False,
        ignore_eos=False,
    )
    body = asking.body(Ask(messages=({"role": "user", "content": text},)))
    match _json(target, "POST", target.path, body):
        case {"usage": {"prompt_tokens": int(count)} | {"input_tokens": int(count)}}:
            return count
    return None


def _tokenize(target: Target, template: BodyTemplate, text: str) -> int | None:
    body = codec.dumps({"model": template.model, "prompt": text, "content": text})  # vLLM's and llama.cpp's names
    for path in ("/tokenize", f"{target.base_path}/tokenize"):
        try:
            answer = _json(target, "POST", path, body)
        except LoadgenError:
            continue
        match answer:
            case {"count": int(count)}:
                return count
            case {"tokens": [*tokens]}:
                return len(tokens)
    return None


def _json(target: Target, method: str, path: str, body: bytes | None = None) -> Any:
    try:
        return codec.loads(_request(target, method, path, body))
    except (OSError, HTTPException, ValueError) as error:
        raise LoadgenError(f"{target.origin}{path} does not answer: {error or type(error).__name__}") from error


def _request(target: Target, method: str, path: str, body: bytes | None, *, timeout_s: float = TIMEOUT_S) -> bytes:
    kind = HTTPSConnection if target.is_tls else HTTPConnection
    connection = kind(target.host, target.port, timeout=timeout_s)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **target.headers})
        answer = connection.getresponse()
        content = answer.read(BODY_BYTES_MAX)
    finally:
        connection.close()
    if answer.status != 200:
        raise LoadgenError(f"{target.origin}{path} answers {answer.status}: {content[:300].decode('utf-8', 'replace')}")
    return content
