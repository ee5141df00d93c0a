"""Keys and values for `layer.update`, good ones and bad ones; and a compiled step of a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from qkvcache.kernels import attend_on_codes
from qkvcache.layers.compressed import CompressedLayer

ROWS, HEADS, DIM, VALUE_DIM = 3, 2, 64, 32
Pair = tuple[Tensor, Tensor]


def new(tokens: int, rows: int = ROWS, heads: int = HEADS, dims=(DIM, VALUE_DIM), dtype=torch.float32) -> Pair:
    return tuple(torch.randn(rows, heads, tokens, dim).to(dtype) for dim in dims)


def _pair(key: tuple, value: tuple, dtypes=(torch.float32, torch.float32)) -> Pair:
    return tuple(torch.zeros(shape, dtype=dtype) for shape, dtype in zip((key, value), dtypes, strict=True))


K, V = (ROWS, HEADS, 1, DIM), (ROWS, HEADS, 1, VALUE_DIM)
BAD_UPDATES = {
    "batch": _pair((2, *K[1:]), (2, *V[1:])),
    "heads": _pair((ROWS, 4, 1, DIM), (ROWS, 4, 1, VALUE_DIM)),
    "key head_dim": _pair((ROWS, HEADS, 1, 128), V),
    "value head_dim": _pair(K, (ROWS, HEADS, 1, DIM)),
    "key dtype": _pair(K, V, (torch.bfloat16, torch.float32)),
    "value dtype": _pair(K, V, (torch.float32, torch.bfloat16)),
    "tokens of keys and values": _pair((ROWS, HEADS, 2, DIM), V),
    "batch of keys and values": _pair((2, *K[1:]), V),
}
"""For a layer that holds what `new` made."""


def one_step(layer: CompressedLayer, x: Pair, query: Tensor) -> Tensor:
    key, _ = layer.update(*x)
    return attend_on_codes(query, key.attention_inputs)


def compiled_steps() -> Iterator[tuple[Callable, list]]:
    """For a fixture: `one_step` compiled into one graph, and the graphs that there are."""
    torch.compiler.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    with torch.compiler.set_stance("default"), torch.no_grad():
        yield torch.compile(one_step, fullgraph=True, backend=backend), graphs
    torch.compiler.reset()
