"""Machine code: loops are found in a listing, and writes to registers that an unfinished product reads."""

import machine_code
import pytest

TURN = """
        /*0000*/                   MOV R152, R1 ;                                          /* 0x0000000100987202 */
.L_x_1:
        /*0010*/                   F2FP.F16.F32.PACK_AB R188, R9, R8 ;
        /*0020*/              @!P0 BRA `(.L_x_2) ;
{before}
.L_x_2:
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   F2FP.F16.F32.PACK_AB R152, R9, R8 ;
        /*0060*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], RZ, !UPT ;
        /*0070*/                   HGMMA.64x128x16.F32 R24, gdesc[UR12], R24, gsb0 ;
        /*0080*/                   HGMMA.64x128x16.F32 R88, R152, gdesc[UR8].tnspB, R88 ;
{between}
        /*00a0*/                   HGMMA.64x128x16.F32 R88, R156, gdesc[UR12].tnspB, R88, gsb0 ;
        /*00b0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
{after}
        /*00d0*/               @P0 BRA `(.L_x_1) ;
        /*00e0*/                   MOV R153, R1 ;
.L_x_3:
        /*00f0*/                   BRA `(.L_x_3) ;
"""
SAFE = ["MOV R24, R152", "BAR.SYNC R152, 0x80", "STS.128 [R152], R4", "LDS.128 R148, [R4]", "ISETP.NE.AND P1, PT, R152, RZ, PT"]
UNSAFE = ["MOV R155, R1", "LDS.128 R149, [R4]", "LDS.64 R151, [R4]", "IMAD.WIDE R151, R4, R5, R6", "SHFL.BFLY PT, R152, R10, 0x2, 0x1f"]
UNSAFE += ["HGMMA.64x64x16.F32 R124, gdesc[UR8], R124, gsb0"]


def overwritten(**instructions):
    places = {place: f"        /*0030*/              @!P2 {x} ;" for place, x in instructions.items()}
    return machine_code.overwritten(machine_code.loops(TURN.format(**dict.fromkeys(("before", "between", "after"), "") | places)))


def test_loops():
    first, second = machine_code.loops(TURN.format(before="", between="", after=""))
    assert first[0] == "F2FP.F16.F32.PACK_AB R188, R9, R8" and first[-1] == "BRA `(.L_x_1)" and len(first) == 10
    assert second == ["BRA `(.L_x_3)"]


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_writes_to_registers_that_a_product_reads(place):
    """After the product, and in the next pass before its end."""
    assert [overwritten(**{place: x}) for x in SAFE] == [[]] * len(SAFE)
    assert [overwritten(**{place: x}) for x in UNSAFE] == [[x] for x in UNSAFE]


def test_registers_are_read_from_their_product_on():
    assert overwritten(between="MOV R159, R1") == [] and overwritten(after="MOV R159, R1") == ["MOV R159, R1"]


def test_a_wait_completes_all_products_but_so_many():
    waits = ["WARPGROUP.DEPBAR.LE gsb0, 0x1", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    product, write = "HGMMA.64x8x16.F32 R4, R152, gdesc[UR8], R4, gsb0", "MOV R152, R1"
    for first, second in (waits, waits[::-1]):
        assert machine_code.overwritten([[first, product, write, second]]) == [write]
        assert machine_code.overwritten([[waits[0], product, product.replace("152", "8"), waits[0], write, second]]) == []


def test_none_where_no_such_product_runs_on():
    loop = ["HGMMA.64x8x16.F32 R4, R152, gdesc[UR8], R4, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    assert machine_code.overwritten([]) is machine_code.overwritten([loop]) is None
