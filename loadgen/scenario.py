"""Scenario files: a load in TOML, checked key by key, and the options that it makes. Pure, but for reading the files.

A scenario says what is asked, when and how it is judged; the command line says of whom, and may replace any key. The
library stands in ``scenarios/``, the whole format in the README beside it.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from loadgen import arrivals, figures, lengths, traces, work
from loadgen.client import Target
from loadgen.errors import UsageError
from loadgen.lengths import Calibration, Lengths
from loadgen.options import RunOptions, Slo
from loadgen.words import POOLS

LIBRARY = Path(__file__).parent / "scenarios"

MAX_TOKENS = 128
NUM_REQUESTS = 100

T = TypeVar("T")

Calibrate = Callable[[work.BodyTemplate, str], Calibration]
"""Measures the tokens of a language's words for requests like the template's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A scenario as it was read: ``where`` for messages, ``folder`` for the files that it names."""

    where: str
    folder: Path
    fields: Mapping[str, Any]

    def with_overrides(self, overrides: Mapping[str, Any]) -> "Document":
        """Return the document with other values laid over it, table by table."""
        return Document(where=self.where, folder=self.folder, fields=_merged(self.fields, overrides))


EMPTY = Document(where="options", folder=Path(), fields={})


def names() -> list[str]:
    """Return the names of the library's scenarios."""
    return sorted(path.stem for path in LIBRARY.glob("*.toml"))


def load(name: str) -> Document:
    """Read a scenario of the library by its name, or a file. Raises UsageError."""
    is_file = name.endswith(".toml") or "/" in name
    path = Path(name) if is_file else LIBRARY / f"{name}.toml"
    if not is_file and not path.is_file():
        raise UsageError(f"there is no scenario {name}: the library has {', '.join(names())}; or name a .toml file")
    try:
        with path.open("rb") as file:
            fields = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    return Document(where=path.name, folder=path.parent, fields={"name": path.stem, **fields})


def parse_override(text: str) -> dict[str, Any]:
    """Make nested tables of ``table.key=value``, the value in TOML or a bare string. Raises UsageError."""
    path, found, value = text.partition("=")
    keys = path.strip().split(".")
    if not found or not all(keys):
        raise UsageError(f"{text!r} is not of the form table.key=value")
    try:
        parsed = tomllib.loads(f"x = {value}")["x"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    for key in reversed(keys):
        parsed = {key: parsed}
    return dict(parsed)


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


class _Table:
    """A table of the document that is read key by key; what is left over at ``close`` was a mistake."""

    def __init__(self, where: str, fields: Any) -> None:
        if not isinstance(fields, Mapping):
            raise UsageError(f"{where} must be a table")
        self.where = where
        self._fields = fields
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._fields

    def fault(self, key: str, complaint: str) -> UsageError:
        return UsageError(f"{self.where} {key} {complaint}")

    def value(self, key: str, default: T, kind: type | tuple[type, ...], what: str) -> Any | T:
        self._known.append(key)
        value = self._fields.get(key)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.fault(key, f"must be {what}, not {value!r}")
        return value

    def needed(self, key: str) -> None:
        if key not in self._fields:
            raise self.fault(key, "is missing")

    def text(self, key: str, default: T) -> str | T:
        text: str | T = self.value(key, default, str, "a string")
        return text

    def flag(self, key: str, default: bool) -> bool:
        flag: bool = self.value(key, default, bool, "true or false")
        return flag

    def count(self, key: str, default: T, *, at_least: int = 1) -> int | T:
        if key not in self._fields:
            self._known.append(key)
            return default
        count: int = self.value(key, 0, int, "a whole number")
        if count < at_least:
            raise self.fault(key, f"must be at least {at_least}, not {count}")
        return count

    def number(self, key: str, default: T, *, above: float | None = None, at_least: float | None = None) -> float | T:
        if key not in self._fields:
            self._known.append(key)
            return default
        number: float = self.value(key, 0.0, (int, float), "a number")
        if not isfinite(number):
            raise self.fault(key, "must be finite")
        if above is not None and number <= above:
            raise self.fault(key, f"must be above {above:g}, not {number:g}")
        if at_least is not None and number < at_least:
            raise self.fault(key, f"must be at least {at_least:g}, not {number:g}")
        return number

    def choice(self, key: str, choices: Sequence[T], default: T) -> T:
        value: T = self.value(key, default, object, "")
        if value not in choices:
            hint = _closest(str(value), [str(choice) for choice in choices])
            raise self.fault(key, f"must be {' or '.join(map(str, choices))}, not {value!r}{hint}")
        return value

    def table(self, key: str) -> "_Table":
        self._known.append(key)
        return _Table(f"{self.where} [{key}]" if self.where else f"[{key}]", self._fields.get(key, {}))

    def mapping(self, key: str) -> dict[str, Any]:
        return dict(self.value(key, {}, Mapping, "a table"))

    def texts(self, key: str, default: tuple[str, ...]) -> tuple[str, ...]:
        values = self.value(key, default, list, "a list of strings")
        if not all(isinstance(value, str) for value in values):
            raise self.fault(key, f"must be a list of strings, not {values!r}")
        return tuple(values)

    def close(self) -> None:
        for key in self._fields:
            if key not in self._known:
                raise UsageError(f"{self.where} has no key {key}{_closest(key, self._known)}")


def _closest(word: str, known: Sequence[str]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]}?" if close else f": it has {', '.join(sorted(known))}" if known else ""


