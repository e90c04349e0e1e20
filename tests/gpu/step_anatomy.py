"""Names for what a decode step does on the device, from the order of its kernels, and the gaps between them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_ADDING: Final = "_product_add_kernel"
_BY_KERNEL: Final = {
    "_fetch_kernel": "words",
    "_differences_kernel": "slot differences",
    "_lay_out_kernel": "layout",
    "_lay_out_rows_kernel": "layout",
    "_plan_kernel": "attention's plan",
    "_embed_kernel": "embedding and norm",
    "_rope_kv_kernel": "rope and K/V write",
    "_decode_kernel": "attention",
    "_chunk_kernel": "attention",
    _ADDING: "",  # the output's or down's
    "_add_kernel": "residual and norm",
    "_silu_mul_kernel": "silu and product",
    "_gate_up_kernel": "gate and up product",
    "_sample_kernel": "sampler",
    "_commit_kernel": "slot update and result words",
}
_PRODUCTS: Final = {  # by what comes next, and before where that does not say it
    "rope and K/V write": "QKV product",
    "attention": "QKV product",  # in the short form, whose attention does the rest
    "silu and product": "gate and up product",
    "sampler": "logits product",
}
_PRODUCTS_AFTER: Final = {
    "attention": "output product",
    "silu and product": "down product",
    "gate and up product": "down product",
}
_LAST: Final = "slot update and result words"
_OTHER: Final = "other"

PARTS: Final = (
    "words", "slot differences", "layout", "attention's plan", "embedding and norm", "QKV product",
    "rope and K/V write", "attention", "output product", "residual and norm", "gate and up product",
    "silu and product", "down product", "logits product", "sampler", _LAST, _OTHER,
)  # fmt: skip
"""In the order in which a step has them."""


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel or copy."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Of the mean step, by part: nodes, time in them, and time before them in which nothing ran."""

    num_steps: int
    nodes: Mapping[str, float]
    busy_us: Mapping[str, float]
    gap_us: Mapping[str, float]


def parts_of(names: Sequence[str]) -> list[str]:
    """The part of each, in the order in which they ran. What has no name of its own is a product: which one, its
    neighbours tell (of the product of gate and up, in the long form, only the one that comes next)."""
    known = [next((part for kernel, part in _BY_KERNEL.items() if kernel in name), "") for name in names]
    found, before = [], ""
    for index, part in enumerate(known):
        if not part:
            after = next((later for later in known[index + 1 :] if later), "")
            by_next = "" if _ADDING in names[index] else _PRODUCTS.get(after)
            part = by_next or _PRODUCTS_AFTER.get(before) or _OTHER
        else:
            before = part
        found.append(part)
    return found


def anatomy_of(spans: Sequence[Span]) -> Anatomy:
    """spans: of steps one after another, by their starts. The first and the last step do not count."""
    parts = parts_of([span.name for span in spans])
    ends = [index for index, part in enumerate(parts) if part == _LAST]
    if len(ends) < 3:
        raise ValueError(f"{len(ends)} steps among {len(spans)} kernels and copies")
    nodes, busy, gap = (defaultdict[str, float](float) for _ in range(3))
    num_steps, reached_ns = len(ends) - 2, spans[ends[0]].end_ns
    for index in range(ends[0] + 1, ends[-2] + 1):
        span, part = spans[index], parts[index]
        nodes[part] += 1 / num_steps
        busy[part] += (span.end_ns - max(span.start_ns, min(reached_ns, span.end_ns))) / 1e3 / num_steps
        gap[part] += max(0, span.start_ns - reached_ns) / 1e3 / num_steps
        reached_ns = max(reached_ns, span.end_ns)
    return Anatomy(num_steps=num_steps, nodes=nodes, busy_us=busy, gap_us=gap)
