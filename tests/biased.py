"""The embedded model as one of the Qwen2 family: the same weights, and biases on keys that make some channels' means 20 to 100 times their
spread, as in pretrained models of that family.

The biases lie on the pairs of channels that RoPE turns slowest, so that they are next to the same for all tokens, and what they add to
scores goes out in the softmax, as far as it goes in models that were trained with them.
"""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from qkvcache import demo

PAIRS = 4
"""Of each head, how many have a bias."""
STRENGTH = 50


@functools.cache
def load(pairs=PAIRS, strength=STRENGTH, quiet=True) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]:
    model, tokenizer = demo.load(torch.float32)
    ids = demo.text_ids(tokenizer)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
             "max_position_embeddings", "rms_norm_eps", "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    twin = Qwen2ForCausalLM(Qwen2Config(**{n: getattr(model.config, n) for n in names})).eval()
    twin.load_state_dict(model.state_dict(), strict=False)
    spreads = []
    hooks = [l.self_attn.k_proj.register_forward_hook(lambda m, a, out: spreads.append(out)) for l in twin.model.layers]
    qs = []
    hooks += [l.self_attn.q_proj.register_forward_hook(lambda m, a, out: qs.append(out)) for l in twin.model.layers]
    for l in twin.model.layers:
        for p in (l.self_attn.q_proj, l.self_attn.k_proj, l.self_attn.v_proj):
            p.bias.data.zero_()
    with torch.no_grad():
        twin(torch.tensor([ids[:512]]))
    for h in hooks: h.remove()
    heads, dim = model.config.num_key_value_heads, model.config.head_dim
    g = torch.Generator().manual_seed(0)
    for l, k, q in zip(twin.model.layers, spreads, qs, strict=True):
        k = k[0].unflatten(-1, (heads, dim)); q = q[0].unflatten(-1, (heads, -1, dim))
        spread = k.std(0)  # H, D
        bias = torch.zeros(heads, dim)
        for h in range(heads):
            for c in range(dim // 2 - pairs, dim // 2):
                for half in (0, dim // 2):
                    sign = 1 if torch.rand((), generator=g) < .5 else -1
                    bias[h, c + half] = sign * strength * (.4 + 1.6*torch.rand((), generator=g)) * spread[h, c + half]
        if not quiet:
            print("spread slow", spread[:, 60:64], "all", spread.norm(dim=-1), "bias norm", bias.norm(dim=-1), "q rms slow", q.square().mean((0,2)).sqrt()[:, 56:64], q.square().mean((0,2)).sqrt().mean())
        l.self_attn.k_proj.bias.data.copy_(bias.flatten())
    return twin, tokenizer, ids
