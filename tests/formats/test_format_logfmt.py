"""LogFMT10 against the recipe that a kernel would use: numpy float32, one estimate, one correction, integer packing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertwire.formats import LogFMT10, logfmt

F32 = np.float32
WIRE = LogFMT10()


def bf16_bits(values):
    return torch.tensor(np.asarray(values, np.int32)).to(torch.int16)


def horner(coefficients, z):
    result = F32(coefficients[-1])
    for c in coefficients[-2::-1]:
        result = result * z + F32(c)
    return result


def log2_bf16(bits):
    bits = np.asarray(bits, np.int32)
    return ((bits >> 7) - 127).astype(F32), horner(logfmt.LOG2_1P, (bits & 127).astype(F32) / F32(128))


def recipe_step(amax_bits, amin_bits):
    (e1, l1), (e0, l0) = log2_bf16(amax_bits), log2_bf16(amin_bits)
    return np.minimum((e1 - e0) + (l1 - l0), F32(32)) / F32(510)


def recipe_grid(amax, step, codes):
    t = (511 - codes).astype(F32) * step
    i = np.floor(t)
    return amax * horner(logfmt.EXP2_NEG, t - i) * np.ldexp(F32(1), -i.astype(np.int32))


def recipe_codes(magnitude_bits):
    """One group of |x| bits -> codes."""
    amax_bits, amin_bits = magnitude_bits.max(), magnitude_bits.min()
    value = (magnitude_bits.astype(np.uint32) << 16).view(F32)
    amax, step = value.max(), recipe_step(amax_bits, amin_bits)
    half = (horner(logfmt.EXP2_NEG, step) + F32(1)) * F32(0.5)
    octaves = np.log2(amax) - np.log2(np.maximum(value, F32(1e-30)))
    code = np.clip(511 - np.rint(octaves / step), 0, 511).astype(np.int32)
    down = (code >= 1) & (value < recipe_grid(amax, step, code) * half)
    up = (code <= 510) & (value >= recipe_grid(amax, step, code + 1) * half)
    return code - down + up, amax, step


def recipe_row(bits):
    """One row of bfloat16 bits (uint16) -> payload bytes, metadata, float32 values."""
    hidden, payload, meta, out = len(bits), b"", [], []
    for start, width in WIRE.chunks(hidden):
        chunk = bits[start : start + width]
        groups = [chunk[g : g + 128] & 0x7FFF for g in range(0, width, 128)]
        meta += [v for g in groups for v in (g.max(), g.min())]
        if width % 16 or not all(0x1F80 <= g.max() < 0x3F80 and g.min() < g.max() for g in groups):
            payload += chunk.tobytes()
            out.append((chunk.astype(np.uint32) << 16).view(F32))
            continue
        codes = []
        for g in groups:
            code, amax, step = recipe_codes(g)
            codes += code.tolist()
            out.append(np.where(code == 0, F32(0), recipe_grid(amax, step, code)))
        signs = (chunk >> 15).tolist()
        out[-len(groups) :] = [np.concatenate(out[-len(groups) :]) * np.where(np.array(signs), F32(-1), F32(1))]
        for v in range(0, width, 16):
            number = sum(c << 9 * k for k, c in enumerate(codes[v : v + 16]))
            number |= sum(s << 144 + k for k, s in enumerate(signs[v : v + 16]))
            payload += number.to_bytes(20, "little")
    return payload, np.array(meta, np.uint16), np.concatenate(out)


def assert_as_recipe(x):
    payload, sf = WIRE.encode(x)
    back = WIRE.decode_float32(payload, sf, x.shape[1]).numpy()
    used = WIRE.used_bytes(sf, x.shape[1]).tolist()
    for row, bits in enumerate(x.contiguous().view(torch.int16).numpy().view(np.uint16)):
        octets, meta, values = recipe_row(bits)
        assert used[row] == len(octets)
        assert payload[row, : len(octets)].numpy().tobytes() == octets
        assert not payload[row, len(octets) :].any()
        np.testing.assert_array_equal(sf[row].contiguous().view(torch.int16).numpy().view(np.uint16), meta)
        np.testing.assert_array_equal(back[row].view(np.uint32), values.view(np.uint32))


def normal(rows, hidden, seed=0, scale=0.1):
    return (torch.randn(rows, hidden, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def test_docstring_example():
    x = torch.full((1, 128), 0.125, dtype=torch.bfloat16)
    x[0, 0], x[0, 1] = 0.5, -0.25
    payload, sf = WIRE.encode(x)
    assert sf.tolist() == [[0.5, 0.125]]
    expected = [0x080601FF, 0x80402010, 0x04020100, 0x40201008, 0x00020080]
    assert payload[0, :20].numpy().view(np.uint32).tolist() == expected
    assert WIRE.used_bytes(sf, 128).tolist() == [160]
    codes, negative = logfmt.unpack(payload[:, :160])
    assert codes[0].tolist() == [511, 256] + [1] * 126
    assert negative[0].nonzero().flatten().tolist() == [1]
    assert torch.equal(WIRE.decode_bfloat16(payload, sf, 128), x)


def test_128_normal_values_times_a_tenth():
    """Half a step is 0.6 % for the median group; a value that happens to lie near zero widens the grid of its group."""
    x = normal(400, 128)
    payload, sf = WIRE.encode(x)
    cast = WIRE.cast_chunks(sf, 128)[:, 0]
    assert cast.float().mean() > 0.99
    codes, _ = logfmt.unpack(payload[cast, :160])
    assert (codes.amin(1) == 1).all()
    assert (codes.amax(1) == 511).all()
    error = ((WIRE.decode_float32(payload, sf, 128) - x.float()).abs() / x.float().abs()).amax(1)
    assert 0.005 < error.median() < 0.007
    assert error.max() < 0.0218


@pytest.mark.parametrize("hidden", [8, 24, 128, 144, 200, 768, 1536, 2880, 7168])
def test_bits_are_those_of_the_kernel_recipe(hidden):
    x = normal(4, hidden, seed=hidden)
    x[1] *= 2.0**-40
    x[2, hidden // 2] = 3.0  # one chunk of this row stays bfloat16
    x[3, ::5] = 0.0
    assert_as_recipe(x)


def test_sizes():
    assert [WIRE.sf_bytes(h) for h in (8, 128, 2880, 7168)] == [4, 4, 92, 224]
    assert WIRE.chunks(7168) == [(1024 * i, 1024) for i in range(7)]
    assert WIRE.chunks(2880) == [(0, 512), (512, 512), (1024, 512), (1536, 512), (2048, 512), (2560, 320)]
    assert WIRE.chunks(24) == [(0, 24)]
    _, sf = WIRE.encode(normal(1, 7168))
    assert WIRE.used_bytes(sf, 7168).tolist() == [8960]
    _, sf = WIRE.encode(normal(1, 520))
    assert WIRE.cast_chunks(sf, 520).tolist() == [[True, False]]  # 8 channels are no whole word group


@pytest.mark.parametrize("value", [1.0, -2.0, float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_a_large_or_non_finite_value_keeps_its_chunk_exact(value):
    x = normal(2, 1536, seed=3)
    x[0, 700] = value
    payload, sf = WIRE.encode(x)
    assert WIRE.cast_chunks(sf, 1536).tolist() == [[True, False, True], [True, True, True]]
    exact = WIRE.decode_float32(payload, sf, 1536)
    assert torch.equal(exact[0, 512:1024].view(torch.int32), x[0, 512:1024].float().view(torch.int32))
    back = WIRE.decode_bfloat16(payload, sf, 1536)
    assert torch.equal(back[0, 700:701].isnan(), x[0, 700:701].isnan())
    x[0, 700] = 0.25
    other, other_sf = WIRE.encode(x)
    expected = WIRE.decode_bfloat16(other, other_sf, 1536)
    assert torch.equal(back[0, :512], expected[0, :512])
    assert torch.equal(back[0, 1024:], expected[0, 1024:])
    assert torch.equal(back[1], expected[1])


@pytest.mark.parametrize("group", [0.0, -0.0, 0.375, 2.0**-70])
def test_a_group_of_one_magnitude_is_not_cast(group):
    x = normal(1, 512, seed=4)
    x[0, 128:256] = group
    x[0, 130:140] *= -1
    payload, sf = WIRE.encode(x)
    assert not WIRE.cast_chunks(sf, 512).any()
    assert torch.equal(WIRE.decode_bfloat16(payload, sf, 512).view(torch.int16), x.view(torch.int16))


@pytest.mark.parametrize(("amax", "cast"), [(2.0**-64, True), (2.0**-65, False), (255 / 256, True), (1.0, False)])
def test_the_range_of_amax(amax, cast):
    x = torch.full((1, 128), amax / 8, dtype=torch.bfloat16)
    x[0, 5] = amax
    _, sf = WIRE.encode(x)
    assert WIRE.cast_chunks(sf, 128).item() is cast


def test_zeros_and_values_far_below_amax():
    x = torch.full((1, 128), 0.25, dtype=torch.bfloat16)
    x[0, :6] = torch.tensor([0.5, 0.0, -0.0, 2.0**-33, 2.0**-34, 1e-40])
    payload, sf = WIRE.encode(x)
    codes, _ = logfmt.unpack(payload[:, :160])
    assert codes[0, :6].tolist() == [511, 0, 0, 1, 0, 0]
    back = WIRE.decode_float32(payload, sf, 128)[0, :6]
    assert back.signbit().tolist() == [False, False, True, False, False, False]
    assert back[3].item() == 2.0**-33
    assert_as_recipe(x)


def groups_of_two_magnitudes(amax_bits, amin_bits):
    limits = torch.stack([bf16_bits(amax_bits), bf16_bits(amin_bits)], dim=1)
    step = logfmt.grid_step(limits)
    return limits, step, logfmt.grid(limits, step, torch.arange(1, 512))


@pytest.mark.parametrize("octaves", [0, 1, 5, 31, 32, 60])
def test_every_grid_increases_and_ends_at_amin_and_amax(octaves):
    """All pairs of mantissas: the grid rises at every code, and both ends come back as themselves."""
    high, low = np.meshgrid(np.arange(128), np.arange(128), indexing="ij")
    keep = (high > low) | (octaves > 0)
    high, low = high[keep], low[keep]
    if octaves > 1:
        high, low = high[::7], low[::7]
    limits, step, values = groups_of_two_magnitudes((126 << 7) + high, ((126 - octaves) << 7) + low)
    assert (values.diff(dim=1) > 0).all()
    ends = limits.view(torch.bfloat16).float()
    assert torch.equal(values[:, -1], ends[:, 0])
    floor = torch.maximum(ends[:, 1], ends[:, 0] * 2.0**-32)
    torch.testing.assert_close(values[:, 0], floor, rtol=4e-6, atol=0)
    magnitude = limits.unsqueeze(1)[:, :, [0, 1] * 64]
    codes = logfmt.encode_groups(limits.unsqueeze(1), magnitude)[:, 0]
    assert (codes[:, 0] == 511).all()
    assert torch.equal(codes[:, 1] == 1, ends[:, 1] >= floor * (1 + 2.0 ** -step[:, 0]) / 2)
    if octaves == 0:
        back = logfmt.decode_groups(limits.unsqueeze(1), codes.unsqueeze(1))[:, 0, :2].bfloat16()
        assert torch.equal(back.view(torch.int16), limits)


def test_a_value_on_an_edge_goes_up():
    """Every bfloat16 value in every grid from 0.5 up to less than 1; some lie exactly on an edge."""
    amax = np.arange(0x3F01, 0x3F80)
    limits, step, values = groups_of_two_magnitudes(amax, np.full(127, 0x3F00))
    edges = values * ((logfmt._polynomial(logfmt.EXP2_NEG, step) + 1.0) * 0.5)
    magnitude = bf16_bits(np.arange(0x3F00, 0x3F80)).expand(127, 1, 128)
    value = magnitude.view(torch.bfloat16).float()
    assert (value == edges.unsqueeze(2)).any()
    codes = logfmt.encode_groups(limits.unsqueeze(1), magnitude)[:, 0]
    assert torch.equal(codes, (edges.unsqueeze(2) <= value).sum(1))


def test_the_constants_are_float32_and_join_octaves():
    for coefficients in (logfmt.LOG2_1P, logfmt.EXP2_NEG):
        assert [float(F32(c)) for c in coefficients] == list(coefficients)
    z = np.arange(0, 1 + 2**-16, 2**-16, dtype=F32)
    log2, exp2 = horner(logfmt.LOG2_1P, z), horner(logfmt.EXP2_NEG, z)
    assert (log2[0], log2[-1], exp2[0], exp2[-1]) == (0, 1, 1, 0.5)
    assert np.abs(log2 - np.log2(1 + z.astype(np.float64))).max() < 5e-7
    assert np.abs(exp2 - 2.0 ** -z.astype(np.float64)).max() < 2e-7


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 0x3F7F), min_size=128, max_size=128), st.integers(0, 0x3F7F))
def test_error_bound(codes, lowest):
    x = bf16_bits(np.maximum(codes, lowest)).view(1, 128)
    x[0, ::3] |= -0x8000
    x = x.view(torch.bfloat16)
    assert_as_recipe(x)
    payload, sf = WIRE.encode(x)
    error = (WIRE.decode_float32(payload, sf, 128).double() - x.double()).abs()
    if not WIRE.cast_chunks(sf, 128).item():
        assert not error.any()
        return
    step = logfmt.grid_step(sf.view(torch.int16)).double()
    kept = x.double().abs() >= x.double().abs().max() * 2.0**-32 * (1 + 2.0**-step) / 2 * (1 + 1e-5)
    bound = x.double().abs() * (1.001 * torch.tanh(0.3466 * step) + 2.0**-20)
    assert (error <= bound)[kept].all()
    assert (error <= x.double().abs() + x.double().abs().max() * 2.0**-32 * 0.03)[~kept].all()


def test_packing_every_code_in_every_place():
    codes = (torch.arange(512).unsqueeze(1) + 31 * torch.arange(16)) % 512
    negative = (torch.arange(512).unsqueeze(1) >> torch.arange(16) % 9) & 1 == 1
    octets = logfmt.pack(codes, negative)
    assert octets.shape == (512, 20)
    for row in range(512):
        number = int.from_bytes(octets[row].numpy().tobytes(), "little")
        assert [number >> 9 * v & 511 for v in range(16)] == codes[row].tolist()
        assert [bool(number >> 144 + v & 1) for v in range(16)] == negative[row].tolist()
    again, signs = logfmt.unpack(octets)
    assert torch.equal(again, codes)
    assert torch.equal(signs, negative)
