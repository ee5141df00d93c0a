"""Rows of one prompt, which attention reads once for all of them, answer as torch computes it for each row."""

import pytest
import torch

from qkvcache import CompressedCache
from qkvcache.kernels.attend import launches as fused
from qkvcache.kernels.attend import plan
from qkvcache.releases import passing
from tests.matrix import model
from tests.reference import assert_close
from tests.tolerance import turned

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, about nan and infinity, in the interpreter


@pytest.fixture
def shared(monkeypatch):
    """The shared tokens of each launch over them, with kernels."""
    monkeypatch.setattr(fused, "LEAST_SPARED", 1)
    monkeypatch.setattr(fused, "LEAST_SPLIT", 512)  # few programs to interpret
    seen, call = [], plan._shared
    monkeypatch.setattr(
        plan, "_shared", lambda query, mask, inputs, *rest: seen.append(inputs.work.shared) or call(query, mask, inputs, *rest)
    )
    return seen


@torch.no_grad()
def answers(options: dict, ids: torch.Tensor, new: torch.Tensor) -> list[torch.Tensor]:
    """Logits of branches of one prompt that diverge, change places as beams do, and are cut."""
    cache = CompressedCache(model("llama", layers=1).config, format="int8", num_sink_tokens=2, residual_length=6, **options)
    found = [model("llama", layers=1)(ids, **passing(cache)).logits[:, -1:]]
    cache.batch_repeat_interleave(2)
    for step, tokens in enumerate(new):
        found.append(model("llama", layers=1)(tokens[:, None], **passing(cache)).logits)
        cache.reorder_cache(torch.tensor([1, 0]))
        if step == 1:
            cache.crop(-60)
    return found


@pytest.mark.parametrize("options", [{}, {"max_length": 180}], ids=["growing", "preallocated"])
def test_rows_that_share_answer_as_rows_that_do_not(options, shared, monkeypatch):
    ids, new = torch.randint(3, 60, (1, 150)), torch.randint(3, 60, (3, 2))
    wanted = answers(options, ids, new)
    assert not shared
    monkeypatch.setenv("QKVCACHE_KERNELS", "triton")
    for one, other in zip(answers(options, ids, new), wanted, strict=True):
        assert_close(one, other, turned("int8"))
    assert shared == [128, 128, 64]  # planned once a step