def template(document: Document, *, model: str) -> work.BodyTemplate:
    """Make the request template alone, which is what one has to know before the rest. Raises UsageError."""
    request = _Table(f"{document.where} [request]", document.fields.get("request", {}))
    return _template(request, model)


def build(
    document: Document, *, target: Target, model: str, calibrate: Calibrate, labels: Mapping[str, Any]
) -> RunOptions:
    """Make the options of a run. Raises UsageError, which names the table and the key that is wrong."""
    root = _Table(document.where, document.fields)
    name = root.text("name", "")
    root.text("about", "")
    run, request = root.table("run"), root.table("request")
    body = _template(request, model)
    history = request.choice("history", work.HISTORIES, "served")
    request.close()
    trace = _trace(root.table("trace"), document.folder) if "trace" in root else None
    if trace is None:
        root.table("trace")

    calibrations: dict[str, Calibration] = {}

    def calibration(language: str, unit: str) -> Calibration:
        if unit == "words":
            return lengths.IN_WORDS
        if language not in calibrations:
            calibrations[language] = calibrate(body, language)
        return calibrations[language]

    when = _arrivals(root.table("arrivals"), trace)
    builder = _Builder(document.folder, trace, calibration)
    source, unmeasured = builder.source(root)
    num_requests, duration_s = run.count("num_requests", None), run.number("duration_s", None, above=0)
    if num_requests is None and duration_s is None:
        num_requests = len(trace.due_s) if trace is not None and isinstance(when, arrivals.Recorded) else NUM_REQUESTS
    options = RunOptions(
        name=name,
        target=target,
        template=body,
        source=source,
        arrivals=when,
        history=history,
        unmeasured_parts=unmeasured,
        calibrations=calibrations,
        num_requests=num_requests,
        duration_s=duration_s,
        num_warmup_requests=run.count("warmup_requests", 0, at_least=0),
        warmup_s=run.number("warmup_s", 0.0, at_least=0),
        cooldown_s=run.number("cooldown_s", 0.0, at_least=0),
        timeout_s=run.number("timeout_s", 300.0, above=0),
        connect_timeout_s=run.number("connect_timeout_s", 10.0, above=0),
        max_inflight=run.count("max_inflight", 1024),
        num_processes=run.count("processes", 1),
        seed=run.value("seed", 0, int, "a whole number"),
        slo=_slo(root.table("slo")),
        limits=tuple(figures.parse_limit(text) for text in root.texts("limits", ())),
        labels=labels,
    )
    run.close()
    root.close()
    return options


