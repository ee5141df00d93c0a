"""`CompressedKV`: the object that a compressed layer returns from `update` in place of a key or value tensor.

It is a plain object, not a Tensor subclass: building it costs a tenth, and torch.compile traces it. It has
the shape attributes that attention code reads, supports the views that attention code takes (`repeat_kv`,
`k.transpose(2, 3)`, `k.reshape(B * H, T, D)`), and runs both matmuls of eager attention (`baddbmm` too) and
`scaled_dot_product_attention` on the codes. Every other operation dequantizes the layer, which is correct but
slow.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from ..autocast import without_autocast
from ..kernels import AttentionInputs, KeysOrValues, attend_on_codes, dense, pv, qk, unfold
from ..kernels.attend.reference import Options

NO_COLUMNS = (
    "attention code of this model reads all keys and values of a cache with max_length or compile=True. It needs to know how many columns "
    "the mask has: pass the model's config to the cache, and use an implementation whose masks are by column, such as sdpa, not flash"
)


class Form(NamedTuple):
    """A view of keys or values `[B, H, T, D]` that stays lazy.

    repeats: how often each head occurs (`repeat_kv`); `tiled`: all heads occur one after another, instead of each in place.
    leading: the sizes before the last two, whose product is `B * H * repeats`; None: `[B, H * repeats]`.
    transposed: whether the last two sizes are `[D, T]`.
    dtype: fp32 after a cast, which changes no matmul of attention; None: the model's.
    """

    repeats: int = 1
    tiled: bool = False
    leading: tuple[int, ...] | None = None
    transposed: bool = False
    dtype: torch.dtype | None = None


AS_RETURNED = Form()


class CompressedKV:
    """The keys or values of one layer for one step: `[B, H, T, D]`, or a view of them (`Form`).

    Valid until the layer's next `update`, also after the layer is offloaded or cropped, and in layers that share its keys.
    `observer`: the layer, if it follows the attention to its tokens.
    `columns`: the `T` that the model's own attention sees, as many as its mask has columns; columns after the tokens
    are zeros. None: not known, so that dense tensors are refused.
    """

    __slots__ = ("attention_inputs", "is_keys", "columns", "observer", "form")

    def __init__(
        self, attention_inputs: AttentionInputs, is_keys: bool, columns: int | None, observer: Any = None, form: Form = AS_RETURNED
    ):
        self.attention_inputs, self.is_keys, self.columns, self.observer, self.form = attention_inputs, is_keys, columns, observer, form

    def like(self, columns: int | None, form: Form) -> CompressedKV:
        """The same tokens in another form."""
        return CompressedKV(self.attention_inputs, self.is_keys, columns, self.observer, form)

    def seen(self) -> CompressedKV:
        """Returns the same keys or values without columns after the tokens."""
        tokens = self.attention_inputs.tokens
        return self if self.columns == tokens else self.like(tokens, self.form)

    @property
    def side(self) -> KeysOrValues:
        return self.attention_inputs.key if self.is_keys else self.attention_inputs.value

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """`[B, H, T, D]` of the tokens, before `repeat_kv`."""
        return self.side.shape

    # Shape attributes.

    @property
    def shape(self) -> torch.Size:
        b, h, t, d = self.sizes
        t, form = self.columns or t, self.form
        leading = (b, h * form.repeats) if form.leading is None else form.leading
        return torch.Size((*leading, d, t) if form.transposed else (*leading, t, d))

    @property
    def dtype(self) -> torch.dtype:
        return self.form.dtype or self.side.dtype

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

    # Views that stay lazy.

    def _as(self, **changes: Any) -> CompressedKV:
        return self.like(self.columns, self.form._replace(**changes))

    def __getitem__(self, index: Any) -> CompressedKV | Tensor:
        everything, form = slice(None), self.form
        before_tokens = (everything, everything, None), (everything, everything, None, everything, everything)
        if index in before_tokens and form.leading is None and form.repeats == 1 and not form.transposed:
            return self._as(leading=(*self.shape[:2], 1))
        return _dense_with_warning(self, "indexing")[index]

    def expand(self, *sizes: int) -> CompressedKV | Tensor:
        target, given = _sizes(sizes), self.shape
        if len(given) == 5 and given[2] == 1 and (*target[:2], *target[3:]) == (*given[:2], *given[3:]):
            return self._as(repeats=target[2], leading=target[:3])
        return _dense_with_warning(self, "expand").expand(*sizes)

    def reshape(self, *sizes: int) -> CompressedKV | Tensor:
        """Splits or joins the sizes before the last two."""
        target, given = _sizes(sizes), self.shape
        if -1 in target:
            left = math.prod(given) // -math.prod(target)
            target = tuple(left if size == -1 else size for size in target)
        if not self.form.transposed and target[-2:] == given[-2:] and math.prod(target) == math.prod(given):
            b, h, *_ = self.sizes
            return self._as(leading=None if target[:-2] == (b, h * self.form.repeats) else target[:-2])
        return _dense_with_warning(self, "reshape").reshape(*sizes)

    view = reshape

    def repeat(self, *sizes: int) -> CompressedKV | Tensor:
        """Repeats all heads (JetMoE), which `route` takes for `repeat_kv` with the query heads in another order."""
        target = _sizes(sizes)
        if self.form == AS_RETURNED and len(target) == 4 and (target[0], *target[2:]) == (1, 1, 1):
            return self._as(repeats=target[1], tiled=True)
        return _dense_with_warning(self, "repeat").repeat(*sizes)

    def transpose(self, first: int, second: int) -> CompressedKV | Tensor:
        if {first % self.ndim, second % self.ndim} == {self.ndim - 2, self.ndim - 1}:
            return self._as(transposed=not self.form.transposed)
        return _dense_with_warning(self, "transpose").transpose(first, second)

    @property
    def mT(self) -> CompressedKV | Tensor:
        return self.transpose(-2, -1)

    def float(self) -> CompressedKV:
        return self._as(dtype=torch.float32)

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
        x, form = self.whole().to(self.dtype), self.form
        if form.tiled:
            x = x.repeat(1, form.repeats, 1, 1)
        elif form.repeats > 1:
            x = x.repeat_interleave(form.repeats, dim=1)
        if form.leading is not None:
            x = x.reshape(*form.leading, *x.shape[2:])
        return x.mT if form.transposed else x

    @without_autocast()
    def whole(self) -> Tensor:
        """The dequantized tensor `[B, H, columns, D]`."""
        inputs = self.attention_inputs
        if torch.compiler.is_compiling() and inputs.compiled:  # avoids torch's reference
            sides = inputs.key, inputs.value
            none = [torch.empty(*x.shape[:2], 0, x.shape[3], dtype=x.dtype, device=x.device) for x in sides]
            x = unfold(inputs.paged, inputs.key.shape[2], (none[0], none[1]))[not self.is_keys]
        else:
            x = dense(self.side)
        empty: int = self.columns - x.shape[2]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, empty)) if empty > 0 else x

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse_in_place(name)
        return getattr(_dense_with_warning(self, name), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for functions, on_codes in _ON_CODES:
            if func in functions and (out := on_codes(*args, **kwargs)) is not None:
                return out
        name = getattr(func, "__name__", "?")
        if not torch.compiler.is_compiling():  # which does not trace names
            _refuse_in_place(name)
        args, kwargs = tree_map(lambda x: _dense_with_warning(x, name) if isinstance(x, cls) else x, (args, kwargs))
        return func(*args, **kwargs)

    # Attention, and its two products.

    def path(self, options: dict[str, Any]) -> str | None:
        """Keys: the path of attention with these `options` (`route.path_of`); None: the table says."""
        return None

    def attend_many(self, query: Tensor, hidden: Tensor | None, options: dict[str, Any]) -> Tensor | None:
        """Keys: causal attention of many queries that hides columns, bool `[B or 1, T]`, where the class has its own."""
        return None

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


def of_one_update(key: Any, value: Any) -> bool:
    """Whether one `update` returned these keys and values, changed by `repeat_kv` at most. Only then can
    attention run on their codes."""
    return (
        isinstance(key, CompressedKV)
        and isinstance(value, CompressedKV)
        and key.attention_inputs is value.attention_inputs
        and key.is_keys
        and not value.is_keys
        and key.form == value.form
        and key.form[1:] == AS_RETURNED[1:]
    )


def as_the_model_has_them(key: Any, value: Any) -> tuple[Tensor, Tensor]:
    """Dequantizes keys and values that the model changed after `update`. Raises NotImplementedError if their
    layer follows the attention to them as they were."""
    for side in (key, value):
        if isinstance(side, CompressedKV) and side.observer is not None:
            side.observer.refuse("the model changes its keys or values after the cache returned them")
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


def _warn_dense(what: str) -> None:
    warn_once(f"attention code calls {what!r} on compressed keys or values, which dequantizes the whole layer at each step")


_warn_dense._dynamo_marked_constant = True  # type: ignore[attr-defined]  # run while compiling, as `assume_constant_result` does


@functools.cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


# Functions of torch on the codes; None for arguments that need the dense tensors.


@without_autocast("left")
def _matmul(left: Any, right: Any) -> Tensor | None:
    """`q @ k.T` (`[B, Hq, Q, D]` to `[B, Hq, Q, T]`) or `p @ v` after `repeat_kv`, with any sizes before the last two."""
    if not isinstance(left, Tensor) or not isinstance(right, CompressedKV) or right.form.tiled or left.shape[:-2] != right.shape[:-2]:
        return None
    if right.is_keys != right.form.transposed:
        return None
    if torch.compiler.is_compiling() and right.attention_inputs.counted:  # only the device has the counts
        return None
    tokens, x = right.side.shape[2], left.reshape(right.sizes[0], -1, *left.shape[-2:])
    out = F.pad(right.scores(x), (0, (right.columns or tokens) - tokens)) if right.is_keys else right.weighted(x[..., :tokens])
    return out.view(*left.shape[:-1], -1).to(left.dtype)


@without_autocast("given", "batch1")
def _baddbmm(given: Tensor, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Tensor | None:
    product = _matmul(batch1, batch2) if isinstance(given, Tensor) else None
    return None if product is None else beta * given + alpha * product


@without_autocast("query")
def _sdpa(
    query: Tensor,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    if not of_one_update(key, value) or dropout_p or is_causal or query.shape[1] % key.side.shape[1]:
        return None
    return key.attend(query, attn_mask, scaling=scale)


_ON_CODES: tuple[tuple[tuple, Any], ...] = (
    ((torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm), _matmul),
    ((torch.baddbmm, Tensor.baddbmm), _baddbmm),
    ((F.scaled_dot_product_attention,), _sdpa),
)
