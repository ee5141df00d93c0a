"""Processes in tests, forked by one that has imported torch and transformers and does nothing else: no threads, no GPU, no qkvcache."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "transformers.models.llama.modeling_llama", "transformers.generation.utils"])


def _main(path: str, arguments: list[str], environment: dict[str, str], printed: Connection) -> None:
    for descriptor in (1, 2):
        os.dup2(printed.fileno(), descriptor)
    printed.close()
    os.environ.update(environment)
    sys.argv = [path, *arguments]
    if path.endswith(".py"):
        sys.path.insert(0, str(Path(path).parent))
    try:
        (runpy.run_path if path.endswith(".py") else runpy.run_module)(path, run_name="__main__")
    except BaseException as error:  # as Python ends a program
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        raise


class Program:
    """A file or a module that runs as a program, which starts no others. `lines`: what it prints, while it runs."""

    def __init__(self, path: Path | str, arguments: Sequence = (), **environment: str):
        receive, send = SERVER.Pipe(duplex=False)
        environment["PYTHONUNBUFFERED"] = "1"
        self.process = SERVER.Process(target=_main, args=(str(path), [*map(str, arguments)], environment, send), daemon=True)
        self.process.start()
        send.close()
        self.lines = os.fdopen(os.dup(receive.fileno()))

    def result(self) -> str:
        """All else that it prints, once it has ended; the test fails with it if the program does."""
        with self.lines:
            printed = self.lines.read()
        self.process.join()
        assert self.process.exitcode == 0, printed
        return printed


def ranks(script: Path, arguments: Sequence, world: int) -> list[Program]:
    """`world` programs of `script`, which find each other as those of torchrun do, on a CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    return [Program(script, arguments, **common, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(world)]
