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
    "attention": r"^(attend|reduce|rotate|mass|level|column)\w*_kernel|^_decode_kernel|flash|fmha|sdpa",
    "append": r"encode|append|store|_step_kernel|_arrive_kernel|_retire_kernel|evict|index_copy|index_put|scatter|_cat_|CatArray",
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


TABLES = {"decode": decode, "profile": profile, "prefill": prefill, "largest": largest, "eviction": eviction}


def plot(rows: list[dict], path: Path) -> None:
    """Of each device: speed and memory against context, by batch."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row["section"] == "decode" and "ms" in row]
    panels = sorted({(row["device"], row["batch"]) for row in rows})
    if not panels:
        return print("no rows of decode to plot")
    names = sorted({label(row) for row in rows}, key=order)
    values = {"tokens a second": lambda row: row["tokens_s"], "peak beside the weights, GiB": lambda row: row["peak_bytes"] / GIB}
    figure, axes = pyplot.subplots(len(panels), 2, figsize=(12, 4.5 * len(panels)), squeeze=False)
    for line, (device, batch) in zip(axes, panels, strict=True):
        for at, (title, value) in zip(line, values.items(), strict=True):
            for index, name in enumerate(names):
                chosen = [row for row in rows if (row["device"], row["batch"], label(row)) == (device, batch, name)]
                points = sorted((row["context"], value(row)) for row in chosen)
                style = {"color": f"C{index % 10}", "linestyle": ":" if name.endswith("eager") else "-", "marker": "o", "markersize": 4}
                at.plot([x for x, _ in points], [y for _, y in points], label=name if points else None, **style)
            at.set(title=f"{title}, batch {batch} ({device})", xscale="log", ylim=(0, None), xlabel="context, tokens")
            contexts = sorted({row["context"] for row in rows})
            at.set_xticks(contexts, [f"{x:,}" for x in contexts], minor=False)
            at.minorticks_off()
        line[0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=130)
    print(path.with_suffix(".png"))
