"""Caches in every mode that a program may have torch in: a step gives what it gives without the mode.

Default dtype, default device, deterministic algorithms and inference mode are all on at once, each of which must change nothing. Under
autocast, which changes the model, the cache is as far from a dense one under autocast as without.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from qkvcache import CompressedCache, TurboQuantCache, policies
from qkvcache.formats.rotation import hadamard_matrix, random_signs
from qkvcache.releases import passing
from tests import matrix
from tests.evict.matrix import EACH_KIND, NAMED, POLICIES, SHARED
from tests.matrix import FORMATS, slowly
from tests.reference import forward, prompt

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BUDGET, SIZES = 20, (36, 1, 1, 20, 1, 20, 1)
ZONE = {"num_sink_tokens": 2, "residual_length": 6}
FEW = slowly(FORMATS, ["identity", "int8_asymmetric", "fp8_token", "int4", "nvfp4_mse", "turboquant_3bit_nc", "hadaquant_k3v2"])
KINDS = slowly(NAMED, EACH_KIND)
CACHES: dict[str, Callable[..., CompressedCache]] = {
    **{name: functools.partial(CompressedCache, format=FORMATS[name], **ZONE) for name in FEW},
    **{name: functools.partial(CompressedCache, format="int8", policy=make(BUDGET)) for name, make in POLICIES.items() if name in KINDS},
    **{
        f"{name}_shared": functools.partial(CompressedCache, format="int8", policy=make(BUDGET))
        for name, make in SHARED.items()
        if f"{name}_shared" in KINDS
    },
    "budget": functools.partial(TurboQuantCache, attention_budget=32, **ZONE),
    "preallocated": functools.partial(TurboQuantCache, max_length=sum(SIZES), **ZONE),
    "preallocated_evicting": functools.partial(CompressedCache, policy=POLICIES["expected_attention"](BUDGET), max_length=sum(SIZES)),
    "rotated_sinks": functools.partial(CompressedCache, policy=policies.SinkWindow(window_length=BUDGET, positions="cache")),
}
ATTENTION = "sdpa", "eager", "qkvcache"

pytestmark = pytest.mark.filterwarnings("ignore:.*attention code calls", "ignore:attention_budget with eager")


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def everything(dtype: torch.dtype, inference: bool = True) -> Iterator[None]:
    """All modes that must change nothing. A tensor made without a device would be on the meta device, which has no numbers."""
    torch.use_deterministic_algorithms(True)
    try:
        with default_dtype(dtype), torch.device("meta"), torch.inference_mode() if inference else torch.no_grad():
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@functools.cache
def network(name: str = "llama", attention: str = "sdpa") -> PreTrainedModel:
    return copy.deepcopy(matrix.model(name, attention, layers=1 if name == "llama" else 2)).to(DEVICE)


def logits(network: PreTrainedModel, cache: Cache, mode: Callable[[int], contextlib.AbstractContextManager]) -> Tensor:
    """Logits of the real tokens of two rows, one of them padded; the forward `i` runs under `mode(i)`."""
    (ids, mask), found, end = (x.to(DEVICE) for x in prompt(2, sum(SIZES)).values()), [], 0
    for i, size in enumerate(SIZES):
        end += size
        with mode(i):
            found.append(forward(network, cache, ids, mask, end - size, end).clone())
    return torch.cat(found)


def divergence(got: Tensor, expected: Tensor) -> float:
    """The mean KL divergence, in nats."""
    p, q = (x.double().log_softmax(-1) for x in (expected, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.fixture(autouse=True)
def _cublas(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which deterministic algorithms ask for


@pytest.mark.parametrize("name", CACHES)
def test_modes_change_no_number(name):
    llama = network()
    expected = logits(llama, CACHES[name](llama.config), lambda i: contextlib.nullcontext())
    mode = lambda i: everything((torch.float64, torch.bfloat16)[i % 2], inference=i % 3 == 0)  # noqa: E731
    assert torch.equal(logits(llama, CACHES[name](llama.config), mode), expected)


def autocast(dtype: torch.dtype = torch.bfloat16) -> Callable[[int], contextlib.AbstractContextManager]:
    return lambda i: torch.autocast(DEVICE.type, dtype)


@functools.cache
def dense(attention: str, model: str = "llama") -> tuple[Tensor, Tensor]:
    """Logits with a DynamicCache: with autocast and without."""
    llama = network(model, attention)
    plain, cast = (logits(llama, DynamicCache(config=llama.config), mode) for mode in (lambda i: contextlib.nullcontext(), autocast()))
    return cast, plain


def check_autocast(make: Callable[..., Cache], attention: str, model: str = "llama") -> None:
    llama, (cast, plain) = network(model, attention), dense(attention, model)
    got = logits(llama, make(llama.config), autocast())
    without = divergence(logits(llama, make(llama.config), lambda i: contextlib.nullcontext()), plain)
    assert got.dtype == cast.dtype
    assert divergence(got, cast) <= 1.2 * without + 4 * divergence(cast, plain)


@pytest.mark.parametrize("name", CACHES)
def test_autocast_costs_caches_no_more_than_models(name):
    check_autocast(CACHES[name], ATTENTION[list(CACHES).index(name) % 3])


@pytest.mark.parametrize(("model", "attention"), [("deepseek_v3", "eager"), ("gpt_oss", "qkvcache"), ("jetmoe", "sdpa"), ("gptj", "eager")])
def test_autocast_with_other_attention(model, attention):
    check_autocast(functools.partial(CompressedCache, format="identity"), attention, model)


def test_autocast_stores_what_attention_reads():
    """Keys, which RoPE makes fp32, are cast as autocast casts them for attention."""
    llama, cache = network(), TurboQuantCache(network().config)
    logits(llama, cache, autocast())
    exact = [x.dtype for role, x in cache.layers[0].tensors() if role == "exact"]
    assert {*exact} == {torch.bfloat16}
    with torch.autocast(DEVICE.type, torch.bfloat16):
        first, second = cache.layers[0].dense(), copy.deepcopy(cache).layers[0].dense()
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(torch.equal(*pair) for pair in zip(first, cache.layers[0].dense(), strict=True))


def test_a_context_is_read_twice_in_every_mode():
    llama, ids = network(), prompt(2, 60)["input_ids"].to(DEVICE)
    make = functools.partial(CompressedCache, llama.config, format="int8", policy=policies.KVzip(budget=BUDGET, recent=4))

    def after(mode: contextlib.AbstractContextManager) -> tuple[Tensor, Tensor]:
        cache = make()
        with mode, torch.no_grad():
            cache.compress(llama, ids[:, :40], progress=False)
            return llama(ids[:, 40:], **passing(cache)).logits.clone(), cache.layers[0].positions()

    expected, kept = after(contextlib.nullcontext())
    for dtype in (torch.bfloat16, torch.float64):
        got = after(default_dtype(dtype))
        assert torch.equal(got[0], expected) and torch.equal(got[1], kept)
    assert divergence(after(autocast()(0))[0], expected) < 0.05


def test_generate_answers_alike_in_every_mode():
    llama, inputs = network(), {name: x.to(DEVICE) for name, x in prompt(2, 40).items()}

    def answer(mode: contextlib.AbstractContextManager) -> Tensor:
        with mode:
            cache = TurboQuantCache(llama.config, **ZONE)
            return llama.generate(**inputs, **passing(cache), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)

    assert torch.equal(answer(default_dtype(torch.float64)), answer(contextlib.nullcontext()))


def test_random_signs_are_the_same_in_every_mode():
    """The pinned numbers keep the meaning of codes that are on disk already."""
    cpu = torch.device("cpu")
    signs = random_signs.__wrapped__(16, cpu)
    assert signs.tolist() == [1, -1, 1, 1, -1, -1, -1, -1, 1, -1, -1, 1, 1, -1, 1, -1]
    for dtype in (torch.bfloat16, torch.float64):
        with everything(dtype), torch.autocast("cpu"):
            for size in (16, 128):
                assert torch.equal(random_signs.__wrapped__(size, cpu), random_signs(size, cpu))
                assert torch.equal(hadamard_matrix.__wrapped__(size, cpu), hadamard_matrix(size, cpu))
