"""The tables and the pictures of policies.py."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from error_bars import percent, with_error
from harness import Table, picture
from palette import line_styles, policy_color

from qkvcache.policies import REGISTRY

DENSE = "dense"
RULE = (" --- ", " ---: ")
LEAST = 0.3
"""Of the answers to a task that the dense run must recall, for the task to count."""
COMPARED = 0.25
"""The budget by which policies are sorted, and at which they are compared task by task."""


Estimate = tuple[float, float]
"""A number and its standard error."""


def mean(values: list[float]) -> Estimate:
    return statistics.mean(values), statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else math.nan


def ratio(values: list[float], others: list[float]) -> Estimate:
    """Of the means of what was measured on the same contexts; the error is that of the residuals."""
    whole = statistics.mean(others)
    found = statistics.mean(values) / whole
    return found, mean([x - found * y for x, y in zip(values, others, strict=True)])[1] / whole


def overall(each: list[Estimate]) -> Estimate | None:
    """The mean of independent estimates."""
    if not each:
        return None
    return statistics.mean(value for value, _ in each), math.sqrt(sum(error**2 for _, error in each)) / len(each)


def paired(row: dict, dense: dict, task: str, measure: str) -> tuple[list[float], list[float]]:
    """A measure of a task in the contexts that both rows have."""
    ours, theirs = (each["contexts"].get(task, {}) for each in (row, dense))
    both = [context for context in ours if context in theirs and measure in ours[context] and measure in theirs[context]]
    return [ours[context][measure] for context in both], [theirs[context][measure] for context in both]


def counted(dense: dict) -> list[str]:
    """Tasks whose dense recall is large enough to be compared with."""
    return [task for task, found in dense["contexts"].items() if statistics.mean(x.get("recall", 0) for x in found.values()) >= LEAST]


def relative_recall(row: dict, dense: dict, tasks: list[str]) -> Estimate | None:
    """The mean over tasks of recall relative to the dense run."""
    pairs = [paired(row, dense, task, "recall") for task in tasks]
    return overall([ratio(*pair) for pair in pairs if any(pair[1])])


def lost(row: dict, dense: dict, tasks: list[str]) -> Estimate | None:
    """The mean over tasks of how much less likely answers are than in the dense run, nats a token."""
    pairs = [paired(row, dense, task, "ll") for task in tasks]
    return overall([mean([y - x for x, y in zip(*pair, strict=True)]) for pair in pairs if pair[0]])


def divergence(row: dict) -> Estimate | None:
    found = [x["kl"] for x in row["contexts"].get("text", {}).values() if "kl" in x]
    return mean(found) if found else None


def shown(value: Estimate | None, form: Callable[..., str] = with_error) -> str:
    if value is None:
        return ""
    return form(*value) if value[1] or form is with_error else form(value[0])


@dataclass(frozen=True)
class Setting:
    """Rows of one length, with the question seen or not, in one format."""

    tokens: int
    seen: bool
    format: str
    rows: list[dict]
    dense: dict

    @property
    def name(self) -> str:
        where = "" if self.format == "identity" else f", in {self.format}"
        return f"{self.tokens:,} tokens, question {'seen' if self.seen else 'unseen'}{where}"

    @property
    def budgets(self) -> list[float]:
        return sorted({row["budget"] for row in self.rows}, reverse=True)

    @property
    def compared(self) -> float:
        return min(self.budgets, key=lambda x: abs(x - COMPARED), default=COMPARED)

    def of(self, policy: str, budget: float) -> dict | None:
        return next((row for row in self.rows if (row["policy"], row["budget"]) == (policy, budget)), None)

    @property
    def policies(self) -> list[str]:
        """The best first: by the likelihood that is lost at the budget `compared`, which tells apart what recall does not; then those that
        were measured at others."""
        tasks = counted(self.dense)
        cost: dict[str, tuple[bool, float]] = {}
        for policy in dict.fromkeys(row["policy"] for row in self.rows):
            of = self.of(policy, self.compared)
            found = [lost(row, self.dense, tasks) for row in ([of] if of else self.rows) if row["policy"] == policy]
            cost[policy] = of is None, statistics.mean([value[0] for value in found if value] or [math.inf])
        return sorted(cost, key=cost.__getitem__)


def settings(rows: list[dict]) -> list[Setting]:
    found = []
    for tokens, seen, format in dict.fromkeys((row["tokens"], row["seen"], row["format"]) for row in rows):
        same = [row for row in rows if (row["tokens"], row["seen"]) == (tokens, seen)]
        dense = next((row for row in same if row["policy"] == DENSE), None)
        if dense is not None and dense["contexts"]:
            of = [row for row in same if row["format"] == format and row["policy"] != DENSE]
            found.append(Setting(tokens, seen, format, of, dense))
    return found


def recall_tables(rows: list[dict]) -> Iterator[Table]:
    every = settings(rows)
    for setting in every:
        tasks = counted(setting.dense)
        cells = []
        for policy in setting.policies:
            line, kls = [], []
            for budget in setting.budgets:
                row = setting.of(policy, budget)
                recall, cost = (None, None) if row is None else (f(row, setting.dense, tasks) for f in (relative_recall, lost))
                line.append(", ".join(filter(None, (shown(recall, percent), shown(cost)))))
                kls.append(shown(divergence(row)) if row else "")
            cells.append([policy, *line, *([] if setting.seen else kls)])
        headers = [f"{budget:.0%}" for budget in setting.budgets]
        kl_headers = [] if setting.seen else [f"KL {header}" for header in headers]
        left_out = sorted({task for task in setting.dense["contexts"] if task != "text"} - set(tasks))
        contexts = len(next(iter(setting.dense["contexts"].values())))
        caption = (
            f"{setting.rows[0]['model'] if setting.rows else ''}, {contexts} contexts a task ({', '.join(tasks)}). Recall relative to the "
            "dense run, and nats a token by which answers are less likely than in the dense run, means over the tasks"
            + (f"; left out, as the dense run recalls less than {LEAST:.0%}: {', '.join(left_out)}" if left_out else "")
            + ("." if setting.seen else ". KL: nats, of 64 tokens that follow a text.")
        )
        yield Table(["policy", *headers, *kl_headers], cells, f"**{setting.name}**", caption, RULE)
    for setting in every[:1]:
        yield by_task(setting)
    yield dense_recall(every)


def by_task(setting: Setting) -> Table:
    budget = setting.compared
    tasks = counted(setting.dense)
    cells = []
    for policy in setting.policies:
        if row := setting.of(policy, budget):
            cells.append([policy, *(shown(relative_recall(row, setting.dense, [task]), percent) for task in tasks)])
    return Table(["policy", *tasks], cells, f"**by task: {setting.name}, {budget:.0%} kept**", rule=RULE)


def dense_recall(every: list[Setting]) -> Table:
    every = [setting for setting in every if setting.format == "identity"]
    tasks = list(dict.fromkeys(task for setting in every for task in setting.dense["contexts"] if task != "text"))
    cells = []
    for setting in every:
        of = [[x["recall"] for x in setting.dense["contexts"].get(task, {}).values() if "recall" in x] for task in tasks]
        cells.append([setting.name, *(shown(mean(found), percent) if found else "" for found in of)])
    return Table(["", *tasks], cells, "**recall of the dense run**", rule=RULE)


def plot(rows: list[dict], path: Path) -> None:
    """Recall, likelihood lost and KL divergence against the budget, of the shortest contexts: one line a policy."""
    every = [setting for setting in settings(rows) if setting.format == "identity"]
    every = [setting for setting in every if setting.tokens == every[0].tokens]
    columns = len(every) + 1
    with picture(path, 1, columns, dpi=90, figsize=(5.5 * columns, 5.5), layout="constrained") as (figure, (grid,)):
        # The table has the others.
        lines = {policy for setting in every for policy in setting.policies if policy.removesuffix(", heads") in REGISTRY}
        styles = line_styles(sorted(lines), policy_color)
        drawn = {}
        for setting, axes in zip([*every, every[0]], grid, strict=True):
            last, tasks = axes is grid[-1], counted(setting.dense)
            for policy in filter(lines.__contains__, setting.policies):
                found = []
                for budget in setting.budgets:
                    row = setting.of(policy, budget)
                    if value := row and (divergence(row) if last else relative_recall(row, setting.dense, tasks)):
                        found.append((100 * budget, value[0] * (1 if last else 100)))
                if found:
                    (drawn[policy],) = axes.plot(*zip(*found, strict=True), markersize=4, **styles[policy])
            if last:
                axes.set(title=f"{setting.tokens:,} tokens: text read on", ylabel="KL divergence, nats (lower is better)", yscale="log")
            else:
                axes.set(title=setting.name, ylabel="recall, % of the dense run's (higher is better)")
            axes.set(xlabel="tokens kept, % (left is smaller)")
            axes.grid(alpha=0.3)
        figure.legend(drawn.values(), drawn, loc="outside lower center", ncols=6, fontsize=8)
