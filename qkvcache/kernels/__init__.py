"""Attention on compressed keys and values."""

from .attend.matmul import matmul_fp32, quadratic_form
from .attend.reference import attend
from .host import ops
from .host.dispatch import (
    attend_on_codes,
    attend_pages,
    attends_in_tiles,
    calibrate,
    chooses,
    compile_step,
    compiles_step,
    dense,
    dequantize_pages,
    launch_of_step,
    load_ahead,
    on_triton,
    plan_on_codes,
    plan_pages,
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
from .inputs import AttentionInputs, TokenInputs
from .paged_inputs import PagedInputs, Prepared, Select
from .pages import Pages
from .segments import (
    Exact,
    KeysOrValues,
    Packed,
    Pair,
    Segment,
    both,
    differ,
    pv,
    qk,
)
from .store.reference import gather_tiles
from .work import Splits, Work
