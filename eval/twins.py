"""Twins of the embedded model: models with its outputs, and with keys distributed as in other families.

biased   as the Qwen2 family: the same weights, and biases on keys that make the means of some channels 20 to 100 times their spread, as
         pretrained models of that family have them. The biases are on the pairs of channels that RoPE rotates slowest, as
         slowly as in that family (a base of 1e6, for the 1e4 of the embedded model): they add nearly the same to the scores of all tokens,
         which cancels in the softmax, so that the outputs stay nearly the same.
normed   as the Qwen3 family: queries and keys of each token have the same root mean square before RoPE. The weights are trained for a
         minute to give the distributions of the embedded model again, on the standard library's sources.
"""

from __future__ import annotations

import functools
import random
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from qkvcache import demo

PAIRS = 4
"""Pairs of channels with biases, in each head."""
LEAST, MOST = 20, 100
"""Bounds of biases, relative to the spread of the channel."""
STEPS, LENGTH, ROWS = 600, 1024, 8
"""Steps of the training, and the tokens and rows of each."""
SHARED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


def _config(model: PreTrainedModel) -> dict:
    return {name: getattr(model.config, name) for name in SHARED}


@functools.cache
def biased() -> Loaded:
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
    twin = Qwen2ForCausalLM(Qwen2Config(**_config(model), rope_parameters=rope)).eval()
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


def normed(device: str | torch.device = "cpu") -> Loaded:
    """The twin with normed keys, in fp32 on `device`, ready for inference, and its tokenizer."""
    model, tokenizer = demo.load(device=device)
    with torch.device(device):
        twin = Qwen3ForCausalLM(Qwen3Config(**_config(model), rope_parameters=model.config.rope_parameters))
    norms: dict[str, torch.Tensor] = {}
    ids = torch.tensor([demo.text_ids(tokenizer)[:512]], device=device)
    hooks = []
    for i, layer in enumerate(model.model.layers):
        for name, projection in (("q_norm", layer.self_attn.q_proj), ("k_norm", layer.self_attn.k_proj)):

            def note(module, given, x, key=f"model.layers.{i}.self_attn.{name}.weight"):
                norms[key] = x.square().mean().sqrt().expand(model.config.head_dim).clone()

            hooks.append(projection.register_forward_hook(note))
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    twin.load_state_dict(model.state_dict() | norms)
    _imitate(twin, model, tokenizer(sources(), add_special_tokens=False, verbose=False)["input_ids"])
    return twin.eval(), tokenizer


def sources() -> str:
    """The standard library's larger modules."""
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return "\n\n".join(path.read_text(errors="ignore") for path in paths if path.stat().st_size > 2000)[:4_000_000]


def _imitate(twin: PreTrainedModel, model: PreTrainedModel, ids: list[int]) -> None:
    rng, device = random.Random(0), model.device
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    for _ in range(STEPS):
        starts = [rng.randrange(len(ids) - LENGTH) for _ in range(ROWS)]
        rows = torch.tensor([ids[at : at + LENGTH] for at in starts], device=device)
        with torch.no_grad():
            wanted = model(rows, use_cache=False).logits.log_softmax(-1)
        with torch.enable_grad():
            logprobs = twin(rows, use_cache=False).logits.log_softmax(-1)
            loss = (wanted.exp() * (wanted - logprobs)).sum(-1).mean()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        schedule.step()


def _biased_on(device: str | torch.device) -> Loaded:
    twin, tokenizer = biased()
    torch.nn.Module.to(twin, device)
    return twin, tokenizer


TWINS: dict[str, Callable[[str | torch.device], Loaded]] = {"biased": _biased_on, "normed": normed}
"""Makers of twins on a device, by name."""
