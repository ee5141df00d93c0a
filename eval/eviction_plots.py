"""The pictures of eviction.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


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
        for window, color in ((256, "tab:orange"), (1020, "tab:blue")):
            for positions, style in (("original", "--"), ("cache", "-")):
                found = {}
                for row in others:
                    options = row["parameters"]
                    if options["window"] == window and (options["positions"] == positions or not options["num_sink_tokens"]):
                        found[counts.index(options["num_sink_tokens"])] = row[f"perplexity_{span}"]
                label = f'window {window:,}, positions="{positions}"'
                axes.plot(list(found), list(found.values()), style, color=color, marker="o", label=label)
        axes.axhline(dense["perplexity_within"], color="gray", linewidth=1, label=f"dense, tokens {trained // 2:,} to {trained:,}")
        axes.set(title=title, xlabel="sinks", xticks=range(len(counts)), xticklabels=counts, yscale="log")
    grid[0].set_ylabel("perplexity")
    grid[1].legend(fontsize=8)
    return figure


def budgets(rows: list[dict], pyplot):
    figure, grid = pyplot.subplots(1, 3, figsize=(14, 4.5))
    titles = {
        "kl": "KL divergence of what is read on, nats",
        "recall_unseen": "recall, question unseen at eviction",
        "recall_seen": "recall, question seen at eviction",
    }
    for axes, (value, title) in zip(grid, titles.items(), strict=True):
        for name in dict.fromkeys(row["name"] for row in rows):
            found = [row for row in rows if row["name"] == name]
            style = {"color": "black", "linestyle": ":"} if name == "Random" else {}
            axes.plot([100 * row["share"] for row in found], [row[value] for row in found], marker="o", markersize=4, label=name, **style)
        axes.set(title=title, xlabel=f"budget, % of {rows[0]['context']:,} tokens")
    grid[0].set_yscale("symlog", linthresh=1e-2)
    grid[0].legend(fontsize=8)
    return figure


def combined(rows: list[dict], pyplot):
    figure, axes = pyplot.subplots(figsize=(9, 5.5))
    at, names = range(len(rows)), [row["name"] for row in rows]
    bars = axes.barh(at, [row["requests"] for row in rows], color="tab:blue")
    notes = [f"{row['requests']:,}   KL {row['kl']:.3f}, recall {row['recall_unseen']:.0%} / {row['recall_seen']:.0%}" for row in rows]
    axes.bar_label(bars, notes, padding=4, fontsize=8)
    axes.set(xscale="log", yticks=at, yticklabels=names, xlim=(8, 300_000))
    title = "Requests of 131,072 tokens on 8 x H100, Llama 70B (arithmetic)\nKL and recall (unseen / seen), measured"
    axes.set_title(title, fontsize=10)
    axes.invert_yaxis()
    return figure


PLOTS: dict[str, Callable] = {"sinks": sinks, "budgets": budgets, "combined": combined}
