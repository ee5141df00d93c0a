"""How far long work is, on stderr: a bar on a terminal, elsewhere a line every ten seconds, with the share that is done."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any, TypeVar

T = TypeVar("T")
SECONDS = 10.0
"""The time between two lines."""


@contextmanager
def progress(task: str, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Shows `task` until the context ends. Yields a function that takes the number of steps that are done, and of all steps."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    if not shown:
        yield lambda done, total: None
    elif console.is_terminal:
        with Progress(console=console, transient=True) as bar:
            number = bar.add_task(task, total=None)
            yield lambda done, total: bar.update(number, completed=done, total=total)
    else:
        begin, ended, share = time.monotonic(), threading.Event(), [""]

        def write() -> None:
            while not ended.wait(SECONDS):
                print(f"{task}: {share[0]}{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)

        writer = threading.Thread(target=write, daemon=True)
        writer.start()
        try:
            yield lambda done, total: share.__setitem__(0, f"{done / total:.0%}, ")
        finally:
            ended.set()
            writer.join()


@contextmanager
def reading(model: Any, task: str, passes: int = 1, shown: bool = True) -> Iterator[None]:
    """Shows `task` while `model` reads in `passes` forward passes: the share of its layers that have run."""
    with progress(task, shown) as done, ExitStack() as hooks:
        layers = max((module for module in model.modules() if type(module).__name__ == "ModuleList"), key=len, default=())
        ran = count(1)
        for layer in layers:
            hooks.callback(layer.register_forward_hook(lambda *_: done(next(ran), passes * len(layers))).remove)
        yield


def track(items: Iterable[T], task: str, total: int, shown: bool = True) -> Iterator[T]:
    """The `items`, `total` in number, while `progress` shows how many are done."""
    with progress(task, shown) as done:
        for number, item in enumerate(items):
            done(number, total)
            yield item
