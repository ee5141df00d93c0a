"""Attention over latents (MLA) in the shape of DeepSeek-V3, beside transformers' own; rows in eval/results/latents.jsonl.

    python eval/bench_latents.py                 measures on a GPU, prints the tables, writes the rows: under 3 minutes
    python eval/bench_latents.py --sections step indexed    those that a CPU measures
    python eval/bench_latents.py --tiny          tiny shapes on any device, to try the script
    python eval/bench_latents.py --markdown      the tables of the documentation, from the rows: needs no GPU

decode   attention of one layer's step, 128 heads, latents of 512 + 64 channels, 8 rows of 32,768 tokens in bf16; GPU time from the model's
         queries to its values. Ours reads codes, with absorbed projections. transformers' expands the latents of all tokens (`expand_kv`)
         and attends by the best of torch's kernels; what it copies to append a token to its cache is left out.
chosen   the same step where an indexer has chosen 2,048 of the tokens (DeepSeek-V3.2): transformers' attends under the mask of these, ours
         gathers their codes. "masked": ours attends under the mask, too.
step     a model of two layers of 16 heads on a CPU in fp32 after 4,096 tokens: a step by the clock, the best of six.
indexed  a model of one layer of 16 heads on a CPU in fp32 after 16,384 tokens, of which an indexer chooses 512 (DeepSeek-V3.2): a step, as
         above. "masked": attention reads all tokens under the indexer's mask.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.nn.functional as F
from gpu import device, let_go, milliseconds, queued_us
from harness import Table, device_name, in_time, note, outcome, parser_of, run_or_show
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention

from qkvcache import CompressedCache
from qkvcache.latents import reference
from qkvcache.latents.attention import ExpandedKV
from qkvcache.releases import passing

SECTIONS = ("decode", "chosen", "step", "indexed")
STOCK = "transformers"
FORMATS = ("identity", "int8", "turboquant_4bit_nc", "int4", "nvfp4")
QUANTIZED = FORMATS[1:]
BACKENDS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no products of bfloat16


def config_of(tiny: bool, heads: int = 128) -> DeepseekV3Config:
    shape = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    if tiny:
        heads, shape = 4, {"kv_lora_rank": 64, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
    config = DeepseekV3Config(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=heads,
        q_lora_rank=64, moe_intermediate_size=32, n_routed_experts=4, n_group=2, topk_group=1, num_experts_per_tok=2,
        first_k_dense_replace=2, bos_token_id=None, eos_token_id=None, **shape,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    return config


def latents(config: DeepseekV3Config, rows: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Random latents `[B, 1, T, R]` and rotated keys `[B, 1, T, P]`."""
    torch.manual_seed(0)
    sizes = config.kv_lora_rank, config.qk_rope_head_dim
    return tuple(torch.randn(rows, 1, tokens, dim, device=device(), dtype=DTYPE) for dim in sizes)  # type: ignore[return-value]


