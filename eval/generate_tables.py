"""The tables and the picture of bench_generate.py, and how it tells kernels apart."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from torch.autograd import DeviceType

GIB = 2**30
BASES = {"static": ("StaticCache", "compiled"), "dynamic": ("DynamicCache", "eager")}
KINDS = {  # the first that is found in a kernel's name
    "attention": r"^(attend|reduce|rotate|mass|sum_splits|lse|column)\w*_kernel|^_(decode|dequantize)_kernel|flash|fmha|sdpa",
    "append": r"encode|_quantize_kernel|append|store|_step_kernel|evict|index_copy|index_put|scatter|_cat_|CatArray",
    "weights": r"gemm|gemv|nvjet|cutlass|cublas|splitk|(fused|add)_?mm|_mm_|matmul",
}


def kernel_times(events: Iterable, steps: int, ms: float) -> dict:
    """Milliseconds of GPU time a step, by kind; the GPU is idle for the rest of `ms`, which was measured without a profiler."""
    times: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            times[event.name] += event.time_range.elapsed_us() / 1e3 / steps
    found: Counter[str] = Counter()
    for name, time in times.items():
        found[next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "rest")] += time
    busy = sum(times.values())
    return {f"{kind}_ms": found[kind] for kind in (*KINDS, "rest")} | {
        "busy_ms": busy, "idle_ms": max(ms - busy, 0.0), "ms": ms, "kernels": [[name[:120], time] for name, time in times.most_common(12)]
    }  # fmt: skip


def label(row: dict) -> str:
    return f"{row['cache']}, {row['mode']}"


def case(row: dict) -> str:
    return f"{row['batch']}x{row['context']:,}"


def why(row: dict) -> str:
    """Why a configuration has no figures; the row has the whole message."""
    return row.get("failed", "").split(":")[0]


def times_as_fast(row: dict, rows: list[dict], base: tuple[str, str]) -> str:
    """Starred where the other was measured in another run."""
    same = ("batch", "context", "section")
    for other in rows:
        if (other["cache"], other["mode"]) == base and "ms" in other and all(other[key] == row[key] for key in same):
            return f"{other['ms'] / row['ms']:.2f}" + "*" * (other["run"] != row["run"])
    return "-"


def table(title: str, headers: Iterable[str], lines: Iterable[Iterable[str]]) -> None:
    headers = list(headers)
    print(f"\n{title}\n\n| {' | '.join(headers)} |\n|---|" + "---:|" * (len(headers) - 1))
    for line in lines:
        print(f"| {' | '.join(line)} |")


def grid(title: str, rows: list[dict], cell: Callable[[dict], str], column: Callable[[dict], str] = case) -> None:
    """A line for each cache and a column for each case."""
    rows = sorted(rows, key=lambda row: (row["batch"], row["context"]))
    found = {(label(row), column(row)): why(row) or cell(row) for row in rows}
    names, columns = (list(dict.fromkeys(key[i] for key in found)) for i in (0, 1))
    table(title, ["cache", *columns], ([name, *(found.get((name, at), "") for at in columns)] for name in sorted(names, key=order)))


def order(name: str) -> tuple[bool, str]:
    return not name[0].isupper(), name  # transformers' own first


def show(rows: list[dict]) -> None:
    for device in dict.fromkeys(row["device"] for row in rows):
        found = [row for row in rows if row["device"] == device]
        print(f"\n## {device}, {found[0]['memory_gib']} GiB, {found[0]['layers']} layers")
        for section, draw in TABLES.items():
            if chosen := [row for row in found if row["section"] == section]:
                draw(chosen)


def decode(rows: list[dict]) -> None:
    def speed(row: dict) -> str:
        return " / ".join([f"{row['ms']:.2f}", *(times_as_fast(row, rows, base) for base in BASES.values())])

    grid("Decode: ms a token / times as fast as StaticCache compiled / as DynamicCache eager (* of another run)", rows, speed)
    grid("Tokens a second", rows, lambda row: f"{row['tokens_s']:,.0f}")
    grid("GiB the cache holds / peak beside the weights", rows, memory)
    compiled = [row for row in rows if row["mode"] == "compiled"]
    grid("Seconds to compile / graph breaks / CUDA graphs skipped", compiled, built)


def memory(row: dict) -> str:
    return f"{row['cache_bytes'] / GIB:.2f} / {row['peak_bytes'] / GIB:.2f}"


def built(row: dict) -> str:
    return f"{row['compile_s']:.0f} / {row['graph_breaks']} / {row['cudagraph_skips']}"


def prefill(rows: list[dict]) -> None:
    def cell(row: dict) -> str:
        return f"{row['prefill_s']:.2f} / {row['peak_bytes'] / GIB:.2f}"

    grid("Prefill: seconds / GiB of peak beside the weights", rows, cell, lambda row: f"{case(row)}, {row['how']}")


def largest(rows: list[dict]) -> None:
    def column(row: dict) -> str:
        return "context of one request" if row["how"] == "context" else f"batch at {row['context']:,}"

    grid("The largest that fits", rows, lambda row: f"{row['found']:,}", column)


def eviction(rows: list[dict]) -> None:
    def lines() -> Iterator[list[str]]:
        for row in rows:
            start = [label(row), row["how"], f"{row['context']:,}"]
            if reason := why(row):
                yield [*start, reason, "", "", ""]
                continue
            seconds = f"{row['prefill_s']:.2f}" if "prefill_s" in row else "-"
            peak = max(row["peak_bytes"], row.get("prefill_peak_bytes", 0)) / GIB
            yield [*start, seconds, f"{row['ms']:.2f}", f"{row['cache_bytes'] / GIB:.2f}", f"{peak:.2f}"]

    table("Eviction", ["cache", "filled", "tokens", "prefill s", "ms a token", "cache GiB", "peak GiB"], lines())


def profile(rows: list[dict]) -> None:
    parts = (*KINDS, "rest", "busy", "idle")
    lines = ([label(row), case(row), *(f"{row[f'{part}_ms']:.2f}" for part in parts), f"{row['ms']:.2f}"] for row in rows)
    table("GPU time of a step, ms (idle: the GPU waits for the host)", ["cache", "case", *parts, "a token"], lines)


PARTS = {"weights": "#7f8fa6", "attention": "#1f77b4", "append": "#ff7f0e", "rest": "#9467bd", "idle": "#e8e8e8"}
"""Colours of the parts of a step."""
TABLES = {"decode": decode, "profile": profile, "prefill": prefill, "largest": largest, "eviction": eviction}


def plot(rows: list[dict], path: Path) -> None:
    """Of each device and case, where the milliseconds of a step go."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    held = {(row["device"], case(row), label(row)): row["cache_bytes"] / GIB for row in rows if "cache_bytes" in row}
    panels: dict[tuple[str, str], list[dict]] = {}
    for row in sorted(rows, key=lambda row: (row["device"], row["batch"], row["context"], -row.get("ms", 0))):
        if row["section"] == "profile" and "ms" in row:
            panels.setdefault((row["device"], case(row)), []).append(row)
    panels = {at: found for at, found in panels.items() if len(found) > 2}  # what was measured to be compared
    if not panels:
        return print("no rows of profile to plot")
    heights = [0.3 * len(bars) + 0.4 for bars in panels.values()]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(11, sum(heights) + 0.55 * len(panels)), height_ratios=heights, squeeze=False, layout="constrained"
    )
    for ((device, at), bars), axis in zip(panels.items(), axes[:, 0], strict=True):
        left = [0.0] * len(bars)
        for part, color in PARTS.items():
            widths = [row[f"{part}_ms"] for row in bars]
            axis.barh(range(len(bars)), widths, left=left, color=color, label=part if part != "idle" else "GPU waits for the host")
            left = [x + width for x, width in zip(left, widths, strict=True)]
        for y, row in enumerate(bars):
            size = held.get((device, at, label(row)))
            axis.text(left[y], y, f" {row['ms']:.1f} ms" + (f", {size:.1f} GiB" if size else ""), va="center", fontsize=8)
        axis.set_yticks(range(len(bars)), [label(row) for row in bars], fontsize=8)
        axis.set(title=f"{at} tokens, {device}", xlim=(0, max(left) * 1.15))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=8, loc="center right")
    figure.supxlabel("milliseconds a step (left is better)", fontsize=9)
    figure.savefig(path.with_suffix(".png"), dpi=110)
    print(path.with_suffix(".png"))
