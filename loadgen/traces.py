"""Recorded loads in the formats that are published: when requests came, how long they were, what they shared.

*azure*: the LLM inference traces of Azure, CSV with ``TIMESTAMP,ContextTokens,GeneratedTokens``. *mooncake*: the
traces of Mooncake (FAST'25), JSON lines with ``timestamp`` in ms, ``input_length``, ``output_length`` and ``hash_ids``,
one for each 512 tokens of the prompt, equal where the prompt so far is equal.
"""

import csv
import json
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from loadgen.errors import UsageError

Format = Literal["azure", "mooncake"]
FORMATS: tuple[Format, ...] = ("azure", "mooncake")

BLOCK_TOKENS = 512
NUM_REQUESTS_MAX = 5_000_000


class _Row(NamedTuple):
    at_s: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Requests in order of time, the first at 0 s. ``block_ids`` are empty where the format has none."""

    name: str
    due_s: "array[float]" = field(repr=False)
    input_tokens: "array[int]" = field(repr=False)
    output_tokens: "array[int]" = field(repr=False)
    block_ids: list[tuple[int, ...]] = field(repr=False)


def read_trace(
    path: Path, form: Format, *, speed: float = 1.0, skip: int = 0, num_requests_max: int | None = None
) -> Trace:
    """Read a trace, played ``speed`` times as fast, without its first ``skip`` requests, at most so many of the rest.

    Raises UsageError with the line's number where a line is not of the format.
    """
    last = None if num_requests_max is None else skip + num_requests_max
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            rows = list(islice(_READERS[form](path, lines), skip, last))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not rows:
        raise UsageError(f"{path} holds no requests" + (f" after the first {skip}" if skip else ""))
    rows.sort(key=lambda row: row.at_s)
    if len(rows) > NUM_REQUESTS_MAX:
        raise UsageError(f"{path} holds more than {NUM_REQUESTS_MAX:,} requests")
    return Trace(
        name=path.name,
        due_s=array("d", ((row.at_s - rows[0].at_s) / speed for row in rows)),
        input_tokens=array("q", (row.input_tokens for row in rows)),
        output_tokens=array("q", (row.output_tokens for row in rows)),
        block_ids=[row.block_ids for row in rows],
    )


def _read_azure(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    reader = csv.DictReader(lines)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise UsageError(f"{path} is not an azure trace: its first line lacks {', '.join(sorted(wanted))}")
    for row in reader:
        try:
            # Seven digits of a second are more than fromisoformat takes before Python 3.12.
            stamp, _, fraction = row["TIMESTAMP"].removesuffix("+00:00").partition(".")
            at_s = datetime.fromisoformat(stamp + "+00:00").timestamp() + float("0." + (fraction[:9] or "0"))
            yield _Row(at_s, _length(row["ContextTokens"]), _length(row["GeneratedTokens"]))
        except (ValueError, TypeError) as error:
            raise UsageError(f"{path}:{reader.line_num} is not a request of an azure trace: {error}") from error


def _read_mooncake(path: Path, lines: Iterable[str]) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            yield _Row(
                float(row["timestamp"]) / 1e3,
                _length(row["input_length"]),
                _length(row["output_length"]),
                tuple(int(block) for block in row["hash_ids"]),
            )
        except (ValueError, TypeError, KeyError) as error:
            raise UsageError(f"{path}:{number} is not a request of a mooncake trace: {error!r}") from error


def _length(value: str | int) -> int:
    length = int(value)
    if length < 0:
        raise ValueError(f"a length of {length}")
    return length


_READERS = {"azure": _read_azure, "mooncake": _read_mooncake}
