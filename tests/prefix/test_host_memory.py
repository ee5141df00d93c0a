"""Snapshots in one block of host memory, whose pages CUDA locks and unlocks."""

import pytest
import torch

from qkvcache.layers.snapshot import Snapshot
from qkvcache.prefix.host_memory import HostSnapshot


class Cudart:
    def __init__(self):
        self.locked: dict[int, int] = {}

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> None:  # noqa: N802
        del self.locked[address]


def given() -> Snapshot:
    wide = torch.randn(1, 2, 9, 8, dtype=torch.bfloat16)
    tensors = {"keys": wide[:, :, :5], "values": wide.float()[:, :, 4:].transpose(2, 3), "step": torch.tensor(7), "none": wide[:, :, :0]}
    return Snapshot("dense", tensors, {"seen": 5})


@pytest.mark.parametrize("lock", [False, True])
def test_a_block_holds_every_tensor(lock, monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    stored = given()
    found = HostSnapshot.of(stored, lock)
    found.wait()
    for name, x in stored.tensors.items():
        assert torch.equal(found.tensors[name], x) and found.tensors[name].is_contiguous()
        assert found.tensors[name].dtype is x.dtype and found.tensors[name].data_ptr() % x.itemsize == 0
    assert found.kind == "dense" and found.numbers == {"seen": 5}
    assert found.nbytes >= sum(x.nbytes for x in stored.tensors.values()) and len(cudart.locked) == lock


def test_pages_are_locked_while_a_view_of_them_is_alive(monkeypatch):
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    found = HostSnapshot.of(given(), lock=True)
    keys = found.tensors["keys"][:, :, :2]
    expected = keys.clone()
    del found
    assert len(cudart.locked) == 1 and torch.equal(keys, expected)
    del keys
    assert not cudart.locked
