"""The house: a core that imports no room, and rooms that can be deleted. Numbers that stand for what is not reached yet may only fall."""

import subprocess
import sys
from pathlib import Path

import pytest

rooms = pytest.importorskip("rooms")  # eval/rooms.py

ROOT = Path(__file__).parent.parent
CORE_LINES = 15_267
"""The core has at most so many lines of at most 110 columns; 10,500 is the target. The kernels in Gluon for many query rows and what
reads pages for them take 1,123 of them. The last 321 lines came with the kernel for dequantized chunks, its calls and the shared loop."""
PARAMETERS = 45
"""Of a device function."""
FIELDS = 10
"""Of a record of the core."""
LAZY = {"qkvcache"}
"""Modules of the core that import rooms on first use: the public names."""
NAMED = 60
"""Lines elsewhere that name a room."""
JOINED = {
    "qkvcache.evict.recurrent": {"hybrid", "evict"},
    "qkvcache.demo.show": {"demo", "evict", "evaluation"},
    "qkvcache.evaluation.profile_heads": {"evaluation", "evict"},
    "qkvcache.prefix.bench": {"prefix", "planning"},
}
"""Files that join rooms, which go with each of them."""


def test_the_core_imports_no_room():
    for module, found in rooms.graph(run=False).items():
        if rooms.room_of(module) in rooms.CORE and module not in LAZY:
            assert {rooms.room_of(name) for name in found} <= {*rooms.CORE}, module


def test_a_deleted_room_takes_only_what_joins_it_to_another():
    for room in rooms.ROOMS:
        for module in rooms.broken(room):
            assert room in JOINED.get(module, ()), f"{module} cannot be imported without {room}"


def test_few_lines_elsewhere_name_a_room():
    named = {room: sum(rooms.names_of(room).values()) for room in rooms.ROOMS}
    assert {room: count for room, count in named.items() if count > NAMED} == {}


def test_rooms_are_registered():
    """One line each, which names the folder."""
    text = (rooms.PACKAGE / "rooms.py").read_text()
    for path in rooms.PACKAGE.glob("*/room.py"):
        assert text.count(f'    "{path.parent.name}",\n') == 1


IMPORTS = """
import os, sys
from pathlib import Path
import torch, transformers
from transformers import modeling_utils, masking_utils, DynamicCache
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(finder)]  # which would find what was deleted
os.chdir(sys.argv[1])
sys.path.insert(0, sys.argv[1])
for room in sys.argv[2:]:
    if pid := os.fork():
        if os.waitpid(pid, 0)[1]:
            sys.exit(f"without {room}")
        continue
    sys.path.insert(0, str(Path(sys.argv[1]) / room))
    import qkvcache
    assert qkvcache.__file__.startswith(str(Path(sys.argv[1]) / room)), qkvcache.__file__
    x = torch.randn(1, 2, 200, 64, dtype=torch.float32)
    cache = qkvcache.CompressedCache(format="int8")
    cache.update(x, x, 0)
    assert cache.update(x[:, :, :1], x[:, :, :1], 0)[0].shape[2] == 201
    os._exit(0)
"""


@pytest.mark.slow  # `make test-rooms` runs it
def test_the_package_works_without_each_room(tmp_path):
    """A cache without options stores tokens. `make test-rooms` also imports all that is left."""
    for room in rooms.ROOMS:
        rooms.delete(room, tmp_path / room, ("qkvcache",))
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(tmp_path), *rooms.ROOMS], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]


def test_helpers_of_tests_need_no_room():
    """So that the tests of what is left can be collected: `conftest.py` leaves out files that import what is not there."""
    for path in sorted(Path(__file__).parent.glob("*.py")):
        if not path.name.startswith("test_"):
            assert not {rooms.room_of(name) for name in rooms.imported(path, ["tests"], run=True)} & rooms.ROOMS.keys(), path.name


def test_device_functions_have_few_parameters():
    most = max(rooms.device_functions().items(), key=lambda item: item[1])
    assert most[1] <= PARAMETERS, most


def test_records_have_few_fields():
    most = max(rooms.records().items(), key=lambda item: item[1])
    assert most[1] <= FIELDS, most


def test_the_core_is_small():
    assert rooms.core_lines() <= CORE_LINES, "a new feature is a room; name its lines before it is begun"


def test_a_feature_without_its_room_is_refused(monkeypatch):
    from qkvcache import rooms as registry

    assert all(registry.feature(name) for name in registry.FEATURES)
    monkeypatch.setitem(registry.FEATURES, "saving", "none")
    with pytest.raises(NotImplementedError, match="saving: this installation of qkvcache comes without 'none'"):
        registry.feature("saving")
