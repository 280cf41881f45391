"""LogFMT10 encode and decode of both engines against `formats.LogFMT10`, bit for bit."""

import numpy as np
import pytest
import torch
from host_calls import (
    ENGINES,
    EVERY_CODE,
    HIDDENS,
    NUMBA,
    assert_same,
    bits,
    decode_logfmt,
    encode_logfmt,
    mixed,
    normal,
)

from expertwire.formats import LogFMT10
from expertwire.host import kernels

WIRE = LogFMT10()


@pytest.fixture(params=ENGINES)
def engine(request):
    return kernels.load(request.param)


def assert_as_format(engine, x):
    """Returns the share of chunks that were cast."""
    payload, sf = encode_logfmt(engine, x)
    expected_payload, expected_sf = WIRE.encode(x)
    assert torch.equal(bits(sf), bits(expected_sf))
    assert torch.equal(payload, expected_payload)
    back = decode_logfmt(engine, payload, sf)
    assert torch.equal(bits(back), bits(WIRE.decode_float32(payload, sf, x.shape[1])))
    return WIRE.cast_chunks(sf, x.shape[1]).float().mean().item() if len(x) else 0.0


def test_docstring_example(engine):
    x = torch.full((1, 128), 0.125, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 0.5, -0.25
    payload, sf = encode_logfmt(engine, x)
    assert sf.tolist() == [[0.5, 0.125]]
    expected = [0x080601FF, 0x80402010, 0x04020100, 0x40201008, 0x00020080]
    assert payload[0, :20].numpy().view(np.uint32).tolist() == expected
    assert not payload[0, 160:].any()
    assert_same(decode_logfmt(engine, payload, sf).bfloat16(), x)


@pytest.mark.parametrize("hidden", [*HIDDENS, 7, 129, 144, 200, 520, 1536])
def test_mixed_rows(engine, hidden):
    assert_as_format(engine, mixed(9, hidden, hidden, scale=0.1))


def test_no_rows(engine):
    assert_as_format(engine, torch.empty(0, 512, dtype=torch.bfloat16))


def test_normal_rows_are_cast(engine):
    assert assert_as_format(engine, normal(16, 1024, 1, scale=0.1)) == 1.0


def test_every_bfloat16(engine):
    """As neighbours, and scattered over groups that hold all magnitudes."""
    assert_as_format(engine, EVERY_CODE.view(128, 512).clone())
    below_one = EVERY_CODE[EVERY_CODE.float().abs() < 1]
    shuffled = below_one[torch.randperm(below_one.numel(), generator=torch.Generator().manual_seed(2))]
    assert assert_as_format(engine, shuffled[: 63 * 512].view(63, 512).clone()) == 1.0


def groups(octaves, spread):
    """One row of 128 per pair of mantissas, amax in [0.5, 1) and amin `octaves` lower, other values between them."""
    high, low = np.meshgrid(np.arange(0, 128, spread), np.arange(0, 128, spread), indexing="ij")
    high, low = (126 << 7) + high.ravel(), (126 - octaves << 7) + low.ravel()
    high, low = high[high > low], low[high > low]
    between = low[:, None] + np.arange(128) * (high - low)[:, None] // 127
    x = torch.from_numpy(between.astype(np.int32)).to(torch.int16)
    x[:, ::3] |= -0x8000
    return x.view(torch.bfloat16)


@pytest.mark.parametrize("engine", [NUMBA])
@pytest.mark.parametrize(("octaves", "spread"), [(0, 1), (1, 4), (2, 4), (7, 8), (31, 4), (32, 4), (40, 16), (100, 16)])
def test_every_pair_of_limits(engine, octaves, spread):
    """The finest steps are 255 : 254 over 510 codes, where the logarithm has the least room for error."""
    assert assert_as_format(kernels.load(engine), groups(octaves, spread)) == 1.0


@pytest.mark.parametrize("engine", [NUMBA])
def test_the_range_of_amax(engine):
    for exponent in (-1, -20, -62, -63, -64, -65, -126, 0, 5, 120):
        x = normal(8, 512, exponent + 200, scale=0.2).clamp(-0.99, 0.99) * 2.0**exponent
        assert_as_format(kernels.load(engine), x.bfloat16())


def test_a_payload_at_an_odd_address(engine):
    x = normal(3, 520, 4, scale=0.1)
    x[1, 0] = 2.0
    payload, sf = WIRE.encode(x)
    room = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
    seen_sf, out = torch.empty_like(sf), torch.empty(3, 520)
    engine.encode_logfmt(x.data_ptr(), 3, 520, room.data_ptr() + 1, seen_sf.data_ptr())
    assert torch.equal(room[1:], payload.flatten())
    engine.decode_logfmt(room.data_ptr() + 1, sf.data_ptr(), 3, 520, out.data_ptr())
    assert_same(out, WIRE.decode_float32(payload, sf, 520))
