"""`CompressedKV`: the object that a compressed layer returns from `update` in place of a key or value tensor.

It is a plain object, not a Tensor subclass: building it costs a tenth, and torch.compile traces it. It has the shape
attributes that attention code reads, supports the views that attention code takes (`repeat_kv`, `k.transpose(2, 3)`,
`k.reshape(B * H, T, D)`), and runs both matmuls of eager attention (`baddbmm` too) and `scaled_dot_product_attention` on
the codes. Every other operation dequantizes the layer, which is correct but slow.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from ..kernels import AttentionInputs, KeysOrValues, attend_on_codes, dense, pv, qk, unfold
from ..kernels.attend import Options
from .uncompiled import run_while_compiling

NO_COLUMNS = (
    "attention code of this model reads all keys and values of a cache with max_length or compile=True. It needs to know how many columns "
    "the mask has: pass the model's config to the cache, and use an implementation whose masks are by column, such as sdpa, not flash"
)
_TRANSPOSED = {"plain": "transposed", "flat": "flat transposed"}
_TRANSPOSED |= {x: y for y, x in _TRANSPOSED.items()}
_MATMULS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm)


class CompressedKV:
    """The keys or values of one layer for one step: `[B, H, T, D]`, or `[B, H * repeats, T, D]` after `repeat_kv`.

    `form`: "plain"; "grouped" within `repeat_kv`; "tiled" where all heads are repeated one after another; "flat", `[B * Hq, T, D]`; plain
    and flat ones also "transposed".

    It refers to the attention inputs: it stays valid until the next `update` of its layer, also if the layer is
    offloaded or cropped, and in layers that share its keys. `observer`: the layer, if it evicts (`observer.py`).
    `columns`: the `T` that the model's own attention sees, as many as its mask has columns; columns after the tokens
    are zeros. None: not known, so that dense tensors are refused.
    """

    __slots__ = ("attention_inputs", "side", "columns", "repeats", "form", "observer", "cast")

    def __init__(
        self,
        attention_inputs: AttentionInputs,
        side: KeysOrValues,
        columns: int | None,
        repeats: int = 1,
        form: str = "plain",
        observer: Any = None,
    ):
        self.attention_inputs, self.side, self.columns = attention_inputs, side, columns
        self.repeats, self.form, self.observer = repeats, form, observer
        self.cast: torch.dtype | None = None

    def __repr__(self) -> str:
        return f"CompressedKV(shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    # Shape attributes.

    @property
    def is_keys(self) -> bool:
        return self.side is self.attention_inputs.key

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """`[B, H, T, D]` of the tokens, before `repeat_kv`."""
        return self.side.shape

    @property
    def shape(self) -> torch.Size:
        b, h, t, d = self.sizes
        t = self.columns or t
        if self.form == "grouped":
            return torch.Size((b, h, self.repeats, t, d))
        heads = (b * h * self.repeats,) if self.form.startswith("flat") else (b, h * self.repeats)
        return torch.Size((*heads, d, t) if self.form.endswith("transposed") else (*heads, t, d))

    @property
    def dtype(self) -> torch.dtype:
        return self.side.dtype if self.cast is None else self.cast

    @property
    def device(self) -> torch.device:
        return self.side.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def __len__(self) -> int:
        return self.shape[0]

    # Views that stay lazy.

    def like(self, columns: int | None, repeats: int, form: str) -> CompressedKV:
        """The same tokens in another form."""
        return CompressedKV(self.attention_inputs, self.side, columns, repeats, form, self.observer)

    def _as(self, repeats: int, form: str) -> CompressedKV:
        twin = self.like(self.columns, repeats, form)
        twin.cast = self.cast
        return twin

    def seen(self) -> CompressedKV:
        """Returns the same keys or values without columns after the tokens."""
        tokens = self.side.shape[2]
        if self.columns == tokens:
            return self
        return self.like(tokens, self.repeats, self.form)

    def __getitem__(self, index: Any) -> CompressedKV | Tensor:
        everything = slice(None)
        repeat_kv = (everything, everything, None, everything, everything), (everything, everything, None)
        if self.form == "plain" and self.repeats == 1 and index in repeat_kv:
            return self._as(1, "grouped")
        return _dense_with_warning(self, "indexing")[index]

    def expand(self, *sizes: int) -> CompressedKV | Tensor:
        target, given = _sizes(sizes), self.shape
        if self.form == "grouped" and len(target) == 5 and (*target[:2], *target[3:]) == (*given[:2], *given[3:]):
            return self._as(target[2], "grouped")
        return _dense_with_warning(self, "expand").expand(*sizes)

    def reshape(self, *sizes: int) -> CompressedKV | Tensor:
        b, h, *_ = self.sizes
        target, given = _sizes(sizes), self.shape
        if self.form == "grouped" and target == (b, h * self.repeats, *given[3:]):
            return self._as(self.repeats, "plain")
        if self.form == "plain" and target in ((b * given[1], -1, given[3]), (b * given[1], *given[2:])):
            return self._as(self.repeats, "flat")
        return _dense_with_warning(self, "reshape").reshape(*sizes)

    view = reshape

    def repeat(self, *sizes: int) -> CompressedKV | Tensor:
        """Repeats all heads (JetMoE), which `route` takes for `repeat_kv` with the query heads in another order."""
        target = _sizes(sizes)
        if (self.form, self.repeats) == ("plain", 1) and len(target) == 4 and (target[0], *target[2:]) == (1, 1, 1):
            return self._as(target[1], "tiled")
        return _dense_with_warning(self, "repeat").repeat(*sizes)

    def transpose(self, first: int, second: int) -> CompressedKV | Tensor:
        last = {self.ndim - 2, self.ndim - 1}
        if {first % self.ndim, second % self.ndim} == last and self.form in _TRANSPOSED:
            return self._as(self.repeats, _TRANSPOSED[self.form])
        return _dense_with_warning(self, "transpose").transpose(first, second)

    @property
    def mT(self) -> CompressedKV | Tensor:
        return self.transpose(-2, -1)

    def float(self) -> CompressedKV:
        """The matmuls of attention are in fp32 anyway."""
        twin = self._as(self.repeats, self.form)
        twin.cast = torch.float32
        return twin

    def contiguous(self, *args: Any, **kwargs: Any) -> CompressedKV:
        return self

    def to(self, target: Any = None, *args: Any, **kwargs: Any) -> CompressedKV | Tensor:
        """Returns itself if nothing would change: layers that share keys, and accelerate's hooks, move keys to their own device."""
        same = target is self.dtype or (isinstance(target, str | int | torch.device) and torch.device(target) == self.device)
        if same and not args and kwargs.keys() <= {"non_blocking"}:
            return self
        return _dense_with_warning(self, "to").to(target, *args, **kwargs)

    # Every other operation dequantizes.

    def dense(self) -> Tensor:
        """The dequantized tensor, in the model's dtype. Raises NotImplementedError if `columns` is not known."""
        if self.columns is None:
            raise NotImplementedError(NO_COLUMNS)
        x = self.whole().to(self.dtype)
        if self.form == "grouped":
            return x.unsqueeze(2).expand(self.shape)
        if self.form == "tiled":
            return x.repeat(1, self.repeats, 1, 1)
        x = x.repeat_interleave(self.repeats, dim=1) if self.repeats > 1 else x
        x = x.flatten(0, 1) if self.form.startswith("flat") else x
        return x.mT if self.form.endswith("transposed") else x

    def whole(self) -> Tensor:
        """The dequantized tensor `[B, H, columns, D]`."""
        inputs = self.attention_inputs
        if torch.compiler.is_compiling() and inputs.compiled:  # avoids torch's reference
            sides = inputs.key, inputs.value
            none = [torch.empty(*x.shape[:2], 0, x.shape[3], dtype=x.dtype, device=x.device) for x in sides]
            x = unfold(inputs.paged, inputs.key.shape[2], (none[0], none[1]))[self.side is inputs.value]
        else:
            x = dense(self.side)
        empty: int = self.columns - x.shape[2]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, empty)) if empty > 0 else x

    # Attention, and its two products.

    def attend(self, query: Tensor, mask: Tensor | None = None, **options: Unpack[Options]) -> Tensor:
        """Keys: attention of queries `[B, Hq, Q, D]` over these keys and their values, on the codes (`kernels.attend`)."""
        return attend_on_codes(query, self.attention_inputs, mask, **options)

    def scores(self, query: Tensor) -> Tensor:
        """Keys: the scores `[B, Hq, Q, T]` of queries `[B, Hq, Q, D]`, in fp32."""
        b, h, _, d = self.sizes
        return qk(query.float().reshape(b, h, -1, d), self.side).view(*query.shape[:3], -1)

    def weighted(self, weights: Tensor) -> Tensor:
        """Values: their sums `[B, Hq, Q, D]` by weights `[B, Hq, Q, T]`, in fp32."""
        b, h, t, _ = self.sizes
        return pv(weights.float().reshape(b, h, -1, t), self.side).view(*weights.shape[:3], -1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_in_place(name)
        return getattr(_dense_with_warning(self, name), name)

    def __rmatmul__(self, other: Tensor) -> Tensor:
        return torch.matmul(other, self)  # type: ignore[arg-type]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        two = func in _MATMULS and not kwargs and len(args) == 2 and isinstance(args[1], cls)
        if two and (out := _lazy_matmul(args[0], args[1])) is not None:
            return out
        if func in (torch.baddbmm, torch.Tensor.baddbmm) and (out := _lazy_baddbmm(*args, **kwargs)) is not None:
            return out
        if func is F.scaled_dot_product_attention and (out := _lazy_sdpa(*args, **kwargs)) is not None:
            return out
        name = getattr(func, "__name__", "?")
        if not torch.compiler.is_compiling():  # which does not trace names
            _refuse_in_place(name)
        args, kwargs = tree_map(lambda x: _dense_with_warning(x, name) if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)


def of_one_update(key: Any, value: Any) -> bool:
    """Whether one `update` returned these keys and values, changed by `repeat_kv` at most. Only then can attention run
    on their codes."""
    return (
        isinstance(key, CompressedKV)
        and isinstance(value, CompressedKV)
        and key.attention_inputs is value.attention_inputs
        and key.is_keys
        and not value.is_keys
        and (key.form, value.form, key.repeats) == ("plain", "plain", value.repeats)
    )


def as_the_model_has_them(key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Dequantizes keys and values that the model changed after `update`. Raises NotImplementedError if their layer
    evicts tokens, since each head retains different ones."""
    sides = [x for x in (key, value) if isinstance(x, CompressedKV)]
    if any(side.observer is not None for side in sides):
        raise NotImplementedError(
            "the model changes its keys or values after the cache returned them, and a cache that evicts tokens must "
            "attend to them as they were returned: leave out the policy"
        )
    key, value = (_dense_with_warning(x, "attention with other ones") if isinstance(x, CompressedKV) else x for x in (key, value))
    return key, value


def _operator(name: str) -> Any:
    return lambda self, *other: getattr(_dense_with_warning(self, name), name)(*other)


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg"):  # Python looks these up on the class
    setattr(CompressedKV, f"__{_name}__", _operator(f"__{_name}__"))


def _sizes(sizes: tuple) -> tuple:
    return tuple(sizes[0]) if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


def _dense_with_warning(given: CompressedKV, what: str) -> Tensor:
    _warn_dense(what)
    return given.dense()


def _refuse_in_place(name: str) -> None:
    if name.endswith("_") and not name.startswith("__"):
        raise NotImplementedError(
            f"attention code calls {name!r} on compressed keys or values, which cannot be written in place: use {name[:-1]!r}, which "
            "returns a tensor"
        )


@run_while_compiling
def _warn_dense(what: str) -> None:
    warn_once(f"attention code calls {what!r} on compressed keys or values, which dequantizes the whole layer at each step")


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _lazy_matmul(left: Any, right: CompressedKV) -> Tensor | None:
    """`q @ k.T` (`[B, Hq, Q, D]` to `[B, Hq, Q, T]`) or `p @ v` after `repeat_kv`, flat or not; None for any other matmul."""
    if not isinstance(left, Tensor) or right.form not in _TRANSPOSED or left.shape[:-2] != right.shape[:-2]:
        return None
    if torch.compiler.is_compiling() and right.attention_inputs.counted:  # only the device has the counts
        return None
    if right.is_keys != right.form.endswith("transposed"):
        return None
    tokens, x = right.side.shape[2], left.unflatten(0, (right.sizes[0], -1)) if left.dim() == 3 else left
    out = F.pad(right.scores(x), (0, (right.columns or tokens) - tokens)) if right.is_keys else right.weighted(x[..., :tokens])
    return out.view(*left.shape[:-1], -1).to(left.dtype)


def _lazy_baddbmm(given: Tensor, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    """`torch.baddbmm` with compressed keys or values, or None."""
    product = _lazy_matmul(batch1, batch2) if isinstance(batch2, CompressedKV) and isinstance(given, Tensor) else None
    return None if product is None else beta * given + alpha * product


def _lazy_sdpa(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """`scaled_dot_product_attention` on compressed keys and values; None if it needs the dense tensors."""
    if not of_one_update(key, value) or dropout_p or is_causal or query.shape[1] % key.side.shape[1]:
        return None
    return key.attend(query, attn_mask, scaling=scale)
