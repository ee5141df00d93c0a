"""The table that an article on KV compression gives for Llama 70B at 128K tokens on eight H100: 640 GB less 140 GB of FP16 weights.

Its numbers come out of `plan` once its slips are known:
- 128K is 128,000 tokens there. At 131,072 a request takes 42.9 GB, and its last row is 77 requests.
- 384 requests of sinks and a window of 4K are 500 / 1.3 rounded; 4 + 4,096 tokens take 1.34 GB, which makes 372.
- Scales, FP16 sinks, the positions and scores of an eviction policy, activations and the runtime's own memory count for nothing.
- 11.7 GB for INT4 come from 0.56 bytes an element, rounded from 0.5625: it is 11.8 GB.
- The code printed beside the table multiplies by 2 twice and would answer 83.9 GB; its H2O class keeps 75 % of its budget, not all of it.
"""

import pytest
import torch

from qkvcache import plan, policies
from qkvcache.planning.model import weights_bytes
from tests.matrix import FORMATS
from tests.planning.llama import LLAMA_70B

TOKENS = 128_000
FREE = 500e9


def planned(context=TOKENS, **options):
    memory = {"gpu_memory": 80e9, "weights_memory": 140e9, "tensor_parallel": 8}
    return plan(LLAMA_70B, context=context, dtype=torch.float16, num_sink_tokens=0, residual_length=0, **memory, **options)


def test_dense():
    found = planned()
    assert found.bytes_per_request == 2 * 80 * 8 * 128 * TOKENS * 2
    assert round(found.bytes_per_request / 1e9, 1) == 41.9
    assert found.requests == 11
    assert planned(131_072).requests == 11 and round(planned(131_072).bytes_per_request / 1e9, 1) == 42.9


def test_weights_of_70b():
    assert weights_bytes(LLAMA_70B, torch.float16) / 1e9 == pytest.approx(141.1, abs=0.1)  # which the article rounds to 140


@pytest.mark.parametrize(
    ("options", "gigabytes", "requests", "honest"),
    [
        ({"format": FORMATS["fp8_tensor"]}, 21.0, 23, 23),
        ({"policy": policies.H2O(budget=0.5)}, 21.0, 23, 23),
        ({"format": FORMATS["fp8_tensor"], "policy": policies.H2O(budget=0.5)}, 10.5, 47, 45),
        ({"format": FORMATS["fp8_tensor"], "policy": policies.H2O(budget=0.3, num_sink_tokens=4)}, 6.3, 79, 76),
    ],
)
def test_codes_alone_take_the_bytes_of_the_article(options, gigabytes, requests, honest):
    found = planned(**options)
    assert round(found.request.codes / 1e9, 1) == gigabytes
    assert int(FREE // found.request.codes) == requests
    assert found.requests == honest


def test_sinks_and_a_window_of_4k():
    found = planned(policy=policies.SinkWindow(window_length=4096, num_sink_tokens=4))
    assert round(found.request.codes / 1e9, 1) in (1.3, 1.4)
    assert int(FREE // (2 * 80 * 8 * 128 * 2 * 4100)) == 372
    assert int(500 / 1.3) == 384
    assert found.requests < 372 and found.unbounded


def test_at_131_072_tokens_the_last_row_is_77():
    codes = planned(131_072, format=FORMATS["fp8_tensor"], policy=policies.H2O(budget=0.3, num_sink_tokens=4)).request.codes
    assert int(FREE // codes) == 77


def test_int8_with_zero_points_and_int4_in_groups():
    assert round(planned(format=FORMATS["int8_asymmetric"]).bytes_per_request / 1e9, 1) == 21.6
    assert round(planned(format=FORMATS["int4_group"]).bytes_per_request / 1e9, 1) == 11.8
