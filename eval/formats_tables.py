"""The tables and the picture of formats.py."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table


def _studied(rows: list[dict], study: str) -> dict[str, list[dict]]:
    """By model."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        if row["what"].startswith(f"formats_{study}_"):
            found.setdefault(row["model"], []).append(row)
    return found


def _number(x: float) -> str:
    return f"{x:.5f}".removeprefix("0")


def show(rows: list[dict]) -> None:
    console = Console(width=150)
    quality = _studied(rows, "quality")
    if quality:
        table = Table(title="KL from the dense run, exact zones off | 4 + 64")
        table.add_column("format")
        table.add_column("bytes", justify="right")
        for model in quality:
            table.add_column(model, justify="right")
        cells = {(m, r["label"], r["exact_recent"]): r for m, held in quality.items() for r in held}
        for label in dict.fromkeys(r["label"] for r in next(iter(quality.values()))):
            row = [label, str(next(r["bytes"] for (_, name, _), r in cells.items() if name == label))]
            for model in quality:
                off, on = (cells[model, label, recent] for recent in (0, 64))
                row.append(f"{_number(off['kl'])} ± {_number(off['kl_error'])} | {_number(on['kl'])} ± {_number(on['kl_error'])}")
            table.add_row(*row)
        console.print(table)
    for study, fields in (("ablation", ("kl", "kl_error")), ("recall", ("recall_unseen", "recall_seen"))):
        found = _studied(rows, study)
        if found:
            table = Table(title=f"{study}: {', '.join(fields)}")
            table.add_column("what")
            for model in found:
                table.add_column(model, justify="right")
            for label in dict.fromkeys(r["label"] for r in next(iter(found.values()))):
                held = [next(r for r in model if r["label"] == label) for model in found.values()]
                table.add_row(label, *(" ± ".join(_number(r[f]) for f in fields) if study == "ablation" else
                                       " / ".join(f"{r[f]:.0%}" for f in fields) for r in held))  # fmt: skip
            console.print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Quality against bytes, a panel a model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = _studied(rows, "quality")
    figure, grid = pyplot.subplots(1, len(found), figsize=(6 * len(found), 5.2), squeeze=False)
    families = {"hadaquant": "tab:red", "turboquant": "tab:blue", "nvfp4": "tab:green", "int": "tab:purple", "fp8": "tab:gray"}
    for axes, (model, held) in zip(grid[0], found.items(), strict=True):
        for recent, marker, fill in ((0, "o", "none"), (64, "o", "full")):
            for family, color in families.items():
                some = sorted(
                    (r["bytes"], r["kl"], r["label"]) for r in held if r["exact_recent"] == recent and r["label"].startswith(family)
                )
                style = {"color": color, "marker": marker, "fillstyle": fill, "linestyle": "-" if family == "hadaquant" else "none"}
                axes.plot([b for b, _, _ in some], [kl for _, kl, _ in some], label=family if recent else None, **style)
                for size, kl, label in some if recent == 0 else ():
                    axes.annotate(
                        label.removeprefix(family).strip("_") or label, (size, kl), fontsize=6, xytext=(3, 3), textcoords="offset points"
                    )
        axes.set(
            title=f"{model}: hollow, zones off; filled, 4 + 64 exact",
            xlabel="bytes of a token and head, D = 128",
            yscale="log",
            xscale="log",
        )
        axes.set_xticks([68, 84, 100, 116, 132, 144, 198, 264], [68, 84, 100, 116, 132, 144, 198, 264], fontsize=7)
        axes.minorticks_off()
    grid[0][0].set_ylabel("KL divergence from the dense run, nats")
    grid[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    print(path)
