"""`batch_select_indices`: rows are named as DynamicCache lets them be named."""

import pytest
import torch

from qkvcache import CompressedCache
from qkvcache.releases import passing
from tests.evict.matrix import POLICIES
from tests.matrix import covering, model

KINDS = {
    "growing": {},
    "preallocated": {"max_length": 80},
    "evicting": {"policy": POLICIES["h2o"](24)},
    "evicting_preallocated": {"policy": POLICIES["h2o"](24), "max_length": 80},
}
ROWS = {
    "list": ([0, 2], [0, 2]),
    "tuple": ((2, 0), [2, 0]),
    "range": (range(1, 3), [1, 2]),
    "slice": (slice(1, None), [1, 2]),
    "negative": ([-1], [2]),
    "bools": ([True, False, True], [0, 2]),
    "tensor": (torch.tensor([2, 1]), [2, 1]),
}


@torch.no_grad()
@pytest.mark.parametrize(("kind", "rows"), covering(KINDS, ROWS, strength=1))
def test_rows_that_stay_go_on_as_they_were(kind, rows):
    network, ids = model("gemma3"), torch.randint(3, 90, (3, 31))
    cache = CompressedCache(network.config, format="int8", residual_length=8, **KINDS[kind])
    network(ids[:, :30], **passing(cache))
    whole, (chosen, left) = network(ids[:, 30:], **passing(cache)).logits, ROWS[rows]
    cache.reset()
    network(ids[:, :30], **passing(cache))
    cache.batch_select_indices(chosen)
    torch.testing.assert_close(network(ids[left, 30:], **passing(cache)).logits, whole[left], atol=1e-4, rtol=1e-4)
