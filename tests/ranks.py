"""Tensor parallelism in tests: gloo processes that run a script together."""

import os
import socket
import subprocess
import sys
from pathlib import Path


def start(script: Path, arguments: list, world: int) -> list[subprocess.Popen]:
    """`world` processes of `script`, which find each other as those of torchrun do."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    common |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))}
    return [
        subprocess.Popen(
            [sys.executable, str(script), *map(str, arguments)],
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]


def finish(jobs: list[subprocess.Popen]) -> list[str]:
    """Waits for all of them, and returns what each printed; a process that fails fails the test with it."""
    found = []
    try:
        for job in jobs:
            printed, _ = job.communicate(timeout=180)
            assert job.returncode == 0, printed
            found.append(printed)
        return found
    finally:
        for job in jobs:
            job.kill()