def _template(request: _Table, model: str) -> work.BodyTemplate:
    return work.BodyTemplate(
        model=model,
        endpoint=request.choice("endpoint", work.ENDPOINTS, "chat"),
        max_tokens=request.count("max_tokens", MAX_TOKENS),
        temperature=request.number("temperature", 0.0, at_least=0),
        is_streamed=request.flag("stream", True),
        ignore_eos=request.flag("ignore_eos", False),
        usage=request.choice("usage", work.USAGES, "final"),
        extra=request.mapping("body"),
    )


def _slo(table: _Table) -> Slo:
    slo = Slo(
        ttft_ms=table.number("ttft_ms", None, above=0),
        tpot_ms=table.number("tpot_ms", None, above=0),
        e2e_ms=table.number("e2e_ms", None, above=0),
    )
    table.close()
    return slo


def _trace(table: _Table, folder: Path) -> traces.Trace:
    table.needed("file")
    trace = traces.read_trace(
        folder / table.text("file", ""),
        table.choice("format", traces.FORMATS, "azure"),
        speed=table.number("speed", 1.0, above=0),
        skip=table.count("skip", 0, at_least=0),
        num_requests_max=table.count("num_requests", None),
    )
    table.close()
    return trace


_ARRIVALS = ("closed", "constant", "poisson", "gamma", "ramp", "bursts", "trace")


def _arrivals(table: _Table, trace: traces.Trace | None) -> arrivals.Arrivals:
    kind = table.choice("kind", _ARRIVALS, "closed")
    made: arrivals.Arrivals
    match kind:
        case "closed":
            made = arrivals.ClosedLoop(
                concurrency=table.count("concurrency", 8), ramp_s=table.number("ramp_s", 0.0, at_least=0)
            )
        case "constant" | "poisson" | "gamma":
            table.needed("rate")
            rate = table.number("rate", 0.0, above=0)
            if kind == "gamma":
                table.needed("burstiness")
                made = arrivals.Gamma(rate=rate, burstiness=table.number("burstiness", 1.0, above=0))
            else:
                made = arrivals.Constant(rate=rate) if kind == "constant" else arrivals.Poisson(rate=rate)
        case "ramp":
            for key in ("rate_from", "rate_to", "over_s"):
                table.needed(key)
            made = arrivals.Ramp(
                rate_from=table.number("rate_from", 0.0, at_least=0),
                rate_to=table.number("rate_to", 0.0, above=0),
                over_s=table.number("over_s", 0.0, above=0),
            )
        case "bursts":
            table.needed("size")
            table.needed("every_s")
            made = arrivals.Bursts(size=table.count("size", 1), every_s=table.number("every_s", 1.0, above=0))
        case _:
            if trace is None:
                raise table.fault("kind", "is trace, but there is no [trace]")
            made = arrivals.Recorded(recorded_s=trace.due_s)
    table.close()
    return made


_KINDS = ("words", "prompts", "prefixes", "trace")


