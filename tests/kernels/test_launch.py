"""Launches by `Launcher`: it calls the kernel that Triton would choose, with a driver that launches nothing."""

from __future__ import annotations

import weakref
from contextlib import contextmanager, nullcontext
from threading import Event, Timer, current_thread
from time import sleep
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import cache as triton_cache  # noqa: E402
from triton.runtime import driver, jit  # noqa: E402

from qkvcache.kernels.host import dispatch  # noqa: E402
from qkvcache.kernels.host import launch as module  # noqa: E402
from qkvcache.kernels.host.launch import Held, Launcher  # noqa: E402

DEVICE, GRID = torch.device("cuda", 0), (3, 2, 1)
BYTES = torch.zeros(64, dtype=torch.uint8)
OFFSET = -BYTES.data_ptr() % 16


def at(shift: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    """A tensor whose address is `shift` bytes beyond a multiple of 16."""
    return BYTES[OFFSET + shift :][:16].view(dtype)


def _kernel(x, pair, n, held, many, plain, scale, FLAG: triton.language.constexpr):
    """Of no use: nothing is compiled."""


class Gpu:
    """A driver without a GPU, and what ran: compiled kernels with their grids, streams and arguments; and launches by Triton."""

    def __init__(self) -> None:
        self.device, self.ran, self.by_triton = 0, [], 0

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 10 + device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def compile(self, function, key, signature, device, *others) -> SimpleNamespace:
        """What Triton calls with a new key."""

        def run(x, y, z, stream, function, packed_metadata, metadata, enter, leave, *args):
            assert (function, packed_metadata) == ("function", "metadata")
            self.ran.append((kernel, (x, y, z), stream, addresses(args)))

        kernel = SimpleNamespace(run=run, function="function", packed_metadata="metadata", launch_metadata=lambda *args: None)
        function.device_caches[device][0][key] = kernel
        return kernel

    def key(self, *args):
        self.by_triton += 1
        return KEY(*args)


KEY = jit.compute_cache_key


def addresses(x):
    if isinstance(x, torch.Tensor):
        return x.data_ptr()
    return tuple(map(addresses, x)) if isinstance(x, tuple) else x


@pytest.fixture
def gpu(monkeypatch) -> Gpu:
    return patched(monkeypatch)


def patched(patch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    patch.setattr(driver, "_active", gpu)
    patch.setattr(jit.JITFunction, "_do_compile", lambda *args: gpu.compile(*args))
    patch.setattr(jit, "compute_cache_key", gpu.key)
    return gpu


NAMES = "pair", "n", "plain", "held", "many", "unused"


def launcher() -> Launcher:
    kernel = jit.JITFunction(_kernel, do_not_specialize=["plain"])
    return Launcher(kernel, DEVICE, ("x",), NAMES, FLAG=True, scale=0.5, num_warps=2, other=3)


def held(shift: int = 0, *many: int, pair: tuple = (), n: int = 7, plain: int = 9) -> tuple[Held, Held]:
    return Held(pair=pair or (at(0), 5), n=n, plain=plain), Held(held=at(shift), many=many or (1, 32), unused=at(2))


def test_later_launches_call_the_compiled_kernel(gpu):
    launch, arguments = launcher(), held()
    for _ in range(3):
        launch(GRID, at(0), held=arguments)
    assert gpu.by_triton == 1 and gpu.ran[0] == gpu.ran[1] == gpu.ran[2]
    _, grid, stream, values = gpu.ran[0]
    zero = BYTES.data_ptr() + OFFSET
    assert (grid, stream) == (GRID, 10) and values == (zero, (zero, 5), 7, zero, (1, 32), 9, 0.5, True)


INTEGERS = st.sampled_from([0, 1, 2, 15, 16, 48, -1, -16, 2**31 - 16, 2**31 - 1, 2**31, 2**32, 2**63 - 16, -(2**31), True, False, None])
TENSORS = st.builds(at, st.sampled_from([0, 2, 16, 24]), st.sampled_from([torch.float16, torch.int16, torch.bfloat16]))
CALLS = st.tuples(st.tuples(TENSORS, INTEGERS), INTEGERS, TENSORS, INTEGERS, st.sampled_from([0, 8]), INTEGERS)


@given(st.lists(CALLS, min_size=2, max_size=12))
@settings(max_examples=100)
def test_the_kernel_is_that_which_triton_chooses(calls):
    """Whatever came before: pointers, integers and flags of every kind, in tuples and alone, held and not."""
    with pytest.MonkeyPatch.context() as patch:
        gpu, launch = patched(patch), launcher()
        for pair, n, x, plain, shift, many in calls:
            arguments = held(shift, many, 16, pair=pair, n=n, plain=plain)
            launch(GRID, x, held=arguments)
            named = arguments[0].values | {name: arguments[1].values[name] for name in ("held", "many")}
            launch.kernel[GRID](x=x, **named, FLAG=True, scale=0.5, num_warps=2)
            ours, triton_s = gpu.ran[-2:]
            assert ours == triton_s


@pytest.mark.parametrize("hooks", ["launch_enter_hook", "launch_exit_hook", "pre_run_hooks"])
def test_a_launch_that_is_watched_is_triton_s(gpu, monkeypatch, hooks):
    launch = launcher()
    for _ in range(2):
        launch(GRID, at(0), held=held())
    if hooks == "pre_run_hooks":
        launch.kernel.pre_run_hooks.append(lambda *args, **kwargs: None)
    else:
        monkeypatch.setattr(triton.knobs.runtime, hooks, lambda metadata: None)
    launch(GRID, at(0), held=held())
    assert gpu.by_triton == 2 and len(gpu.ran) == 3


def test_of_several_arguments_with_a_name_the_first_counts(gpu):
    launch = launcher()
    for values in (held(), held(n=8)):
        launch(GRID, at(0), held=values)
    other = Launcher(launch.kernel, DEVICE, ("x",), ("n", *NAMES), FLAG=True, scale=0.5, num_warps=2)
    other(GRID, at(0), held=(Held(n=8), *held()))
    assert gpu.ran[2][3] == gpu.ran[1][3] != gpu.ran[0][3]


def test_kernels_run_on_the_device_of_their_tensors(gpu, monkeypatch):
    """On its current stream, whichever device and stream are current at the first launch."""

    @contextmanager
    def device(index):
        before, gpu.device = gpu.device, index
        yield
        gpu.device = before

    monkeypatch.setattr(torch.cuda, "device", device)
    launch = launcher()
    for current in (1, 0, 2):
        gpu.device = current
        launch(GRID, at(0), held=held())
        assert gpu.device == current
    assert [stream for _, _, stream, _ in gpu.ran] == [10] * 3 and gpu.by_triton == 1


def test_other_releases_and_gpus_are_left_to_triton(gpu, monkeypatch):
    assert launcher().direct
    with monkeypatch.context() as patch:
        patch.setattr(gpu, "get_current_target", lambda: GPUTarget("hip", "gfx942", 64))
        assert not launcher().direct
    monkeypatch.setattr(module, "_KNOWN", ("no_such_name",))
    assert not launcher().direct


def test_kernels_compile_ahead_in_other_threads(gpu, monkeypatch):
    """Nothing runs, and no tensor is kept alive; the first launch waits for its kernel, and finds it."""
    threads, begin, compile_ = [], Event(), gpu.compile
    query = torch.empty(64, dtype=torch.float16)
    given = query if query.data_ptr() % 16 == 0 else query[8 - query.data_ptr() // 2 % 8 :]
    prompt = weakref.ref(query.untyped_storage())

    def slowly(*args):
        threads.append(current_thread())
        begin.wait()
        return compile_(*args)

    monkeypatch.setattr(gpu, "compile", slowly)
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    launch = launcher()
    with module.compiling_ahead():
        for _ in range(2):
            launch(GRID, given, held=held(pair=(given, 5)))
    del query, given
    kept = prompt()
    Timer(0.05, begin.set).start()
    launch(GRID, at(0), held=held())
    assert len(threads) == 1 and threads[0] is not current_thread() and len(gpu.ran) == 1 and kept is None
    with module.compiling_ahead():
        launch(GRID, at(0), held=held())
    assert len(gpu.ran) == 1


def test_what_a_first_prompt_needs_is_loaded_ahead(monkeypatch):
    """In threads for which the first use of a kernel waits, once in a process."""
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    monkeypatch.setattr(dispatch, "_INTERPRETED", True)
    monkeypatch.setattr(dispatch, "_LOADING", [])
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    dispatch.load_ahead()
    assert not dispatch._LOADING  # no GPU is in use
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    hashed = []
    monkeypatch.setattr(triton_cache, "triton_key", lambda: sleep(0.02) or hashed.append(1))
    for _ in range(2):
        dispatch.load_ahead()
    dispatch.module.cache_clear()
    assert dispatch.module("attend.plan").Plan and len(dispatch._LOADING) == 2 and hashed == [1]
