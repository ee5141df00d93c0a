"""The tables and the picture of README and of the site that draw on several studies, from the rows in eval/results; nothing is measured.

python eval/summary.py caches | tasks | steps | room | replicas  a table, as markdown
python eval/summary.py picture [--out FILE]                      quality against memory on the real model
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from error_bars import number, recalled, share_error
from harness import RESULTS, Table, picture, read_rows
from palette import UNCENTERED, family, format_color, policy_color
from tasks import by_case, right

PICTURE = RESULTS / "overview.png"
RULE = (" --- ",)
CACHES = {
    'QuantizedPerTokenCache(config, dtype="int8")': "int8",
    "TurboQuantCache(config)": "turboquant_4bit_nc",
    "HadaQuantCache(config, key_bits=3, value_bits=3)": "hadaquant_k3v3",
}
SNAPKV = 'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget=0.5))'
H100 = "NVIDIA H100 80GB HBM3"
REAL = "qwen2.5-coder-1.5b"
ASKED = {"HumanEval": ("humaneval", 6000), "facts": ("facts", 30_000)}
TASKS = {
    "`DynamicCache` (transformers)": "dynamic", **{f"`{call}`": format for call, format in CACHES.items()},
    "`HadaQuantCache(config, key_bits=2, value_bits=2)`": "hadaquant_k2v2", f"`{SNAPKV}`": "turboquant_4bit_nc:policy=snapkv:budget=0.5",
}  # fmt: skip


def rows(name: str) -> list[dict]:
    return read_rows(RESULTS / f"{name}.jsonl")


def quality(format: str | None, policy: str | None = None, budget: float | None = None) -> dict | None:
    """The row of the real model."""
    for row in rows("quality") if policy is None else rows("quality_policies"):
        same = row["format"] == format and row["policy"] == policy and row.get("budget") == budget
        if row["model"] == "smollm2" and same and row["exact"] in ("4 + 64", "all"):
            return row
    return None


def facts(row: dict) -> str:
    """The share of facts that are recalled, asked after the context and with it, in contexts of every length."""
    return recalled(*counted(row))


def counted(row: dict) -> tuple[int, int]:
    """The facts that are recalled, and all that are asked for."""
    counts = [right for both in row["recall"].values() for right in both]
    return sum(counts), row["cases"] * len(counts)


def attention(format: str, case: str = "8x32768") -> dict | None:
    """The newest row of the kernels for the format."""
    found = [
        row for row in rows("kernels")
        if row["kind"] == "attend" and row["case"] == case and row["device"] == H100 and row["format"] == format
    ]  # fmt: skip
    return max(found, key=lambda row: row["date"], default=None)


def step(cache: str, mode: str, case: tuple[int, int] = (8, 32_768), device: str = H100) -> dict | None:
    found = [
        row for row in rows("generate")
        if row["section"] == "decode" and row["mode"] == mode and (row["batch"], row["context"]) == case and row["device"] == device
        and row["cache"].removesuffix(UNCENTERED) == cache
    ]  # fmt: skip
    return max(found, key=lambda row: row["run"], default=None)


def caches() -> Table:
    dense, plain = quality(None), step("identity", "compiled")
    kept, kept_of = quality("turboquant_4bit_nc", "snapkv", 0.5), next(row for row in rows("quality_policies") if row["format"] is None)
    if dense is None or plain is None or kept is None:
        raise ValueError("rows are missing")
    lines = [["`DynamicCache` (transformers)", "1.0x", "0", facts(dense), "1.0x", ""]]
    for call, format in CACHES.items():
        near, fast, whole = quality(format), attention(format), step(format, "compiled")
        lines.append([
            f"`{call}`", *(_quality(near) if near else ("",) * 3), f"{fast['ratio']:.1f}x" if fast else "",
            f"{plain['ms'] / whole['ms']:.1f}x" + "*" * (plain["run"] != whole["run"]) if whole else "",
        ])  # fmt: skip
    lines.append([f"`{SNAPKV}`", *_quality(kept)[:2], f"{facts(kept)} (uncompressed: {facts(kept_of)})", "", ""])
    return Table(["cache", "smaller", "KL", "facts", "attention", "a step"], lines, rule=RULE)


def _quality(row: dict) -> tuple[str, str, str]:
    return f"{row['ratio']:.1f}x", number(row["kl"]), facts(row)


def tasks() -> Table:
    """Tasks on the real model, with the steps of an 8B shape beside them; no lines before they are measured."""
    found = by_case([row for row in rows("tasks") if row["model"] == REAL])
    every = {(task, tokens): of for (task, tokens, _, dtype), of in found.items() if dtype == "bfloat16"}
    near, lines = every.get(("kl", 8192), {}), []
    for name, cache in TASKS.items():
        of, whole = near.get(cache), step("DynamicCache" if cache == "dynamic" else cache, "compiled")
        cells = [f"{of['ratio']:.1f}x", number(of["kl"])] if of else ["", ""]
        answered = [every.get(place, {}) for place in ASKED.values()]
        cells += [right(rows[cache], rows["dynamic"]) if cache in rows else "" for rows in answered]
        plain = step("identity", "compiled")
        lines += [[name, *cells, f"{plain['ms'] / whole['ms']:.1f}x" if whole and plain else ""]] * any(cells)
    heads = [f"{name}, after {tokens:,} tokens" for name, (_, tokens) in ASKED.items()]
    caption = (
        "Qwen2.5-Coder-1.5B-Instruct in bf16. KL: after 8,192 tokens, nats. Right answers of all, the standard error, answers lost / won "
        "against `DynamicCache`, and McNemar's exact p. A step: whole steps of generate, 8 requests of 32,768 tokens, an 8B shape of "
        "random weights, `max_length`, against the same library without compression, H100."
    )
    return Table(["cache", "smaller", "KL", *heads, "a step"], lines, "", caption, rule=RULE)


def steps() -> Table:
    shown = [("DynamicCache", "eager"), ("StaticCache", "compiled"), ("identity", "eager"), ("turboquant_4bit_nc", "eager")]
    shown += [(name, "compiled") for name in ("identity", "int8", "fp8", "int4", "nvfp4", "turboquant_4bit_nc")]
    places = [((8, 32_768), H100), ((8, 32_768), "NVIDIA H200"), ((1, 8192), "NVIDIA H200")]
    lines = []
    for cache, mode in shown:
        cells = []
        for case, device in places:
            row, base = step(cache, mode, case, device), step("StaticCache", "compiled", case, device)
            cells.append(f"{row['ms']:.1f} ({base['ms'] / row['ms']:.2f}x)" if row and base else "")
        size = next((row for case, device in places[:2] if (row := step(cache, mode, case, device))), None)
        how = {"eager": "" if "Cache" in cache else ", growing", "compiled": ", compiled"}[mode]
        lines.append([f"`{cache}`{how}", *cells, f"{size['cache_bytes'] / 2**30:.1f}" if size else ""])
    titles = [f"{batch} x {context:,}, {device.split()[1]}" for (batch, context), device in places]
    return Table(["cache", *titles, "GiB at 8 x 32,768"], lines, rule=RULE)


def room() -> Table:
    """What fits an H100 of 80 GB beside the weights of the 8B shape."""
    found = {
        (row["cache"].removesuffix(UNCENTERED), row["how"]): row["found"]
        for row in rows("generate") if row["section"] == "largest" and row["device"] == H100
    }  # fmt: skip
    lines = []
    for how, name in (("context", "longest context of one request, tokens"), ("batch", "requests of 32,768 tokens")):
        dense, ours = found["DynamicCache", how], found["turboquant_4bit_nc", how]
        lines.append([name, f"{dense:,}", f"{ours:,}", f"{ours / dense:.2f}x"])
    return Table(["", "`DynamicCache`", "`turboquant_4bit_nc`", ""], lines, rule=RULE)


def replicas() -> Table:
    """Two replicas of `examples/ray_serve` under sessions of agents, by who gets a turn."""
    lines = [
        ["by conversation" if row["affinity"] else "at random", "yes" if row["store"] else "no", f"{row['turns_s']:.2f}",
         f"{row['reused']:.0%}", f"{row['computed']:,.0f} of {row['prompt']:,.0f}", f"{row['ttft_later']:.2f}"]
        for row in sorted(rows("replicas"), key=lambda row: (row["store"], not row["affinity"]))
    ]  # fmt: skip
    return Table(["replica", "shared folder", "turns/s", "reused", "tokens computed a turn", "TTFT of a later turn, s"], lines)


TABLES: dict[str, Callable[[], Table]] = {f.__name__: f for f in (caches, tasks, steps, room, replicas)}


BESIDE = {
    "int8": (8, 0), "fp8": (8, 0), "k8v4": (8, 0), "4bit_nc": (-8, -8), "k4v4": (8, -7), "nvfp4_mse": (-8, 5), "nvfp4": (-8, 0),
    "k4v3": (8, -3), "k3v3": (8, -3), "k3v2": (-8, 3), "k2v2": (-8, 3), "policy": (8, -4),
    "quanto_int4": (8, 7), "quanto_int4, keys by channel": (-14, -7), "hqq_int4": (8, 0), "hqq_int4, by token": (-8, 6), "hqq_int3": (8, 0),
    "quanto_int2": (8, 6), "quanto_int2, keys by channel": (8, 0), "hqq_int2": (-8, 0), "hqq_int2, by token": (8, -6),
}  # fmt: skip
"""Where names stand, in points from theirs; what is not here has its color in the legend alone."""


CLOSEST = ("int8", "k8v4", "4bit_nc", "k4v3", "k3v3", "k3v2", "k2v2")
"""Formats on the Pareto front of divergence, whose recall is drawn."""


def short(row: dict) -> str:
    """A format without the family that the legend names; peers' with how they group values, where that is not the default."""
    name = row["format"].removeprefix("hadaquant_").removeprefix("turboquant_")
    return name if row.get("grouping", "default") == "default" else f"{name}, {row['grouping']}"


