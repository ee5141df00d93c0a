"""Two turns through `generate` in a process of its own: `python two_turns.py DEVICE FORMAT MAX_LENGTH`; prints what was found as JSON.

The second turn continues with the 200 tokens of another passage and a question about the first turn's context, through both caches, so that
many new tokens are read over a compressed past. Logits of the dense cache are compared where both have read the same tokens.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import DynamicCache

from qkvcache import CompressedCache, demo
from qkvcache.releases import passing

device, format, max_length = sys.argv[1], sys.argv[2], int(sys.argv[3]) or None
model, tokenizer = demo.load(torch.bfloat16 if device == "cuda" else torch.float32, device)
text = demo.text_ids(tokenizer)
first, second = torch.tensor([text[:1500]], device=device), torch.tensor([text[3000:3200]], device=device)


def two_turns(cache):
    """The logits at the first step of the second turn, and how many tokens the cache has seen."""
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "return_dict_in_generate": True, "output_logits": True}
    model.generate(first, **passing(cache), **options)
    cache.crop(first.shape[1] - 1 - cache.get_seq_length())  # what the model answered may differ
    both = torch.cat([first, second], dim=1)
    found = model.generate(both, **passing(cache), **options)
    return found.logits[0].float().log_softmax(-1), cache.get_seq_length()


dense, _ = two_turns(DynamicCache(config=model.config))
got, seen = two_turns(CompressedCache(model.config, format=format, max_length=max_length))
kl = (dense.exp() * (dense - got)).sum(-1).mean().item()
print(json.dumps({"kl": kl, "seen": seen, "expected": first.shape[1] + second.shape[1] + 8 - 1}))
