"""What the host does for each request in each step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import qkvcache
from qkvcache import continuous_batching

from .requests import ZONES, greedy, pool, prompts, tiniest

OURS = str(Path(qkvcache.__file__).parent / "batching")
A_REQUEST = {
    "can_store_request_tokens", "fill_block_table", "extend_read_and_write_indices", "mark_complete_blocks", "_infer_request_tokens",
    "update_and_check_completion",
}  # fmt: skip
"""What transformers calls for each request, of which each step has five."""


def calls(format: str, users: int, prompt: bool) -> list[str]:
    """The functions of continuous batching that a step calls in which so many requests are decoded, beside a prompt or alone."""
    network, found = tiniest(), list[str]()

    def watch(frame, event, _) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            found.append(frame.f_code.co_name)

    with continuous_batching(network, format, **ZONES), torch.no_grad():
        manager = network.init_continuous_batching(generation_config=greedy(), continuous_batching_config=pool())
        manager.batch_processor = processor = manager._create_batch_processor()

        def step() -> None:
            assert processor.prepare_next_batch()
            processor._generation_step(network)
            processor.update_batch()

        manager.add_requests(prompts(*[9] * users))
        for _ in range(3):
            step()
        if prompt:
            manager.add_requests(prompts(20))
        sys.setprofile(watch)
        try:
            step()
        finally:
            sys.setprofile(None)
        assert processor.inputs_and_outputs.use_block_table is not prompt
        assert processor.inputs_and_outputs.num_request_in_batch == users + prompt
    return found


@pytest.mark.parametrize("prompt", [False, True], ids=["decoding", "beside a prompt"])
@pytest.mark.parametrize("format", ["identity", "turboquant_4bit_nc"])
def test_a_step_plans_all_requests_at_once(format, prompt):
    """Another request costs the five calls that transformers makes for it, and none of ours."""
    few, many = calls(format, 3, prompt), calls(format, 23, prompt)
    assert len(many) == len(few) + 5 * 20
    assert [name for name in many if name not in A_REQUEST] == [name for name in few if name not in A_REQUEST]
