"""Attention on compressed keys and values."""

from .attend.matmul import matmul_fp32, quadratic_form
from .attend.reference import attend
from .host import ops
from .host.dispatch import (
    attend_on_codes,
    attend_pages,
    attends_in_tiles,
    calibrate,
    compile_step,
    compiles_step,
    copy_index,
    dense,
    dequantize_pages,
    gather_rows,
    launch_of_step,
    load_ahead,
    on_triton,
    plan_on_codes,
    prepare,
    quantize_into,
    quantizes,
    read,
    reads_together,
    split_rows,
    step,
    unfold,
)
from .host.handles import give_handle
from .pages import AttentionBudget, AttentionInputs, BlockCache, PagedInputs, Pages, Splits, TokenInputs, both, differ, gather_tiles
from .segments import (
    Exact,
    KeysOrValues,
    Packed,
    Pair,
    Segment,
    pv,
    qk,
)
