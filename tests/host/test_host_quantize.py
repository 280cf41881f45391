"""FP8 encode and decode of both engines against `formats.FP8Block`, bit for bit."""

import pytest
import torch
from host_calls import ENGINES, EVERY_CODE, HIDDENS, assert_same, bits, decode_fp8, encode_fp8, mixed

from expertwire.formats import FP8Block
from expertwire.host import kernels

WIRES = [FP8Block(block=block, scale=scale) for block in (32, 64, 128) for scale in ("float32", "ue8m0")]


@pytest.fixture(params=ENGINES)
def engine(request):
    return kernels.load(request.param)


@pytest.fixture(params=WIRES, ids=lambda wire: wire.name)
def wire(request):
    return request.param


def assert_as_format(engine, wire, x):
    payload, sf = encode_fp8(engine, x, wire)
    expected_payload, expected_sf = wire.encode(x)
    assert torch.equal(bits(payload), bits(expected_payload))
    assert torch.equal(sf.view(torch.int32), bits(expected_sf).view(torch.int32))
    back = decode_fp8(engine, payload, sf, wire)
    assert_same(back, wire.decode_bfloat16(expected_payload, expected_sf, x.shape[1]))
    assert (back[back.isnan()].view(torch.int16) == 0x7FC0).all()


@pytest.mark.parametrize("scale", ["float32", "ue8m0"])
def test_docstring_example(engine, scale):
    wire = FP8Block(scale=scale)
    x = torch.zeros(1, 128, dtype=torch.bfloat16)
    x[0, :4] = torch.tensor([448, -1, 0.3, 17])
    payload, sf = encode_fp8(engine, x, wire)
    assert bits(payload)[0, :5].tolist() == [0x7E, 0xB8, 0x2A, 0x58, 0]
    assert sf.view(torch.int32).item() == (0x3F800000 if scale == "float32" else 127)
    assert decode_fp8(engine, payload, sf, wire)[0, :5].tolist() == [448, -1, 0.3125, 16, 0]
    x[0, 0] = 450
    payload, sf = encode_fp8(engine, x, wire)
    assert decode_fp8(engine, payload, sf, wire)[0, 0].item() == (450 if scale == "float32" else 448)


@pytest.mark.parametrize("hidden", HIDDENS)
def test_mixed_rows(engine, wire, hidden):
    assert_as_format(engine, wire, mixed(9, hidden, hidden, scale=30.0))


def test_no_rows(engine, wire):
    payload, sf = encode_fp8(engine, torch.empty(0, 256, dtype=torch.bfloat16), wire)
    assert decode_fp8(engine, payload, sf, wire).shape == (0, 256)


def test_every_bfloat16_in_a_block_of_neighbours(engine, wire):
    assert_as_format(engine, wire, EVERY_CODE.view(128, 512).clone())


def test_every_bfloat16_below_448_against_one_scale(engine, wire):
    """The first value of each block is 448, so all others meet the same factor: every normal and subnormal code."""
    finite = EVERY_CODE[EVERY_CODE.float().abs() <= 448]
    blocks = torch.zeros(-(-finite.numel() // (wire.block - 1)), wire.block, dtype=torch.bfloat16)
    padded = torch.zeros(blocks.shape[0] * (wire.block - 1), dtype=torch.bfloat16)
    padded[: finite.numel()] = finite
    blocks[:, 1:] = padded.view(blocks.shape[0], wire.block - 1)
    blocks[:, 0] = 448
    assert_as_format(engine, wire, blocks)


def test_a_longer_row_of_scales(engine, wire):
    """`sf_stride` may exceed what is needed; packed exponents are padded with zeros, float32 scales are not touched."""
    x = mixed(7, 300, 3)
    payload, sf = encode_fp8(engine, x, wire, spare=8)
    needed = wire.sf_bytes(300)
    assert torch.equal(sf[:, :needed], bits(wire.encode(x)[1]).view(torch.uint8))
    assert (sf[:, needed:] == (0 if wire.scale == "ue8m0" else 7)).all()
    assert_same(decode_fp8(engine, payload, sf, wire), wire.decode_bfloat16(*wire.encode(x), 300))


def test_decode_of_every_code_with_every_exponent(engine):
    wire = FP8Block(block=64, scale="ue8m0")
    payload = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(torch.float8_e4m3fn)
    sf = torch.arange(256, dtype=torch.uint8).unsqueeze(1).repeat(1, 4)
    seen = decode_fp8(engine, payload, sf, wire)
    assert_same(seen, wire.decode_bfloat16(payload, sf.view(torch.int32), 256))


def test_decode_of_every_code_with_any_float32_scale(engine):
    """Scales that no encoder makes (subnormal, negative, Inf, NaN) decode to what the format says."""
    wire = FP8Block(block=128)
    payload = torch.arange(256, dtype=torch.uint8).repeat(400, 1).view(torch.float8_e4m3fn)
    scales = torch.randint(-(2**31), 2**31, (400, 2), generator=torch.Generator().manual_seed(5)).to(torch.int32)
    scales[0] = torch.tensor([0x7F800000, 0x7FC00000])
    scales[1] = torch.tensor([1, 0])
    sf = scales.view(torch.float32)
    assert_same(decode_fp8(engine, payload, sf.view(torch.uint8), wire), wire.decode_bfloat16(payload, sf, 256))
