"""For every test: deterministic, offline, and flex attention without inductor, which takes minutes on a CPU.

`QKVCACHE_TEST_ALL=1` runs full products where `matrix.py` has covering sets (`make test-all`). `QKVCACHE_TEST_SEED=1` runs the tests
on other random numbers, `QKVCACHE_TEST_THREADS=2` on more threads. `pytest -m gpu` runs the tests for GPUs, on compiled kernels. Every
other run hides the GPU, so that it is the same on all machines: kernels run in Triton's interpreter, which is chosen once for a process.
Tests of a file with a `DEVICE` run in both.
"""

import contextlib
import gc
import os
import sys

import pytest

# An editable install would find, elsewhere, what this checkout has not (`eval/rooms.py` deletes rooms in a copy).
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in str(finder)]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
THREADS = os.environ.get("QKVCACHE_TEST_THREADS", "1")  # the tensors are tiny
os.environ.setdefault("OMP_NUM_THREADS", THREADS)  # in programs that tests start, too: several of them share the processors
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def prepare() -> None:
    import torch
    from hypothesis import core, settings

    from tests.seeds import SEED

    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton
        with contextlib.suppress(ImportError):
            import tests.interpreter  # noqa: F401
    with contextlib.suppress(ImportError):
        from qkvcache.evict.policies import base

        base.LEAST_OF_SHARE = 8  # prompts of tests are shorter than 64 tokens, which a share always keeps
    import transformers

    torch.compiler.set_stance("force_eager")
    torch.set_num_threads(int(THREADS))
    transformers.logging.set_verbosity_error()
    settings.register_profile("default", deadline=None, derandomize=not SEED, max_examples=50)
    settings.load_profile("default")
    core.global_force_seed = SEED or None  # what --hypothesis-seed sets


@pytest.fixture(autouse=True)
def _seed():
    import torch

    from tests.seeds import SEED

    torch.manual_seed(SEED)


@pytest.fixture(autouse=True, scope="module")
def _settled():
    """Freezes what earlier files left: transformers' continuous batching collects garbage again and again, and would look through it."""
    gc.collect()
    gc.freeze()


def pytest_configure(config):
    if not {"gpu"} & set(config.option.markexpr.replace("not gpu", "").split()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):  # else its workers run the tests
        prepare()
    said = "_compile flag on create_block_mask", "flex_attention called without", "continuous batching on compressed pages has no kernels"
    for message in said:
        config.addinivalue_line("filterwarnings", f"ignore:{message}")


def pytest_ignore_collect(collection_path):
    import torch

    if collection_path.name.endswith(("_gpu.py", "_gpus.py")) and not torch.cuda.is_available():
        return True
    return True if collection_path.suffix == ".py" and needs_deleted_room(collection_path) else None


def needs_deleted_room(path) -> bool:
    """Whether a file of tests imports a room, or its tests, of which the folder was deleted (`eval/rooms.py`)."""
    import rooms

    gone = rooms.gone()
    return bool(gone) and bool(gone & {rooms.room_of(name) for name in rooms.needed(path)})


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items):
    import torch

    visible = torch.cuda.is_available()
    for item in items:
        if visible and getattr(getattr(item.module, "DEVICE", None), "type", None) == "cuda":
            item.add_marker(pytest.mark.gpu)
        elif not visible and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `pytest -m gpu`"))
