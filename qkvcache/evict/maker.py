"""`EvictingMaker`: the layers of a cache with a policy."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer, StaticSlidingWindowLayer

from ..caches.makers import UNLIMITED, LayerMaker
from ..formats import Format, Identity
from ..layers.compressed import CompressedLayer
from ..layers.kinds import LayerKind
from ..layers.static_sliding import StaticSlidingLayer
from ..storage import PAGE, check_room
from . import policies
from .compress import fill, read_twice
from .layer import EvictingLayer
from .policies import REGISTRY, Budget, KVzip, Policy, check_count
from .refusals import of_rope, rotates_sinks
from .rope import Rope

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EvictingMaker(LayerMaker):
    """Makes the layers of `cache`, which retain the tokens that `policy` selects."""

    policy: Policy
    lost = "nothing will be compressed and no token evicted"

    def __init__(self, cache: Any, policy: str | Policy):
        super().__init__(cache)
        self.policy = policies.resolve(policy)
        self.rope: Rope | None = None
        self.reads_twice, self.at_most = self.policy.second_reading, self.policy.alpha_safeguard is not None
        self.filling = self.policy.num_sink_tokens + PAGE

    @property
    def rule(self) -> str:  # type: ignore[override]
        """The policy in words, with its mean budget over layers."""
        budgets = self.policy.budgets
        tokens, share = round(sum(b.tokens for b in budgets) / len(budgets)), sum(b.share for b in budgets) / len(budgets)
        parts = (f"{tokens:,}" if tokens else "", f"{share:.0%}" if share else "")
        return f"{self.policy.name} {' + '.join(filter(None, parts))}"

    @property
    def parts(self) -> dict[str, tuple[str, Any]]:
        return {"policy": ("policies", self.policy)}

    def counts(self, layers: Any) -> dict[str, int]:
        return {"evicting": sum(isinstance(layer, EvictingLayer) and i not in self.exact for i, layer in enumerate(layers))}

    def prepare(self) -> None:
        if self.cache._config is not None and (what := of_rope(self.policy)):
            try:
                self.rope = Rope.of(self.cache._config)
            except NotImplementedError as reason:
                fix = "positions='original'" if rotates_sinks(self.policy) else "another policy, such as KeyDiff,"
                raise NotImplementedError(f"{what}: {reason}; {fix} does without") from None

    def check(self, layers: int) -> None:
        if len(self.policy.budgets) not in (1, layers):
            raise ValueError(f"{len(self.policy.budgets)} budgets for {layers} full-attention layers: pass one for all, or one for each")

    def compressed(self, kind: LayerKind, format: Format, number: int, **options: Any) -> CompressedLayer:
        budget = self.policy.budgets[number % len(self.policy.budgets)]
        return self._evicting(kind, format, self.policy, budget, **self.cache._layer_options, rope=self.rope, **options)

    def uncompressed(self, kind: LayerKind, **options: Any) -> CompressedLayer:
        # transformers makes one mask for all layers; a layer of another length must make its own
        if self.cache.compile and self.cache.max_length is None:
            raise NotImplementedError("skip_layers with a policy and compile=True: they store max_length tokens, so pass it")
        whole = policies.SlidingWindow(window_length=self.cache.max_length or UNLIMITED, interval=1)
        return self._evicting(kind, Identity(), whole, whole.budgets[0], **options)

    def _evicting(self, kind: LayerKind, format: Format, policy: Policy, budget: Budget, **options: Any) -> CompressedLayer:
        cache = self.cache
        policy = replace(policy, interval=1) if cache.compile else policy
        make: Any = EvictingLayer
        if LinearAttentionLayer in getattr(kind.make, "__mro__", ()):
            from .recurrent import EvictingHybridLayer as make  # of two rooms
        deferred = bool(getattr(cache._config, "num_kv_shared_layers", 0))
        layer = make(format, policy, budget, deferred=deferred, max_length=cache.max_length, compile=cache.compile, **options)
        layer.running = cache._running
        return layer

    def shrink(self, layer: Any, tokens: int, length: int) -> Any:
        if isinstance(layer, EvictingLayer):
            layer.budget = Budget(tokens=tokens)
        return super().shrink(layer, tokens, length)

    def check_source(self) -> None:
        if _needs_attention(self.policy):
            others = ", ".join(name for name, kind in REGISTRY.items() if not _needs_attention(kind()))
            raise NotImplementedError(
                f"from_cache with policy={self.policy.name}, which ranks tokens by attention that the given cache does not have: use "
                f"one of {others}, or let the model read the prompt with the new cache"
            )

    def compress(
        self,
        model: PreTrainedModel,
        ids: Tensor,
        attention_mask: Tensor | None,
        tokenizer: Any,
        prefill_chunk_size: int | None,
        progress: bool,
    ) -> None:
        policy, cache = self.policy, self.cache
        if not policy.second_reading:
            raise ValueError(f"compress with policy={policy.name}: only KVzip reads a context twice; call generate")
        if cache.get_seq_length():
            raise ValueError(f"compress after {cache.get_seq_length()} tokens: call it on an empty cache, or call reset() before")
        if not isinstance(ids, Tensor):
            raise TypeError(f"compress of {ids!r:.60}: expected token ids [B, T], such as tokenizer(text, return_tensors='pt').input_ids")
        if ids.dim() != 2 or not ids.shape[1] or (attention_mask is not None and attention_mask.shape != ids.shape):
            masked = "" if attention_mask is None else f" and attention_mask {list(attention_mask.shape)}"
            raise ValueError(f"compress of ids {list(ids.shape)}{masked}: both must be [B, T], with T of 1 or more")
        if prefill_chunk_size is not None:
            check_count("prefill_chunk_size", prefill_chunk_size, least=1)
        if any(type(layer) in (StaticSlidingWindowLayer, StaticSlidingLayer) for layer in cache.layers):
            raise NotImplementedError("compress with max_length or compile=True on a model with sliding layers: leave these out")
        if any(isinstance(layer, CompressedLayer) and hasattr(layer, "recurrent_states") for layer in cache.layers):
            raise NotImplementedError(
                "compress on a model with recurrent states beside attention in a layer: use another policy than KVzip"
            )
        if cache.max_length is not None:
            check_room(0, ids.shape[1], cache.max_length)
        mask = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids.device)
        kvzip: KVzip = policy  # type: ignore[assignment]
        fill(cache.layers, kvzip, model, mask, *read_twice(model, kvzip, ids, mask, tokenizer, progress, prefill_chunk_size))
        cache.seen_ids = ids.clone()


def _needs_attention(policy: Policy) -> bool:
    return bool(policy.observation_window) or policy.needs_queries or policy.second_reading
