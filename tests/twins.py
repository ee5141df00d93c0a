"""A twin of the embedded model: its outputs, with keys distributed as in the Qwen2 family.

The weights are the same, and biases on keys make the means of some channels 20 to 100 times their spread, as pretrained models of that
family have them. The biases are on the pairs of channels that RoPE rotates slowest, as slowly as in that family (a base of 1e6, for the
1e4 of the embedded model): they add nearly the same to the scores of all tokens, which cancels in the softmax, so that the outputs stay
nearly the same.
"""

from __future__ import annotations

import functools

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from qkvcache import demo

PAIRS = 4
"""Pairs of channels with biases, in each head."""
LEAST, MOST = 20, 100
"""Bounds of biases, relative to the spread of the channel."""
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


@functools.cache
def biased() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The twin with biased keys, on the CPU in fp32, ready for inference, and its tokenizer; always the same."""
    model, tokenizer = demo.load()
    half = model.config.head_dim // 2
    slower = [100 ** (i / half) if i >= half - PAIRS else 1.0 for i in range(half)]
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": slower,
        "long_factor": slower,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": model.config.max_position_embeddings,
    }
    twin = Qwen2ForCausalLM(Qwen2Config(**{name: getattr(model.config, name) for name in SHARED}, rope_parameters=rope)).eval()
    biases = {name: torch.zeros_like(x) for name, x in twin.state_dict().items() if name.endswith("_proj.bias")}
    twin.load_state_dict(model.state_dict() | biases)
    spreads = []
    layers = [layer.self_attn.k_proj for layer in twin.model.layers]
    hooks = [k_proj.register_forward_hook(lambda module, given, keys: spreads.append(keys[0].std(0))) for k_proj in layers]
    with torch.no_grad():
        twin(torch.tensor([demo.text_ids(tokenizer)[:512]]))
    generator = torch.Generator().manual_seed(0)
    for k_proj, hook, spread in zip(layers, hooks, spreads, strict=True):
        hook.remove()
        times = LEAST * (MOST / LEAST) ** torch.rand(spread.shape, generator=generator)
        sign = torch.randint(2, spread.shape, generator=generator) * 2 - 1
        slowest = torch.arange(len(spread)) % half >= half - PAIRS
        k_proj.bias.data = torch.where(slowest, sign * times * spread, 0)
    return twin, tokenizer