class _Builder:
    """Makes sources of the tables that describe work."""

    def __init__(
        self, folder: Path, trace: traces.Trace | None, calibration: Callable[[str, str], Calibration]
    ) -> None:
        self._folder = folder
        self._trace = trace
        self._calibration = calibration

    def source(self, root: _Table) -> tuple[work.Source, frozenset[str]]:
        """Return what is asked, and the names of the parts that are in no figure but their own."""
        tables = root.value("part", None, list, "an array of tables, [[part]]")
        if tables is None:
            table = root.table("work")
            source = self._shaped(table, "")
            table.close()
            return source, frozenset()
        if "work" in root:
            raise UsageError(f"{root.where} has both [work] and [[part]]")
        parts: list[tuple[float, work.Source]] = []
        unmeasured: set[str] = set()
        for number, fields in enumerate(tables, 1):
            table = _Table(f"{root.where} [[part]] {number}", fields)
            table.needed("name")
            name = table.text("name", "")
            table.where = f"{root.where} [[part]] {name}"
            weight = table.number("weight", 1.0, above=0)
            if not table.flag("measured", True):
                unmeasured.add(name)
            parts.append((weight, self._shaped(table, name)))
            table.close()
        if not parts:
            raise root.fault("part", "is empty")
        return work.Mixture(parts=tuple(parts)), frozenset(unmeasured)

    def _shaped(self, table: _Table, part: str) -> work.Source:
        kind = table.choice("kind", _KINDS, "words")
        unit = table.choice("unit", ("words", "tokens"), "words")
        turns = self._lengths(table, "turns", None)
        source: work.Source
        match kind:
            case "words":
                languages = table.texts("languages", ("en",))
                for language in languages:
                    if language not in POOLS:
                        raise table.fault("languages", f"has no words of {language}: it has {', '.join(POOLS)}")
                source = work.RandomWords(
                    lengths=self._lengths(table, "input", lengths.Fixed(value=128)),
                    languages=languages,
                    calibrations=tuple(self._calibration(language, unit) for language in languages),
                )
            case "prompts":
                table.needed("file")
                num_turns_max = turns.value if isinstance(turns, lengths.Fixed) else 1
                source = work.read_jsonl(self._folder / table.text("file", ""), num_turns_max=num_turns_max)
                turns = None
            case "prefixes":
                source = work.SharedPrefixes(
                    num_groups=table.count("groups", 1),
                    zipf=table.number("zipf", 0.0, at_least=0),
                    prefix=self._lengths(table, "prefix", lengths.Fixed(value=512)),
                    lengths=self._lengths(table, "input", lengths.Fixed(value=128)),
                    calibration=self._calibration("en", unit),
                )
            case _:
                if self._trace is None:
                    raise table.fault("kind", "is trace, but there is no [trace]")
                source = work.TracePrompts(
                    trace=self._trace,
                    scale=table.number("scale", 1.0, above=0),
                    input_max=table.count("input_max", None),
                    output_max=table.count("output_max", None),
                    calibration=self._calibration("en", unit),
                )
        return work.Shaped(
            source=source,
            part=part,
            turns=turns,
            think_ms=self._lengths(table, "think_ms", lengths.NOTHING),
            output=self._lengths(table, "output", None),
            system=table.text("system", None),
            extra=table.mapping("body"),
            raw_body=table.text("raw_body", None),
            behaviour=work.Behaviour(
                abort_after_tokens=table.count("abort_after_tokens", None, at_least=0),
                read_bytes_per_s=table.number("read_bytes_per_s", None, above=0),
                is_on_new_connection=table.flag("new_connection", False),
                expect_status=table.count("expect_status", 200, at_least=200),
            ),
        )

    def _lengths(self, table: _Table, key: str, default: T) -> Lengths | T:
        value = table.value(key, None, (int, Mapping), "a whole number or a table with a kind")
        if value is None:
            return default
        if isinstance(value, int):
            if value < 0:
                raise table.fault(key, f"must be at least 0, not {value}")
            return lengths.Fixed(value=value)
        law = _Table(f"{table.where} {key}", value)
        made = self._law(law)
        law.close()
        return made

    def _law(self, law: _Table) -> Lengths:
        match law.choice("kind", ("uniform", "lognormal", "trace"), "uniform"):
            case "uniform":
                law.needed("min")
                law.needed("max")
                low, high = law.count("min", 0, at_least=0), law.count("max", 0, at_least=0)
                if high < low:
                    raise law.fault("max", f"is below min: {high} < {low}")
                return lengths.Uniform(min=low, max=high)
            case "lognormal":
                law.needed("median")
                law.needed("sigma")
                return lengths.LogNormal(
                    median=law.number("median", 1.0, above=0),
                    sigma=law.number("sigma", 1.0, at_least=0),
                    min=law.count("min", 1, at_least=0),
                    max=law.count("max", 1 << 30),
                )
            case _:
                column = law.choice("column", ("input", "output"), "input")
                if self._trace is None:
                    raise law.fault("kind", "is trace, but there is no [trace]")
                return lengths.Listed(
                    values=self._trace.input_tokens if column == "input" else self._trace.output_tokens
                )
