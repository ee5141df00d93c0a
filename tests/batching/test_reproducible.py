"""With `reproducible=True` a prompt has one answer, and a page one content, to the bit: however steps, pages and other requests lie."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from qkvcache import PrefixStore, continuous_batching
from tests.matrix import MODELS, model, slowly
from tests.seeds import SEED

from .requests import collect, prompts, serving


class Seen:
    """The pages by their links, and the answers by their prompts, that runs have found; asserts that they are the same each time."""

    def __init__(self, network, format, statistics=None):
        self.network, self.format, self.statistics = network, format, statistics
        self.pages: dict[bytes, bytes] = {}
        self.answers: dict[tuple, list[int]] = {}
        self.compared = 0

    def run(self, asked, one_by_one=False, store=None, **options) -> list[list[int]]:
        given = {"format": self.format, "statistics": self.statistics, "store": store, "reproducible": True}
        with continuous_batching(self.network, **given) as batching, serving(self.network, new=12, **options) as manager:
            self.statistics = batching.statistics
            found = {}
            for group in [[ids] for ids in asked] if one_by_one else [asked]:
                names = manager.add_requests(group)
                outputs = collect(manager, names)
                found |= {tuple(ids): outputs[name].generated_tokens for name, ids in zip(names, group, strict=True)}
            (held,) = manager.cache.allocators
            layout = held.group.layout  # the exact tokens behind the codes are those of the first page of a prompt alone
            blocks = held._copy_view.view(-1, len(held.layer_indices), layout.nbytes)[..., : layout.page.nbytes]
            now = {link: blocks[block].cpu().numpy().tobytes() for link, block in held.ledger.hash_to_block.items()}
            self.preemptions = batching.metrics().preemptions
        for known, new in ((self.pages, now), (self.answers, found)):
            both = known.keys() & new.keys()
            self.compared += len(both)
            assert {key for key in both if known[key] != new[key]} == set()
            known.update(new)
        return [found[tuple(ids)] for ids in asked]


CASES = [("int8", torch.float32), ("turboquant_4bit_nc", torch.bfloat16)]


@pytest.mark.parametrize(("format", "dtype"), slowly(CASES, CASES[1:]))
def test_a_prompt_has_one_answer(tmp_path, format, dtype):
    one_answer(copy.deepcopy(model("llama", layers=2)).to(dtype), format, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", ["int8", "turboquant_4bit_nc"])
def test_a_prompt_has_one_answer_on_a_gpu(tmp_path, format, dtype):
    one_answer(copy.deepcopy(model("llama")).to("cuda", dtype), format, tmp_path)


def one_answer(network, format, folder) -> None:
    (begin,) = prompts(130)
    asked = [begin + ids for ids in prompts(1, 40, seed=1)] + prompts(64, 1, 58, 60)
    seen = Seen(network, format)
    answers = seen.run(asked, one_by_one=True, allow_block_sharing=False)  # the statistics are those of the first prompt
    turns = [ids + answer + [7, 8, 9] for ids, answer in zip(asked, answers, strict=True)]
    seen.run(asked + turns, one_by_one=True)  # warm
    seen.run(asked + turns, max_batch_tokens=50, allow_block_sharing=False)  # beside others, in chunks
    seen.run(asked[4:] + prompts(60, 60), blocks=5, safety_margin=0.0)
    assert seen.preemptions
    for _ in range(2):
        seen.run(turns, store=PrefixStore(network, max_bytes=2**24, directory=folder))
    assert seen.compared > 40


class Waiting:
    """A scheduler with three waiting requests."""

    def _get_waiting_candidates(self):
        return [SimpleNamespace(request_id=name) for name in "abc"]


@pytest.mark.parametrize(("read", "active", "candidates"), [(False, 1, 1), (False, 2, 0), (False, 3, 0), (True, 2, 3)])
def test_a_request_begins_only_with_a_ring(read, active, candidates):
    """An active request keeps its ring while transformers passes it over, for want of blocks, and takes waiting ones. Where rings are read,
    a request without one reads its pages."""
    from qkvcache.batching.transformers.scheduler import FairScheduling

    scheduler = type("Scheduler", (FairScheduling, Waiting), {})()
    scheduler.cache = SimpleNamespace(store=SimpleNamespace(rings=SimpleNamespace(read=read, count=2)), sessions=None)
    scheduler.active_requests = {str(i): SimpleNamespace() for i in range(active)}
    assert len(scheduler._get_waiting_candidates()) == candidates


def test_what_cannot_be_reproducible_is_refused():
    network = model("llama")
    with pytest.raises(NotImplementedError, match="attention budget"):
        continuous_batching(network, reproducible=True, attention_budget=64)
    torch.manual_seed(SEED)
    experts = MixtralConfig(**MODELS["llama"]().to_dict() | {"num_local_experts": 2, "architectures": None})
    with pytest.raises(NotImplementedError, match="as experts do"):
        continuous_batching(AutoModelForCausalLM.from_config(experts), reproducible=True)
    for one, options, says in (
        (model("mistral"), {}, "sliding window"),
        (network, {"default_compile_level": 1}, "compiled layers"),
        (network, {"cpu_offload_space": 0.1}, "exact tokens of its page"),
    ):
        with continuous_batching(one, "int8", reproducible=True), pytest.raises(NotImplementedError, match=says), serving(one, **options):
            pass
        assert one.config._attn_implementation == "sdpa"
