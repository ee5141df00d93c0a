"""The tables and pictures of quality.py."""

from __future__ import annotations

import csv as csv_files
from pathlib import Path

from rich.table import Table

COLUMNS = ("cache", "exact", "bytes/token", "smaller", "KL", "perplexity", "recall unseen", "seen", "Pareto")


def name_of(row: dict) -> str:
    if row["policy"] is None:
        return row["format"] or "DynamicCache"
    return f"{row['format']} + {row['policy']} {row['budget']:.0%}"


def short(row: dict) -> str:
    return name_of(row).split(" + ")[-1]


def front(rows: list[dict]) -> set[int]:
    """Indices of the rows that no other row beats in bytes and in divergence at once."""
    found, least = set(), float("inf")
    for index in sorted(range(len(rows)), key=lambda i: (rows[i]["bytes_per_token"], rows[i]["kl"])):
        if rows[index]["kl"] < least:
            found.add(index)
            least = rows[index]["kl"]
    return found


def cells(rows: list[dict]) -> list[tuple[str, ...]]:
    best = front(rows)
    return [
        (
            name_of(row), row["exact"], f"{row['bytes_per_token']:,.0f}", f"{row['ratio']:.2f}x", f"{row['kl']:.4f}",
            f"{row['perplexity'] / row['dense_perplexity']:.3f}", f"{row['recall_unseen']:.0%}", f"{row['recall_seen']:.0%}",
            "*" if index in best else "",
        )
        for index, row in enumerate(rows)
    ]  # fmt: skip


def table(rows: list[dict]) -> Table:
    first = rows[0]
    passages, read_on = first["read_on"]
    found = Table(
        title=f"{first['model']}, {first['context']:,} tokens of context, {first['dtype'].removeprefix('torch.')}",
        caption=f"{passages} x {read_on - 1} tokens read on, {first['cases']} code words. perplexity: times that of the dense run. "
        "exact: first + last tokens in the model's dtype. Pareto: nothing smaller is as close.",
    )
    for header in COLUMNS:
        found.add_column(header, justify="left" if header in ("cache", "exact") else "right")
    for row in cells(rows):
        found.add_row(*row)
    return found


def markdown(rows: list[dict]) -> str:
    """Two tables: formats, with exact tokens and alone; what evicts, by the share that stays. Bold: on the Pareto front of all rows."""
    best = front(rows)
    at = {(row["format"], row["policy"], row["exact"], row.get("budget")): index for index, row in enumerate(rows)}

    def closeness(index: int) -> str:
        row = rows[index]
        kl = f"{row['kl']:.4f}"
        return f"{row['ratio']:.2f}x | {f'**{kl}**' if index in best else kl} | {row['perplexity'] / row['dense_perplexity']:.3f}"

    def recalled(index: int) -> str:
        return f"{rows[index]['recall_unseen']:.0%} / {rows[index]['recall_seen']:.0%}"

    names = list(dict.fromkeys(row["format"] for row in rows if row["policy"] is None and row["format"]))
    lines = [
        "| format | smaller, exact 4 + 64 | KL | perplexity | recall | smaller, alone | KL | perplexity | recall |",
        "|---" * 9 + "|",
    ]
    for name in names:
        zones, alone = (at[name, None, exact, None] for exact in ("4 + 64", "none"))
        lines.append(f"| `{name}` | {closeness(zones)} | {recalled(zones)} | {closeness(alone)} | {recalled(alone)} |")
    evicting = list(dict.fromkeys((row["format"], row["policy"]) for row in rows if row["policy"]))
    shares = sorted({row["budget"] for row in rows if row["policy"]})
    if evicting:
        header = " | ".join(f"smaller, {share:.0%} kept | KL | perplexity | recall" for share in shares)
        lines += ["", f"| policy, in format | {header} |", "|---" * (1 + 4 * len(shares)) + "|"]
    for format, policy in evicting:
        of = [at[format, policy, "4 + 64", share] for share in shares]
        lines.append(f"| {policy}, `{format}` | {' | '.join(f'{closeness(i)} | {recalled(i)}' for i in of)} |")
    return "\n".join(lines)


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
    on = [rows[i] for i in best if rows[i]["kl"] > 1e-6]
    left.plot([row["ratio"] for row in on], [row["kl"] for row in on], color="black", linewidth=1, label="Pareto front")
    last = 0.0
    for row in reversed(on):  # from the left; of points that lie together, one is named
        if row["ratio"] > 1.04 * last:
            left.annotate(f"  {short(row)}", (row["ratio"], row["kl"]), fontsize=8, va="top")
            last = row["ratio"]
    for row in rows:
        if row["policy"] and row["recall_unseen"] >= 0.5:
            right.annotate(f"  {short(row)}", (row["ratio"], row["recall_unseen"]), fontsize=8, rotation=30)
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