class Bench:
    """One attention layer, and a step's query."""

    def __init__(self, tiny: bool, rows: int, tokens: int, heads: int = 128):
        self.config, self.rows, self.tokens = config_of(tiny, heads), rows, tokens
        torch.manual_seed(0)
        with torch.device(device()):
            self.module = DeepseekV3Attention(self.config, 0).to(DTYPE).eval()
        self.heads, self.scaling = self.config.num_attention_heads, self.module.scaling
        self.query = torch.randn(rows, self.heads, 1, self.module.qk_head_dim, device=device(), dtype=DTYPE)

    def filled(self, format: str) -> CompressedCache:
        """A cache whose first layer holds the tokens but one."""
        cache = CompressedCache(self.config, format=format)
        cache.update(*(x[:, :, :-1] for x in latents(self.config, self.rows, self.tokens)), 0)
        return cache

    def mask(self, chosen: int | None) -> Tensor | None:
        """That of an indexer which chooses so many tokens for each row."""
        if chosen is None:
            return None
        ranks = torch.rand(self.rows, 1, 1, self.tokens, device=device(), generator=torch.Generator(device()).manual_seed(0))
        return ranks >= ranks.topk(chosen).values[..., -1:]

    def keys(self, format: str) -> tuple[ExpandedKV, int]:
        """The keys of all tokens, and the bytes that the layer holds."""
        cache = self.filled(format)
        keys, _ = self.module.expand_kv(*cache.update(*(x[:, :, -1:] for x in latents(self.config, self.rows, self.tokens)), 0))
        return keys, sum(x.numel() * x.itemsize for _, x in cache.layers[0].tensors())

    def ours(self, format: str, chosen: int | None = None, masked: bool = False) -> dict:
        keys, nbytes = self.keys(format)
        keys.expansion.chosen, mask = None if masked else chosen, self.mask(chosen)
        found = {"us": time_us(lambda: keys.attend(self.query, mask, scaling=self.scaling))}
        return found | {"bytes_per_token": nbytes / self.rows / self.tokens}

    def stock(self, chosen: int | None = None) -> dict:
        """The fastest of torch's kernels after `expand_kv`. Flash attention takes values as wide as keys."""
        given, found, mask = latents(self.config, self.rows, self.tokens), {}, self.mask(chosen)

        def attend(padded: bool) -> Tensor:
            keys, values = self.module.expand_kv(*given)
            values = F.pad(values, (0, keys.shape[3] - values.shape[3])) if padded else values
            return F.scaled_dot_product_attention(self.query, keys, values, mask, scale=self.scaling)

        for name, backend in BACKENDS.items() if torch.cuda.is_available() else [("torch's choice", None)]:
            try:
                with sdpa_kernel(backend) if backend is not None else mock.patch.dict({}, {}):
                    found[name] = time_us(lambda name=name: attend(name == "flash"))
            except RuntimeError as error:
                print(f"{name}: {str(error)[:200]}", file=sys.stderr, flush=True)  # this backend does not serve these shapes
            let_go()
        best = min(found, key=found.__getitem__)
        widths = self.config.kv_lora_rank + self.config.qk_rope_head_dim
        return {"backend": best, "us": found[best], "bytes_per_token": 2 * widths, "all_us": found}


def time_us(call: Callable[[], object]) -> float:
    return queued_us(call) if torch.cuda.is_available() else 1e3 * min(milliseconds(call) for _ in range(3))


@torch.no_grad()
def step(tiny: bool, cache_name: str, tokens: int) -> dict:
    config = config_of(tiny, heads=16)
    torch.manual_seed(0)
    model = DeepseekV3ForCausalLM(config).eval()
    cache = DynamicCache(config=config) if cache_name == STOCK else CompressedCache(config, format=cache_name)
    ids = torch.randint(config.vocab_size, (1, tokens))
    model(ids, **passing(cache), logits_to_keep=1)
    ms = min(milliseconds(lambda: model(ids[:, :1], **passing(cache))) for _ in range(6))
    layers = (x for layer in cache.layers for x in ((layer.keys, layer.values) if cache_name == STOCK else (t for _, t in layer.tensors())))
    return {"ms": ms, "bytes_per_token": sum(x.numel() * x.itemsize for x in layers) / tokens / config.num_hidden_layers}