def points() -> list[dict]:
    """Formats with their exact tokens, policies with half and a quarter of the tokens, and peers as they are by default."""
    found = [row for row in rows("quality") if row["model"] == "smollm2" and row["format"] and row["exact"] == "4 + 64"]
    found = [row for row in found if not row["format"].endswith(UNCENTERED) and row["format"] != "identity"]
    found += [
        row for row in rows("quality_policies")
        if row["policy"] in ("snapkv", "h2o") and row["format"] == "turboquant_4bit_nc" and row["budget"] in (0.5, 0.25)
    ]  # fmt: skip
    return found + [row for row in rows("peers") if row["model"] == "smollm2" and "peer" in row and row["exact"] == "0 + 128"]


def of_dense(row: dict) -> tuple[float, float]:
    """Facts that are recalled, in percent of those of the uncompressed run on the same texts, and the standard error."""
    dense = quality(None) if row["policy"] is None else next(other for other in rows("quality_policies") if other["format"] is None)
    right, count = counted(row)
    whole = counted(dense)[0] / 100
    return right / whole, share_error(right, count) * count / whole


def draw(path: Path) -> None:
    from matplotlib import ticker

    steps = 0
    with picture(path, 1, 2, dpi=100, figsize=(14, 5.4), width_ratios=(3, 2), layout="constrained") as (_, ((near, recall),)):
        for row in sorted(points(), key=lambda row: row["ratio"]):
            policy = row.get("policy")
            kind = f"4 bits + {policy}" if policy else family(row["format"]) + (" (transformers)" if "peer" in row else "")
            color = policy_color(policy) if policy else format_color(row["format"])
            name = f"4 bits, {row['budget']:.0%} of the tokens" if policy == "snapkv" else "" if policy else short(row)
            marker = "X" if "peer" in row else "D" if policy else "o"
            drawn = {"marker": marker, "color": color, "markersize": 6, "elinewidth": 0.8, "linestyle": "none"}
            near.errorbar(row["ratio"], row["kl"], row["kl_error"], label=kind, **drawn)
            if at := BESIDE.get(short(row) if not policy else "policy"):
                side = {"ha": "right" if at[0] < 0 else "left", "va": "center", "fontsize": 8, "color": color}
                near.annotate(name, (row["ratio"], row["kl"]), at, textcoords="offset points", **side)
            if "recall" in row and (policy or short(row) in CLOSEST):  # the others lie among these
                share, error = of_dense(row)
                recall.errorbar(row["ratio"], share, error, **drawn)
                height = share if policy else min(share - error - 4, 83 - 5 * (steps % 2))
                side = {"ha": "right" if policy else "center", "va": "center", "fontsize": 8, "color": color}
                recall.annotate(name, (row["ratio"], height), (-8 if policy else 0, 0), textcoords="offset points", **side)
                steps += not policy
        named = dict(zip(*reversed(near.get_legend_handles_labels()), strict=True))
        near.legend(named.values(), named.keys(), loc="lower right", fontsize=8)
        near.set(yscale="log", title="next-token divergence (crosses: one text)")
        near.set_ylabel("KL divergence from the uncompressed model, nats\n(lower is better)")
        recall.axhline(100, color="black", linestyle=":", linewidth=1)
        recall.set(ylim=(0, 118), title="facts of the context that are recalled")
        recall.set_ylabel("facts, % of those that the uncompressed model recalls\n(higher is better)")
        for axes in (near, recall):
            axes.set(xscale="log", xlim=(1.55, 24), xlabel="times smaller than DynamicCache in 16 bit  (right is better)")
            axes.xaxis.set_major_locator(ticker.FixedLocator([2, 3, 4, 5, 6, 8, 10, 12]))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.grid(alpha=0.25)
        near.figure.suptitle("SmolLM2-135M-Instruct, 8,064 tokens, standard errors over the texts", fontsize=11)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*TABLES, "picture"])
    parser.add_argument("--out", type=Path, default=PICTURE, help="of the picture")
    args = parser.parse_args(arguments)
    if args.what == "picture":
        draw(args.out)
    else:
        table = TABLES[args.what]()
        print(table.markdown() if table.lines else "")


if __name__ == "__main__":
    main()
