"""The table of `families.py`, and what may be said of all families."""

from __future__ import annotations

from typing import Any

from families_models import CAUSAL
from harness import Table

Row = dict[str, Any]
FORMATS = {"int8": "int8", "4 bits": "turboquant_4bit_nc"}
WORKS, REFUSED, THEIRS, NOTHING, ABSENT, ERROR = "=", "refused", "transformers", "nothing", "-", "ERROR"
COMPRESSED = ("codes", "dequantized")
SYMBOLS = {REFUSED: "r", THEIRS: "t", NOTHING: "0", ABSENT: "", ERROR: "**!**", "codes": "c", "dequantized": "d"}
SHOWN = {
    "identity": "same tokens",
    "int8": "int8",
    "4 bits": "4 bits",
    "padded": "padding",
    "max_length": "`max_length`",
    "turns": "turns",
    "crop": "crop",
    "lookup": "prompt lookup",
    "beams": "beams",
    "prefix": "stored prefix",
    "common prefix": "part of one",
    "route": "`qkvcache` attention",
    "eviction": "eviction",
    "batching": "batching",
    "their batching": "transformers' batching",
}
HEADERS = ["families", "layers", *SHOWN.values(), *(f"bytes, {name}" for name in FORMATS), "set by hand"]
LAYERS = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "linear",
    "DynamicIndexedLayer": "indexed",
    "LinearAttentionAndFullAttentionLayer": "full with a state",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding with a state",
}
"""Kinds of transformers' layers; all others are a family's own. A layer without a cache is not named."""


def worse(row: Row, before: Row) -> list[str]:
    """The cells that worked before, and do not now."""
    worked = [name for name in SHOWN if before.get(name) in (WORKS, *COMPRESSED)]
    return [f"{row['family']}, {name}: {row.get(name)}" for name in worked if row.get(name) != before[name]]


def claim(rows: list[Row]) -> str:
    """The claim about the families that transformers runs with a DynamicCache."""
    runs = [row for row in rows if "absent" not in row]
    same = [row for row in runs if row["identity"] == WORKS]
    (causal, works), (others, others_work) = (
        [sum((row["family"] in CAUSAL) == of for row in some) for some in (runs, same)] for of in (True, False)
    )
    compressed = sum(row["family"] in CAUSAL and row["int8"] in COMPRESSED for row in same)
    return (
        f"{works} of the {causal} families of causal language models run, {compressed} compressed; "
        f"so do {others_work} of {others} vision, speech and encoder-decoder models"
    )


def table(rows: list[Row]) -> Table:
    """Families whose cells are alike share a line."""
    lines: dict[tuple[str, ...], list[Row]] = {}
    rows = sorted(rows, key=lambda row: row["family"].lower())
    for row in rows:
        if "absent" not in row:
            kinds = sorted({LAYERS.get(kind, "own") for kind in row["layers"] if kind != "DummyLayer"})
            cells = (SYMBOLS.get(row[name], row[name]) for name in SHOWN)
            lines.setdefault((" + ".join(kinds), *cells), []).append(row)
    found = []
    for cells, alike in sorted(lines.items(), key=lambda line: -len(line[1])):
        sizes = (between([row[f"bytes, {name}"] for row in alike]) for name in FORMATS)
        changed = "; ".join(f"{row['family']}: {', '.join(row['by hand'])}" for row in alike if row["by hand"])
        found.append([", ".join(row["family"] for row in alike), *cells, *sizes, changed])
    missing = ", ".join(row["family"] for row in rows if "absent" in row)
    end = f"Not built or not run with a DynamicCache by transformers itself: {missing}." if missing else ""
    return Table(HEADERS, found, caption=end, rule=("---", "---", ":-:"))


def between(sizes: list[float]) -> str:
    """Empty for what is refused."""
    low, high = (f"{size:.2f}".lstrip("0") for size in (min(sizes), max(sizes)))
    return "" if not max(sizes) else low if low == high else f"{low} to {high}"