@torch.no_grad()
def indexed_step(tiny: bool, cache_name: str, tokens: int) -> dict:
    """Milliseconds of a step after `tokens` random latents and keys of the indexer."""
    format, _, masked = cache_name.partition(", ")
    sizes = config_of(tiny, heads=16).to_diff_dict() | {"num_hidden_layers": 1, "first_k_dense_replace": 1, "model_type": "deepseek_v32"}
    config = CONFIG_MAPPING["deepseek_v32"](**sizes | {"index_n_heads": 16, "index_head_dim": 128, "index_topk": tokens // 32})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    cache = DynamicCache(config=config) if cache_name == STOCK else CompressedCache(config, format=format)
    probe = DynamicCache(config=config)
    model(torch.tensor([[5]]), **passing(probe))
    cache.update(*(torch.randn(1, x.shape[1], tokens, x.shape[3]) for x in (probe.layers[0].keys, probe.layers[0].values)), 0)
    cache.update_indexer(torch.randn(1, tokens, config.index_head_dim), 0)
    layer = cache.layers[0]
    held = (layer.keys, layer.values, layer.indexer_keys) if cache_name == STOCK else (x for _, x in layer.tensors())
    nbytes = sum(x.numel() * x.itemsize for x in held)
    with mock.patch.object(reference, "LEAST_SAVED", float("inf") if masked else 2):
        ms = min(milliseconds(lambda: model(torch.tensor([[5]]), **passing(cache))) for _ in range(6))
    return {"ms": ms, "bytes_per_token": nbytes / tokens}


def cases(args: Namespace) -> Iterator[tuple[dict, Callable[[], dict]]]:
    """A row's name, and the function that measures it."""
    rows, tokens = (2, 300) if args.tiny else (8, 32768)
    if "decode" in args.sections:
        bench = Bench(args.tiny, rows, tokens)
        size = {"what": "decode", "rows": rows, "tokens": tokens}
        yield size | {"cache": STOCK}, bench.stock
        for format in FORMATS:
            yield size | {"cache": format}, lambda format=format: bench.ours(format)
    if "chosen" in args.sections:
        bench, chosen = Bench(args.tiny, rows, tokens), 16 if args.tiny else 2048
        size = {"what": "chosen", "rows": rows, "tokens": tokens}
        yield size | {"cache": STOCK}, lambda: bench.stock(chosen)
        for format in QUANTIZED[:2]:
            for masked in (True, False):
                case = size | {"cache": format + ", masked" * masked}
                yield case, lambda format=format, masked=masked: bench.ours(format, chosen, masked)
    if "step" in args.sections:
        tokens = 300 if args.tiny else 4096
        for name in (STOCK, *FORMATS):
            yield {"what": "step", "cache": name, "rows": 1, "tokens": tokens}, lambda name=name: step(args.tiny, name, tokens)
    if "indexed" in args.sections and "deepseek_v32" in CONFIG_MAPPING:
        tokens = 512 if args.tiny else 16384
        for name in (STOCK, *(f"{format}{masked}" for format in QUANTIZED[:2] for masked in (", masked", ""))):
            yield {"what": "indexed", "cache": name, "rows": 1, "tokens": tokens}, lambda name=name: indexed_step(args.tiny, name, tokens)


@torch.no_grad()
def measure(args: Namespace) -> None:
    """Rows of the sections. What fails has a row that says so."""
    for case, call in in_time(cases(args), args.minutes):
        let_go()
        on = device() if case["what"] in ("decode", "chosen") else "cpu"
        row = case | outcome(call) | {"tiny": args.tiny, "device": device_name(on)}
        note(args.out, row["what"], row, "cache", "rows", "tokens", "tiny", "device")


def tables(rows: list[dict]) -> Iterator[Table]:
    """A table for each section that has rows, of each device."""
    rows = [row for row in rows if "failed" not in row]
    for what, unit in (("decode", "us"), ("chosen", "us"), ("step", "ms"), ("indexed", "ms")):
        for place in dict.fromkeys((row["device"], row["tiny"]) for row in rows):
            found = [row for row in rows if (row["what"], row["device"], row["tiny"]) == (what, *place)]
            stock = next((row for row in found if row["cache"] == STOCK), None)
            if found and stock:
                lines = [
                    [
                        row["cache"] if row is stock else f"`{row['cache']}`",
                        f"{row[unit]:,.1f}" if row[unit] < 100 else f"{row[unit]:,.0f}",
                        f"{stock[unit] / row[unit]:.1f}",
                        f"{row['bytes_per_token']:,.0f}",
                    ]
                    for row in found
                ]
                kind = "an indexer's layer, " * (what in ("chosen", "indexed"))
                title = f"{place[0]}, {kind}{found[0]['rows']} x {found[0]['tokens']:,} tokens:"
                yield Table(["cache", unit, "times as fast", "bytes a token and layer"], lines, title, rule=("---", "---:"))


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__, "latents", minutes=3)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args(arguments)
    run_or_show(parser, args, measure, "", tables, gpu=bool({"decode", "chosen"} & {*args.sections}))


if __name__ == "__main__":
    main()
