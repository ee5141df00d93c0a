"""The tables and the picture of README and of the site that draw on several studies, from the rows in eval/results; nothing is measured.

python eval/summary.py caches | tasks | steps | room  a table, as markdown
python eval/summary.py picture [--out FILE]                      quality against memory on the real model
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from error_bars import number, recalled, share_error
from harness import RESULTS, Table, picture, read_rows
from palette import UNCENTERED, format_color, policy_color
from quality_pictures import all_right
from tasks import by_case, right

PICTURE = RESULTS / "overview.png"
RULE = (" --- ",)
CACHES = {
    'QuantizedPerTokenCache(config, dtype="int8")': "int8",
    "TurboQuantCache(config)": "turboquant_4bit_nc",
    "HadaQuantCache(config, key_bits=3, value_bits=3)": "hadaquant_k3v3",
}
SNAPKV = 'CompressedCache(config, format="turboquant_4bit_nc", policy=policies.SnapKV(budget=0.5))'
KVZIP = SNAPKV.replace("SnapKV", "KVzip")
H100 = "NVIDIA H100 80GB HBM3"
REAL = "qwen2.5-coder-1.5b"
ASKED = {"HumanEval": ("humaneval", 6000), "facts": ("facts", 30_000)}
SNAPKV_HALF, KVZIP_HALF = (f"turboquant_4bit_nc:policy={name}:budget=0.5" for name in ("snapkv", "kvzip"))
TASKS = {
    "`DynamicCache` (transformers)": "dynamic", **{f"`{call}`": format for call, format in CACHES.items()},
    "`HadaQuantCache(config, key_bits=2, value_bits=2)`": "hadaquant_k2v2", f"`{SNAPKV}`": SNAPKV_HALF, f"`{KVZIP}`": KVZIP_HALF,
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
    return recalled(all_right(row), 2 * row["cases"] * len(row["recall"]))


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
        "Qwen2.5-Coder-1.5B-Instruct in bf16. KL: nats, after 8,192 tokens. Tasks: right answers of all, standard error; answers lost / "
        "won against `DynamicCache`, McNemar's exact p. A step: of generate, 8 requests of 32,768 tokens, 8B shape of random weights, "
        "`max_length`, against the same library without compression, H100."
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


TABLES: dict[str, Callable[[], Table]] = {f.__name__: f for f in (caches, tasks, steps, room)}


SHORT = {
    "int8": "int8", "fp8": "fp8", "turboquant_k8v4": "k8v4", "turboquant_4bit_nc": "4 bits", "nvfp4_mse": "nvfp4_mse",
    "int4_vllm": "int4_vllm", "hadaquant_k4v3": "k4v3", "hadaquant_k3v3": "3 bits", "hadaquant_k2v2": "2 bits",
    SNAPKV_HALF: "4 bits + SnapKV, half", KVZIP_HALF: "4 bits + KVzip, half",
}  # fmt: skip
"""Names in the picture, of the caches that are drawn."""
BELOW = {"int8", "turboquant_k8v4", "turboquant_4bit_nc", "hadaquant_k4v3", SNAPKV_HALF, KVZIP_HALF}
BELOW_FACTS = {"int8", "turboquant_4bit_nc", "hadaquant_k2v2", SNAPKV_HALF}
"""Caches whose names stand below their points, in each panel."""


def draw(path: Path) -> None:
    """Divergence and facts against memory, on the real model. A cache without a row of facts is in the left panel alone."""
    from matplotlib import ticker

    found = by_case([row for row in rows("tasks") if row["model"] == REAL])
    every = {(task, tokens): of for (task, tokens, _, dtype), of in found.items() if dtype == "bfloat16"}
    near_rows, facts_rows = every["kl", 8192], every[ASKED["facts"]]
    with picture(path, 1, 2, dpi=110, figsize=(12, 5), width_ratios=(1, 1), layout="constrained") as (_, ((near, recall),)):
        for cache, name in SHORT.items():
            row = near_rows[cache]
            format, _, policy = cache.partition(":policy=")
            color = policy_color(policy.split(":")[0]) if policy else format_color(format)
            drawn = {"marker": "D" if policy else "o", "color": color, "markersize": 7, "elinewidth": 1, "linestyle": "none"}
            panels = [(near, row["kl"], row["kl_error"], BELOW)]
            if cache in facts_rows:
                right = facts_rows[cache]["right"]
                count, of = right.count("1"), len(right)
                panels.append((recall, 100 * count / of, 100 * share_error(count, of), BELOW_FACTS))
            for axes, value, error, below in panels:
                axes.errorbar(row["ratio"], value, error, **drawn)
                side = -1 if cache in below else 1
                beside = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 10, "color": color}
                axes.annotate(name, (row["ratio"], value + side * error), (0, 9 * side), **beside)
        right = facts_rows["dynamic"]["right"]
        recall.axhline(100 * right.count("1") / len(right), color="black", linestyle=":", linewidth=1)
        recall.annotate("uncompressed", (2.1, 100 * right.count("1") / len(right)), (0, 3), textcoords="offset points", fontsize=10)
        near.set(yscale="log", ylim=(1.5e-4, 0.12), title="divergence of the next token after 8,192 tokens")
        near.set_ylabel("KL from the uncompressed run, nats (lower is better)")
        recall.set(ylim=(0, 108), title="64 facts, asked for after 30,000 tokens")
        recall.set_ylabel("facts that are answered, % of all (higher is better)")
        for axes in (near, recall):
            axes.set(xscale="log", xlim=(1.5, 8.5), xlabel="times smaller than DynamicCache in bf16 (right is better)")
            axes.xaxis.set_major_locator(ticker.FixedLocator([2, 3, 4, 5, 6, 7, 8]))
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_locator(ticker.NullLocator())
            axes.grid(alpha=0.25)
        near.figure.suptitle("Qwen2.5-Coder-1.5B-Instruct in bf16, with standard errors", fontsize=12)


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
