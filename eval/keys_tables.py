"""The tables and the picture of keys.py."""

from __future__ import annotations

from pathlib import Path

from error_bars import standard_error, with_error


def error_of(row: dict) -> float:
    """Over the windows; the rows of `check` hold their KLs alone."""
    import torch

    return row.get("kl_error", standard_error(torch.tensor(row["kls"], dtype=torch.float64)))


def markdown(rows: list[dict]) -> str:
    """A table for each study: KL of each trial by model."""
    parts = []
    for study in dict.fromkeys(row["what"] for row in rows):
        of = [row for row in rows if row["what"] == study]
        models = list(dict.fromkeys(row["model"] for row in of))
        at = {(row["label"], row["model"]): row for row in of}
        lines = [f"| {study.removeprefix('keys_')} | {' | '.join(models)} |", "|---" * (1 + len(models)) + "|"]
        for label in dict.fromkeys(row["label"] for row in of):
            found = [at.get((label, model)) for model in models]
            lines.append(f"| {label} | {' | '.join(with_error(row['kl'], error_of(row)) if row else '' for row in found)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def plot(rows: list[dict], path: Path) -> None:
    """KL against bytes, a panel a model: every trial that says its bytes, by study."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in rows if row.get("bytes")]
    models = list(dict.fromkeys(row["model"] for row in rows))
    if not models:
        raise SystemExit("no row says its bytes: measure bits, directions, outliers, scales or halves first")
    figure, grid = pyplot.subplots(1, len(models), figsize=(4.6 * len(models), 4.4), squeeze=False)
    for axes, model in zip(grid[0], models, strict=True):
        for study in dict.fromkeys(row["what"] for row in rows):
            some = [row for row in rows if row["what"] == study and row["model"] == model]
            axes.plot([row["bytes"] for row in some], [row["kl"] for row in some], "o", markersize=3, label=study.removeprefix("keys_"))
        axes.set(title=model, xlabel="bytes of a token and head (left is better)", yscale="log")
    grid[0][0].set_ylabel("KL divergence from the dense run, nats (lower is better)")
    grid[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)
