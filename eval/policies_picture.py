"""The picture of policies on generated tasks, from rows of a concluded study (`eval/results/policies.jsonl`); nothing is measured.

python eval/policies_picture.py [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from statistics import mean

from harness import RESULTS, picture, read_rows
from palette import policy_color

PICTURE = RESULTS / "policies_smollm2.png"
SHOWN = ("kvzip", "h2o, heads", "expected_attention, heads", "snapkv, heads", "sink_window", "h2o", "snapkv", "random")
LEAST = 0.3
"""The recall of the uncompressed run below which a task counts for nothing."""
Tasks = dict[str, dict[str, dict[str, float]]]


def measured(seen: bool = False) -> dict[str, dict[float, Tasks]]:
    """For each policy, the results at each budget after 4,000 tokens, by task and context."""
    found: dict[str, dict[float, Tasks]] = {}
    for row in read_rows(RESULTS / "policies.jsonl", "policies_recall_smollm2"):
        if row["tokens"] == 4000 and row["seen"] is seen and row["format"] == "identity":
            found.setdefault(row["policy"], {})[row["budget"]] = row["contexts"]
    return found


def recalled(tasks: Tasks, dense: Tasks) -> float:
    """The share of the uncompressed run's recall, the mean over the tasks of which that run recalls `LEAST` or more."""
    whole = {task: mean(of["recall"] for of in contexts.values()) for task, contexts in dense.items() if task != "text"}
    parts = {task: mean(of["recall"] for of in tasks[task].values()) for task in whole if whole[task] >= LEAST and task in tasks}
    return mean(part / whole[task] for task, part in parts.items())


def divergence(tasks: Tasks) -> float:
    return mean(of["kl"] for of in tasks["text"].values())


def draw(path: Path) -> None:
    found = measured()
    (dense,) = found.pop("dense").values()
    with picture(path, 1, 2, dpi=100, figsize=(11, 4.6), layout="constrained") as (figure, ((recall, near),)):
        for name in SHOWN:
            budgets = sorted(found[name])
            kept = [100 * budget for budget in budgets]
            drawn = {"color": policy_color(name), "linestyle": "--" if "heads" in name else "-", "marker": "s" if "heads" in name else "o"}
            recall.plot(
                kept, [100 * recalled(found[name][budget], dense) for budget in budgets], label=name.replace("heads", "by head"), **drawn
            )
            of_text = [budget for budget in budgets if "text" in found[name][budget]]
            near.plot([100 * budget for budget in of_text], [divergence(found[name][budget]) for budget in of_text], **drawn)
        recall.set(title="facts asked for later", ylabel="recall, % of the uncompressed run's (higher is better)", ylim=(0, 105))
        near.set(title="a text goes on", ylabel="KL divergence, nats (lower is better)", yscale="log")
        for axes in (recall, near):
            axes.set(xlabel="tokens kept, % (left is smaller)")
            axes.grid(alpha=0.25)
        figure.legend(loc="outside right center", fontsize=9)
        figure.suptitle("SmolLM2-135M-Instruct, 4,000 tokens")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=PICTURE)
    draw(parser.parse_args(arguments).out)


if __name__ == "__main__":
    main()
