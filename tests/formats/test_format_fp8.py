"""FP8Block against a second definition in numpy, where e4m3 is a table of its 127 finite magnitudes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.errors import InvalidArgument
from expertwire.formats import FP8Block, ue8m0
from expertwire.formats.wire import divide

F32 = np.float32
E4M3 = np.array([(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(127)])
SCALES = ["float32", "ue8m0"]
EVERY_CODE = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def e4m3_bytes(values):
    """Nearest code, the even one in a tie, saturating."""
    magnitude = np.abs(values).astype(np.float64)
    below = np.clip(np.searchsorted(E4M3, magnitude, side="right") - 1, 0, 126)
    above = np.minimum(below + 1, 126)
    down, up = magnitude - E4M3[below], E4M3[above] - magnitude
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return (code | np.signbit(values) << 7).astype(np.uint8)


def expected_block(x, scale):
    """One block of float32 -> (bytes, float32 scale, biased exponent)."""
    if not np.isfinite(x).all():
        return np.full(x.shape, 0x7F, np.uint8), F32(np.nan), 255 if scale == "ue8m0" else None
    amax = max(np.abs(x).max(), F32(1e-4))
    if scale == "float32":
        return e4m3_bytes(x * (F32(448) / amax)), amax / F32(448), None
    mantissa, exponent = np.frexp(amax / F32(448))
    exponent -= mantissa == 0.5
    return e4m3_bytes(np.ldexp(x, -exponent)), np.ldexp(F32(1), exponent), 127 + int(exponent)


def as_scales(wire, sf, hidden):
    return sf if wire.scale == "float32" else ue8m0.to_float32(ue8m0.unpack(sf, wire.num_blocks(hidden)))


def assert_as_expected(wire, x):
    payload, sf = wire.encode(x)
    hidden = x.shape[1]
    scales = as_scales(wire, sf, hidden).numpy()
    back, got = wire.decode_float32(payload, sf, hidden).numpy(), payload.view(torch.uint8).numpy()
    for row, values in enumerate(x.float().numpy()):
        for block in range(wire.num_blocks(hidden)):
            part = slice(block * wire.block, (block + 1) * wire.block)
            octets, scale, exponent = expected_block(values[part], wire.scale)
            np.testing.assert_array_equal(got[row, part], octets)
            np.testing.assert_array_equal(scales[row, block], scale)
            decoded = np.where(octets >> 7, -1, 1).astype(F32) * np.append(E4M3, np.nan)[octets & 0x7F].astype(F32)
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(back[row, part], decoded * scale)
            if exponent is not None:
                assert sf.contiguous().view(torch.uint8)[row, block] == exponent


def bf16(*values, width=128):
    x = torch.zeros(1, width, dtype=torch.bfloat16)
    x[0, : len(values)] = torch.tensor(values).bfloat16()
    return x


def test_docstring_example():
    for scale in SCALES:
        payload, sf = FP8Block(scale=scale).encode(bf16(448, -1, 0.3, 17))
        assert payload.view(torch.uint8)[0, :5].tolist() == [0x7E, 0xB8, 0x2A, 0x58, 0]
        assert payload[0, :4].tolist() == [448, -1, 0.3125, 16]
        assert sf.item() == (1.0 if scale == "float32" else 127)
        payload, sf = FP8Block(scale=scale).encode(bf16(450))
        assert payload[0, 0].item() == (448 if scale == "float32" else 224)
        assert FP8Block(scale=scale).decode_bfloat16(payload, sf, 128)[0, 0] == (450 if scale == "float32" else 448)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("block", [32, 128])
def test_every_bfloat16_code(scale, block):
    wire = FP8Block(block=block, scale=scale)
    assert_as_expected(wire, EVERY_CODE.view(32, 2048))
    shuffled = EVERY_CODE[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    finite = torch.where(shuffled.isfinite(), shuffled, 0)
    assert_as_expected(wire, finite.view(32, 2048))


@pytest.mark.parametrize("scale", SCALES)
def test_every_code_under_one_fixed_scale(scale):
    """With amax 448 the factor is 1, so each value below meets the e4m3 rounding itself, ties included."""
    small = EVERY_CODE[EVERY_CODE.float().abs() <= 448]
    x = torch.zeros(-(-len(small) // 127), 128, dtype=torch.bfloat16)
    x[:, 0] = 448
    x[:, 1:] = torch.nn.functional.pad(small, (0, x.shape[0] * 127 - len(small))).view(-1, 127)
    payload, _ = FP8Block(scale=scale).encode(x)
    np.testing.assert_array_equal(payload.view(torch.uint8).numpy(), e4m3_bytes(x.float().numpy()))


def test_midpoints_go_to_even():
    middle = (E4M3[:-1] + E4M3[1:]) / 2
    payload, _ = FP8Block().encode(bf16(448, *middle))
    codes = payload.view(torch.uint8)[0, 1:127].tolist()
    assert codes == [c + c % 2 for c in range(126)]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("hidden", [8, 24, 128, 768, 2880, 7168])
def test_hidden_sizes(scale, hidden):
    x = torch.randn(2, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
    assert_as_expected(FP8Block(scale=scale), x)


def test_scale_bytes():
    assert [FP8Block().sf_bytes(h) for h in (8, 24, 128, 768, 2880, 7168)] == [4, 4, 4, 24, 92, 224]
    assert [FP8Block(scale="ue8m0").sf_bytes(h) for h in (8, 128, 768, 2880, 7168)] == [4, 4, 8, 24, 56]
    assert FP8Block(block=32, scale="ue8m0").sf_bytes(7168) == 224


def test_packed_exponents_end_in_zero_bytes():
    x = torch.full((2, 768), 448.0).bfloat16()
    x[:, 128:256] = 1.0  # 1 / 448 rounds up to 2^-8
    _, sf = FP8Block(scale="ue8m0").encode(x)
    assert sf.tolist() == [[0x7F7F777F, 0x00007F7F]] * 2


def test_power_of_two_boundaries():
    for k in range(-21, 119):
        exact = 448 * 2.0**k
        above = 450 * 2.0**k
        _, sf = FP8Block(scale="ue8m0").encode(torch.cat([bf16(exact), bf16(-above)]))
        assert sf.flatten().tolist() == [127 + k, 128 + k]


def test_values_are_quantised_with_the_rounded_scale():
    """Quantising with amax / 448 and rounding the scale afterwards would double 225 here."""
    x = bf16(225, 100, -3)
    wire = FP8Block(scale="ue8m0")
    payload, sf = wire.encode(x)
    assert sf.item() == 127
    assert wire.decode_bfloat16(payload, sf, 128)[0, :3].tolist() == [224, 96, -3]


def test_the_floor_is_applied_before_rounding_up():
    _, sf = FP8Block(scale="ue8m0").encode(bf16(1e-6))
    assert sf.item() == 127 - 22  # 1e-4 / 448 = 2^-22.09


@pytest.mark.parametrize("scale", SCALES)
def test_zero_blocks_keep_their_signs(scale):
    payload, sf = FP8Block(scale=scale).encode(bf16(0.0, -0.0))
    assert payload.view(torch.uint8)[0, :3].tolist() == [0, 0x80, 0]
    assert as_scales(FP8Block(scale=scale), sf, 128).item() == (F32(1e-4) / F32(448) if scale == "float32" else 2**-22)
    back = FP8Block(scale=scale).decode_bfloat16(payload, sf, 128)
    assert not back.any()
    assert back.signbit()[0, :3].tolist() == [False, True, False]


@pytest.mark.parametrize("wire", [FP8Block(), FP8Block(scale="ue8m0"), FP8Block(scale="ue8m0", sf_layout="column")])
@pytest.mark.parametrize("bad", [0x7FC0, 0x7F81, -1, 0x7F80, -0x80], ids=["nan", "snan", "-nan", "inf", "-inf"])
def test_nan_and_inf_stay_in_their_block(wire, bad):
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    clean, clean_sf = wire.encode(x)
    x[1, 140] = torch.tensor(bad, dtype=torch.int16).view(torch.bfloat16)
    payload, sf = wire.encode(x)
    block = torch.zeros(3, 300, dtype=torch.bool)
    block[1, 128:256] = True
    assert (payload.view(torch.uint8)[block] == 0x7F).all()
    assert torch.equal(payload.view(torch.uint8)[~block], clean.view(torch.uint8)[~block])
    back = wire.decode_bfloat16(payload, sf, 300)
    assert back[block].isnan().all()
    assert torch.equal(back[~block], wire.decode_bfloat16(clean, clean_sf, 300)[~block])
    if wire.scale == "float32":
        assert sf.view(torch.int32)[1, 1] == 0x7FC00000
    else:
        assert ue8m0.unpack(sf, 3)[1, 1] == 255


def test_ue8m0_overflows_only_from_248_times_2_to_120():
    wire = FP8Block(scale="ue8m0")
    back = wire.decode_bfloat16(*wire.encode(bf16(255 * 2.0**120, 248 * 2.0**120, -247 * 2.0**120)), 128)
    assert back[0, :3].tolist() == [float("inf"), float("inf"), -240 * 2.0**120]
    wire = FP8Block()
    assert wire.decode_bfloat16(*wire.encode(bf16(255 * 2.0**120)), 128)[0, 0] == 255 * 2.0**120


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5])
def test_column_layout(scale, rows):
    x = torch.randn(rows, 1100, generator=torch.Generator().manual_seed(rows)).bfloat16()
    payload, row_sf = FP8Block(scale=scale).encode(x)
    same, sf = FP8Block(scale=scale, sf_layout="column").encode(x)
    assert row_sf.is_contiguous()
    assert torch.equal(sf, row_sf)
    assert torch.equal(same.view(torch.uint8), payload.view(torch.uint8))
    if rows:
        padded = -(-rows // 4) * 4
        assert sf.stride() == (1, padded)
        assert not sf.as_strided((padded, sf.shape[1]), (1, padded))[rows:].any()
    wire = FP8Block(scale=scale)  # decoding takes either layout
    assert torch.equal(wire.decode_bfloat16(payload, sf, 1100), wire.decode_bfloat16(payload, row_sf, 1100))


def test_divisions_are_rounded_once():
    t = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 500 + 1e-4
    exact = t.numpy().astype(np.float64)
    np.testing.assert_array_equal(divide(448.0, t, like=t).numpy(), (448 / exact).astype(F32))
    np.testing.assert_array_equal(divide(t, 448.0, like=t).numpy(), (exact / 448).astype(F32))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 0x7F7F) | st.integers(0x8000, 0xFF7F), min_size=1, max_size=40), st.sampled_from(SCALES))
def test_error_bound(codes, scale):
    x = torch.tensor(codes, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(1, -1)
    wire = FP8Block(block=32, scale=scale)
    payload, sf = wire.encode(x)
    hidden = x.shape[1]
    exact = x.double()
    scales = as_scales(wire, sf, hidden).double().repeat_interleave(32, dim=1)[:, :hidden]
    bound = torch.maximum(exact.abs() / 16, scales / 1024) * (1 + 2.0**-20)
    fits = exact.abs() < 248 * 2.0**120
    back = wire.decode_float32(payload, sf, hidden)
    assert ((back.double() - exact).abs() <= bound)[fits].all()
    once_more = wire.decode_bfloat16(payload, sf, hidden).double()
    rounding = 0 if scale == "ue8m0" else 2.0**-8
    assert ((once_more - back.double()).abs() <= back.double().abs() * rounding)[fits].all()


@pytest.mark.parametrize(
    ("field", "value"),
    [("block", 0), ("block", 100), ("block", 256), ("scale", "e8m0"), ("sf_layout", "rows"), ("decode", None)],
)
def test_illegal_fields(field, value):
    with pytest.raises(InvalidArgument, match=f"FP8Block: {field} must be one of .* got {value!r}"):
        FP8Block(**{field: value})
