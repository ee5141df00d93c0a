"""Two models that run in two threads of one process."""

import sys
import threading

import pytest
import torch

from qkvcache import CompressedCache, H2OCache
from qkvcache.attention import again, masks, padding
from tests.matrix import model
from tests.reference import ZONES, Mode, steps

SHARED = {module.__file__ for module in (again, masks, padding)}
"""Files with state that outlives a call."""


class Alternation:
    """Two threads, of which one runs at a time. They take turns at each line of the files in `SHARED`."""

    def __init__(self) -> None:
        self.changed, self.turn, self.ended = threading.Condition(), 0, set()

    def wait(self, me: int) -> None:
        assert self.changed.wait_for(lambda: self.turn == me or 1 - me in self.ended, timeout=60)

    def run(self, me: int, function, results: list) -> None:
        def line(frame, event, arg):
            if event == "line":
                with self.changed:
                    self.turn = 1 - me
                    self.changed.notify()
                    self.wait(me)
            return line

        with self.changed:
            self.wait(me)
        sys.settrace(lambda frame, event, arg: line if frame.f_code.co_filename in SHARED else None)
        try:
            results[me] = function()
        finally:
            sys.settrace(None)
            with self.changed:
                self.ended.add(me)
                self.changed.notify()


@pytest.mark.parametrize("kind", ["int8", "h2o"])
def test_padding_stays_with_its_thread(kind):
    def of(name: str, mode: Mode):
        network = model(name)

        def run() -> list[torch.Tensor]:
            if kind == "h2o":
                return list(steps(network, H2OCache(network.config, budget=16), mode))
            return list(steps(network, CompressedCache(network.config, format="int8", **ZONES["zones"]), mode))

        return run

    functions = [of("llama", Mode((0, 5), (30, 3))), of("qwen3", Mode((9, 2), (30, 3)))]
    alone, results, alternation = [run() for run in functions], [[], []], Alternation()
    threads = [threading.Thread(target=alternation.run, args=(me, functions[me], results)) for me in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, expected in zip(results, alone, strict=True):
        assert len(got) == 2 and all(map(torch.equal, got, expected))
