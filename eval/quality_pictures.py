"""The tables and pictures of quality.py."""

from __future__ import annotations

import csv as csv_files
from pathlib import Path

from error_bars import paired, percent, recalled, with_error
from rich.table import Table


def name_of(row: dict) -> str:
    if row["policy"] is None:
        return row["format"] or "DynamicCache"
    return f"{row['format']} + {row['policy']} {row['budget']:.0%}"


def label_of(row: dict) -> str:
    return name_of(row).split(" + ")[-1]


def front(rows: list[dict]) -> set[int]:
    """Indices of the rows that no other row beats in bytes and in divergence at once."""
    found, least = set(), float("inf")
    for index in sorted(range(len(rows)), key=lambda i: (rows[i]["bytes_per_token"], rows[i]["kl"])):
        if rows[index]["kl"] < least:
            found.add(index)
            least = rows[index]["kl"]
    return found


def columns(rows: list[dict]) -> tuple[str, ...]:
    facts = (f"recall in {int(tokens):,}: unseen / seen" for tokens in rows[0]["recall"])
    return ("cache", "exact", "bytes/token", "smaller", "KL", "over the row above", "same top token", "perplexity x", *facts, "of dense")


def by_kl(rows: list[dict]) -> list[dict]:
    """The dense row, formats by their exact tokens, and policies by format and what they keep: the closest first in each."""
    return sorted(rows, key=lambda row: (group(row), row["kl"]))


def group(row: dict) -> tuple:
    dense, policy = row["format"] is None, row["policy"]
    return (not dense, policy is not None, row["exact"], row["format"] if policy else "", -row.get("budget", 0))


def all_right(row: dict) -> int:
    return sum(right for both in row["recall"].values() for right in both)


def cells(rows: list[dict]) -> list[tuple[str, ...]]:
    """Of rows that `by_kl` has put in order. What is on the Pareto front of all has an asterisk behind its name."""
    best, dense = front(rows), next((row for row in rows if row["format"] is None), None)
    found = []
    for index, row in enumerate(rows):
        top = percent(row["same_top"], row["same_top_error"] if row["format"] else None)
        above = rows[index - 1] if index and group(rows[index - 1]) == group(row) else None
        facts = (" / ".join(recalled(right, row["cases"]).removesuffix(" %") for right in both) + " %" for both in row["recall"].values())
        found.append((
            name_of(row) + " *" * (index in best), row["exact"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x",
            with_error(row["kl"], row["kl_error"]), with_error(*paired(row["kls"], above["kls"])) if above else "",
            top, with_error(row["perplexity_ratio"], row["perplexity_ratio_error"]), *facts,
            percent(all_right(row) / all_right(dense)) if dense and all_right(dense) else "",
        ))  # fmt: skip
    return found


def caption(rows: list[dict]) -> str:
    first = rows[0]
    passages, read_on = first["read_on"]
    return (
        f"{first['model']} in {first['dtype'].removeprefix('torch.')} on {first['device']}: {passages} x {read_on - 1} tokens of "
        f"{first['text']} read on after {first['context']:,}; {first['cases']} facts ({first['facts']}) in each. KL in nats; errors: "
        "standard errors over the passages, of shares of facts binomial. over the row above: difference of KL on the same passages. of "
        "dense: facts recalled, of those that the dense run recalls. bytes and smaller: in 16 bit. exact: first + last tokens that are not "
        "compressed. *: nothing smaller is as close."
    )


def table(rows: list[dict]) -> Table:
    rows = by_kl(rows)
    found = Table(title=f"{rows[0]['model']}, {rows[0]['context']:,} tokens of context", caption=caption(rows))
    for header in columns(rows):
        found.add_column(header, justify="left" if header in ("cache", "exact") else "right")
    for row in cells(rows):
        found.add_row(*row)
    return found


def markdown(rows: list[dict]) -> str:
    rows = by_kl(rows)
    lines = [columns(rows), ("---",) * len(columns(rows)), *cells(rows)]
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", caption(rows)])


def csv(rows: list[dict], path: Path) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", newline="") as file:
        writer = csv_files.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)


def plot(rows: list[dict], path: Path) -> None:
    """Divergence and recall against bytes, the Pareto front drawn through the points that lie on it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = {
        "format, exact 4 + 64": ("o", "tab:blue", lambda row: row["policy"] is None and row["exact"] == "4 + 64"),
        "format alone": ("o", "tab:gray", lambda row: row["policy"] is None and row["exact"] == "none"),
        "eviction": ("^", "tab:orange", lambda row: row["policy"] and row["format"] == "identity"),
        "eviction and format": ("s", "tab:red", lambda row: row["policy"] and row["format"] != "identity"),
    }
    best = sorted(front(rows), key=lambda i: rows[i]["bytes_per_token"])
    figure, grid = pyplot.subplots(1, 2, figsize=(14, 6))
    for axes, value in zip(grid, ("kl", "recall_unseen"), strict=True):
        for label, (marker, color, of) in kinds.items():
            if not (some := [row for row in rows if of(row)]):
                continue
            axes.scatter([row["ratio"] for row in some], [row[value] for row in some], marker=marker, color=color, label=label, alpha=0.7)
    left, right = grid
    on = [rows[i] for i in best if rows[i]["format"] not in (None, "identity")]
    left.plot([row["ratio"] for row in on], [row["kl"] for row in on], color="black", linewidth=1, label="Pareto front")
    last = 0.0
    for row in reversed(on):  # from the left; of points that lie together, one is named
        if row["ratio"] > 1.04 * last:
            left.annotate(f"  {label_of(row)}", (row["ratio"], row["kl"]), fontsize=8, va="top")
            last = row["ratio"]
    for row in rows:
        if row["policy"] and row["recall_unseen"] >= 0.5:
            right.annotate(f"  {label_of(row)}", (row["ratio"], row["recall_unseen"]), fontsize=8, rotation=30)
    left.set(yscale="log", title="KL divergence of what is read on, nats: lower is closer")
    right.set(ylim=(-0.03, 1.15), title="recall of code words, question unseen when the context was stored")
    for axes in grid:
        axes.set(xscale="log", xlim=(1, 20), xlabel=f"times smaller than a dense cache in {rows[0]['dtype'].removeprefix('torch.')}")
        axes.set_xticks([1, 2, 3, 4, 5, 8, 12, 16], [1, 2, 3, 4, 5, 8, 12, 16])
        axes.minorticks_off()
    left.legend(fontsize=8)
    figure.suptitle(f"{rows[0]['model']}, {rows[0]['context']:,} tokens")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)
