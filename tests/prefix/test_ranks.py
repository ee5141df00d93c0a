"""Tensor parallelism: two gloo processes, each with one of two KV heads and a store of its own in one directory."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import model


@pytest.mark.slow
def test_ranks_go_on_from_the_same_token(tmp_path):
    model("llama").save_pretrained(tmp_path / "model")
    folder = tmp_path / "entries"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""}
    common |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))}
    command = [sys.executable, str(Path(__file__).with_name("tensor_parallel.py")), str(tmp_path / "model"), str(folder)]
    jobs = [
        subprocess.Popen(
            command,
            env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for job in jobs:
        try:
            printed, _ = job.communicate(timeout=120)
        finally:
            job.kill()
        assert job.returncode == 0, printed
    first, second = (json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first[:2] == second[:2]
    # nothing, the first prompt, all but one after a restart, nothing once one rank has lost its file, and the shorter of two entries
    assert first[0] == [0, 40, 59, 0, 30]
    assert second[2] == 1
