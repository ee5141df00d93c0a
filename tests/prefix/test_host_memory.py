"""Snapshots in one block of host memory, whose pages CUDA locks and unlocks."""

import pytest
import torch
from transformers import DynamicCache

from qkvcache.layers.snapshot import Snapshot
from qkvcache.prefix import disk, match
from qkvcache.prefix.entry import CacheTemplate, Entry
from qkvcache.prefix.host_memory import HostSnapshot, locked_for
from tests.prefix.made import model


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


def test_layers_of_a_file_are_locked_a_few_at_a_time_and_only_for_a_gpu(tmp_path, monkeypatch):
    """The bound counts layers that wait to be used; one more is in use."""
    cudart, most = Cudart(), 0
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(disk, "READERS", 2)
    layers = [Snapshot("dense", {name: torch.randn(1, 2, 9, 8) for name in ("keys", "values")}) for _ in range(8)]
    key = match.encode(bytes(match.NAME), torch.arange(9))
    file = disk.write(tmp_path, Entry(key, CacheTemplate(DynamicCache(config=model().config), model().config), layers, ()), "llama")
    assert locked_for([torch.device("cpu")]) is None
    for layer, expected in zip(disk.read(file, 5, locked_for([torch.device("cpu"), torch.device("cuda")])), layers, strict=True):
        most = max(most, len(cudart.locked))
        assert all(torch.equal(layer.tensors[name], x[:, :, :5]) for name, x in expected.tensors.items())
    del layer
    assert 1 <= most <= 3 and not cudart.locked
