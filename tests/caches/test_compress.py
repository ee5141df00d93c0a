"""A context that is read twice (KVzip): its scores against plain loops over dense attention, padding, budgets, formats."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache

from qkvcache import CompressedCache, policies
from tests.matrix import model
from tests.seeds import SEED

LENGTH, BUDGET = 37, 16


class Words:
    """A tokenizer whose instructions are three tokens, or four for later chunks."""

    def __call__(self, text, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [90, 91, 92, 93][: 4 if "part" in text else 3]}


def kvzip(**options):
    return policies.KVzip(**{"budget": BUDGET, "recent": 3, "chunk_size": 12, "interval": 1, "alpha_safeguard": None} | options)


def text(rows: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, 90, (rows, length), generator=torch.Generator().manual_seed(SEED))


def compressed(network, ids, policy=None, tokenizer=None, mask=None, **options) -> CompressedCache:
    cache = CompressedCache(network.config, policy=policy or kvzip(), **options)
    cache.compress(network, ids, tokenizer=tokenizer, attention_mask=mask, progress=False)
    return cache


@torch.no_grad()
def oracle(network, ids, policy, tokenizer) -> list[torch.Tensor]:
    """Scores `[H, T]` of each layer, of one prompt: queries and keys of a dense run, one query at a time."""
    length, sinks, found = ids.shape[1], policy.num_sink_tokens, {}

    def record(module, args, kwargs):
        found[module.layer_idx] = [kwargs["hidden_states"], kwargs["position_embeddings"]]

    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    scores = [torch.zeros(2, length) for _ in range(3)]
    for begin in range(sinks, length, policy.chunk_size):
        chunk = list(range(begin, min(begin + policy.chunk_size, length)))
        asked = [] if tokenizer is None else tokenizer("part" if begin > sinks else "", add_special_tokens=False)["input_ids"]
        hint = ids[0, begin - min(8, begin - sinks) : begin].tolist() if asked else []
        reading = torch.tensor([asked + hint + ids[0, chunk].tolist()])
        hooks = [layer.self_attn.register_forward_pre_hook(record, with_kwargs=True) for layer in network.model.layers]
        cache = DynamicCache(config=network.config)
        network(torch.cat([ids, reading], dim=1), past_key_values=cache)
        for hook in hooks:
            hook.remove()
        for number, layer in enumerate(network.model.layers):
            states, rotation = found[number]
            attention = layer.self_attn
            query = attention.q_proj(states).view(1, states.shape[1], 4, 32).transpose(1, 2)
            query, _ = apply_rotary_pos_emb(query, query, *rotation)
            keys, values = cache.layers[number].keys[0], cache.layers[number].values[0]
            for head in range(4):
                rows = attention.o_proj.weight.T[head * 32 : (head + 1) * 32]
                for place in range(length, length + reading.shape[1]):
                    columns = [*range(sinks), *chunk, *range(length, place + 1)]
                    weights = (query[0, head, place] @ keys[head // 2, columns].T / 32**0.5).softmax(-1)
                    for column, weight in zip(columns, weights.tolist(), strict=True):
                        if policy.normalized and column in chunk:
                            weight *= float((values[head // 2, column] @ rows).norm() / states[0, place].norm())
                        if column in chunk:
                            scores[number][head // 2, column] = max(float(scores[number][head // 2, column]), weight)
    return scores


@pytest.mark.parametrize(("normalized", "tokenizer"), [(False, Words()), (True, Words()), (False, None)])
def test_those_with_the_largest_attention_are_kept(normalized, tokenizer):
    network, policy = model("llama"), kvzip(normalized=normalized)
    ids = text(1)
    cache = compressed(network, ids, policy, tokenizer)
    for number, scores in enumerate(oracle(network, ids, policy, tokenizer)):
        for head in range(2):
            free = sorted(range(4, LENGTH - 3), key=lambda p: (float(scores[head, p]), p))  # noqa: B023
            expected = sorted([*range(4), *free[-(BUDGET - 7) :], *range(LENGTH - 3, LENGTH)])
            assert cache.kept_positions(number)[0, head].tolist() == expected


@pytest.mark.parametrize("format", [None, "int8"])
def test_a_padded_row_equals_its_prompt_alone(format):
    """Rows of 37, 24 and 10 tokens: in three chunks, in two, and within the budget."""
    network, pads = model("llama"), (0, 13, 27)
    ids = text(3)
    mask = torch.arange(LENGTH) >= torch.tensor(pads)[:, None]
    together = compressed(network, ids, tokenizer=Words(), mask=mask.long(), format=format, residual_length=3)
    for row, pad in enumerate(pads):
        alone = compressed(network, ids[row : row + 1, pad:], tokenizer=Words(), format=format, residual_length=3)
        for layer in range(3):
            kept = together.kept_positions(layer)[row]
            assert kept[kept >= 0].view(2, -1).tolist() == alone.kept_positions(layer)[0].tolist()


@pytest.mark.parametrize("options", [{}, {"format": "int8"}, {"format": "int8", "max_length": 64}, {"skip_layers": (1,)}])
def test_generate_goes_on_within_the_budget(options):
    network, ids = model("llama"), text(2, 50)
    cache = compressed(network, ids[:, :LENGTH], **options)
    evicting = [i for i in range(3) if i not in options.get("skip_layers", ())]
    assert [cache.stored_length(i) for i in evicting] == [BUDGET] * len(evicting) and cache.get_seq_length() == LENGTH
    network.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False, eos_token_id=None, disable_compile=True)
    assert [cache.stored_length(i) for i in evicting] == [BUDGET] * len(evicting) and cache.get_seq_length() == 54
    assert cache.kept_positions(0)[0, 0, -12:].tolist() == list(range(42, 54))  # what came later stays before the context


def test_below_the_budget_nothing_changes():
    network, ids = model("llama"), text(2, 50)
    cache, dense = compressed(network, ids[:, :LENGTH], kvzip(budget=60)), DynamicCache(config=network.config)
    with torch.no_grad():
        network(ids[:, :LENGTH], past_key_values=dense)
        ours, theirs = (network(ids[:, LENGTH:], past_key_values=x).logits for x in (cache, dense))
    assert torch.equal(ours, theirs)


def test_layers_with_a_window_are_left_as_the_context_left_them():
    network, ids = model("gemma3"), text(2, 50)
    cache, dense = compressed(network, ids[:, :LENGTH], kvzip(budget=60)), DynamicCache(config=network.config)
    with torch.no_grad():
        network(ids[:, :LENGTH], past_key_values=dense)
        ours, theirs = (network(ids[:, LENGTH:], past_key_values=x).logits for x in (cache, dense))
    assert torch.equal(ours, theirs)


def test_what_is_refused():
    network, ids = model("llama"), text(1)
    cache = CompressedCache(network.config, policy=kvzip())
    with pytest.raises(ValueError, match=r"call cache.compress\(model, ids\)"), torch.no_grad():
        network(ids, past_key_values=cache)
    with pytest.raises(ValueError, match=r"ids \[37\]"):
        cache.compress(network, ids[0])
    cache.compress(network, ids, progress=False)
    with pytest.raises(ValueError, match="compress after 37 tokens"):
        cache.compress(network, ids)
    cache.reset()
    cache.compress(network, ids, progress=False)
    with pytest.raises(ValueError, match="only KVzip reads a context twice"):
        CompressedCache(network.config, policy="h2o").compress(network, ids)
    with pytest.raises(ValueError, match="needs the config"):
        CompressedCache(policy=kvzip())
    with pytest.raises(ValueError, match="normalized=True"):
        kvzip(normalized=True, value_norm=True)


class Attentions(TorchDispatchMode):
    """The keys and the mask of each call of torch's attention."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attention" in func.overloadpacket.__name__:
            mask = args[3] if isinstance((*args[3:4], None)[0], torch.Tensor) else (kwargs or {}).get("attn_mask")
            self.calls.append((args[1].shape, None if mask is None else mask.shape))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("pads", "past"), [((0, 0), [(28, False)]), ((0, 9), [(9, True), (19, False)])])
def test_readings_attend_without_a_mask_of_queries_by_context(pads, past):
    """The llama has two KV heads for four query heads. Each of two readings attends to the context, which has a mask only where it has
    padding, and to its own tokens, in three layers."""
    network, ids = model("llama"), text(2, 28)
    mask = torch.arange(28) >= torch.tensor(pads)[:, None]
    with Attentions() as seen:
        compressed(network, ids, mask=mask.long())
    readings = [(shape[1], shape[2], hidden is not None) for shape, hidden in seen.calls[3:]]
    assert readings == [*((2, *part) for part in past), (2, 12, True)] * 6


def test_eager_attention_scores_alike():
    network, ids = model("llama"), text(2)
    fast, slow = compressed(network, ids), compressed(model("llama", "eager"), ids)
    assert [fast.kept_positions(i).tolist() for i in range(3)] == [slow.kept_positions(i).tolist() for i in range(3)]
