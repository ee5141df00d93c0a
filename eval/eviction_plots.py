"""The pictures of eviction.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from palette import format_color, line_styles, policy_color


def plot(studies: dict[str, list[dict]], path: Path) -> None:
    """`path` with `_sinks.png`, `_budgets.png` and `_combined.png` behind it, where there are rows of the study."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for study, rows in studies.items():
        if rows and study in PLOTS:
            figure = PLOTS[study](rows, pyplot)
            figure.tight_layout()
            figure.savefig(file := path.with_name(f"{path.name}_{study}.png"), dpi=130)
            pyplot.close(figure)
            print(file)


def sinks(rows: list[dict], pyplot):
    dense, *others = rows
    counts = list(dict.fromkeys(row["parameters"]["num_sink_tokens"] for row in others))
    figure, grid = pyplot.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    trained = dense["tokens"]  # it ends there
    titles = {
        "within": f"tokens {trained // 2:,} to {trained:,}: within the trained context",
        "beyond": f"tokens after {trained:,}: beyond it",
    }
    for axes, (span, title) in zip(grid, titles.items(), strict=True):
        for window, strength in ((256, 0.45), (1020, 1)):
            for positions, style in (("original", "--"), ("cache", "-")):
                found = {}
                for row in others:
                    options = row["parameters"]
                    if options["window"] == window and (options["positions"] == positions or not options["num_sink_tokens"]):
                        found[counts.index(options["num_sink_tokens"])] = row[f"perplexity_{span}"]
                label = f'window {window:,}, positions="{positions}"'
                line = {"linestyle": style, "color": policy_color("sink_window"), "alpha": strength, "marker": "o"}
                axes.plot(list(found), list(found.values()), label=label, **line)
        axes.axhline(dense["perplexity_within"], color="gray", linewidth=1, label=f"dense, tokens {trained // 2:,} to {trained:,}")
        axes.set(title=title, xlabel="sinks", xticks=range(len(counts)), xticklabels=counts, yscale="log")
    grid[0].set_ylabel("perplexity (lower is better)")
    grid[1].legend(fontsize=8)
    return figure


def budgets(rows: list[dict], pyplot):
    figure, grid = pyplot.subplots(1, 3, figsize=(14, 4.5))
    titles = {
        "kl": "KL divergence of what is read on, nats\n(lower is better)",
        "recall_unseen": "recall, question unseen at eviction\n(higher is better)",
        "recall_seen": "recall, question seen at eviction\n(higher is better)",
    }
    styles = line_styles(dict.fromkeys(row["name"] for row in rows), policy_color)
    for axes, (value, title) in zip(grid, titles.items(), strict=True):
        for name, style in styles.items():
            found = [row for row in rows if row["name"] == name]
            axes.plot([100 * row["share"] for row in found], [row[value] for row in found], markersize=4, label=name, **style)
        axes.set(title=title, xlabel=f"budget, % of {rows[0]['context']:,} tokens")
    grid[0].set_yscale("symlog", linthresh=1e-2)
    grid[0].legend(fontsize=8)
    return figure


def combined(rows: list[dict], pyplot):
    figure, axes = pyplot.subplots(figsize=(11, 5.5))
    at, names = range(len(rows)), [row["name"] for row in rows]
    bars = axes.barh(at, [row["requests"] for row in rows], color=[bar_color(name) for name in names])
    notes = [f"{row['requests']:,}   KL {row['kl']:.3f}, recall {row['recall_unseen']:.0%} / {row['recall_seen']:.0%}" for row in rows]
    axes.bar_label(bars, notes, padding=4, fontsize=8)
    axes.set(xscale="log", yticks=at, yticklabels=names, xlim=(8, 500_000), xlabel="requests (right is better)")
    title = "Requests of 131,072 tokens on 8 x H100, Llama 70B (arithmetic)\nKL and recall (unseen / seen), measured"
    figure.suptitle(title, fontsize=10)
    axes.invert_yaxis()
    return figure


UNQUANTIZED = {"dense": format_color("DynamicCache"), "H2O": policy_color("h2o"), "sinks": policy_color("sink_window")}
"""What a name without a format begins with."""


def bar_color(name: str) -> str:
    first = name.split(" ")[0]
    return UNQUANTIZED.get(first) or format_color(first)


PLOTS: dict[str, Callable] = {"sinks": sinks, "budgets": budgets, "combined": combined}
