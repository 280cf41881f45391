import math

import torch

from expertwire.formats import ue8m0


def words(*values):
    return [v - (1 << 32) if v >> 31 else v for v in values]


def test_docstring_example():
    scale = torch.tensor([0.75, 1.0, 1.0 + 2.0**-23])
    assert ue8m0.ceil_exponent(scale).tolist() == [127, 127, 128]
    packed = ue8m0.pack(torch.tensor([[127, 128, 129, 130, 120]]))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [words(0x8281807F, 0x00000078)]


def test_all_powers_of_two_and_their_neighbours():
    for k in range(-125, 127):
        exact = torch.tensor([2.0**k])
        below, above = torch.nextafter(exact, torch.zeros(1)), torch.nextafter(exact, torch.full((1,), torch.inf))
        assert [int(ue8m0.ceil_exponent(v)) - 127 for v in (below, exact, above)] == [k, k, k + 1]


def test_every_byte_decodes():
    values = ue8m0.to_float32(torch.arange(256))
    assert values.dtype == torch.float32
    assert values[:255].tolist() == [math.ldexp(1.0, e - 127) for e in range(255)]
    assert values[255:].view(torch.int32).tolist() == [0x7FC00000]


def test_pack_and_unpack_every_byte_and_width():
    for count in range(1, 10):
        e = torch.arange(256 * count).view(256, count) % 256
        packed = ue8m0.pack(e)
        assert packed.shape == (256, -(-count // 4))
        assert torch.equal(ue8m0.unpack(packed, count), e.int())
        as_bytes = packed.view(torch.uint8)
        assert torch.equal(as_bytes[:, :count].int(), e.int())
        assert not as_bytes[:, count:].any()


def test_no_rows():
    assert ue8m0.pack(torch.zeros(0, 6, dtype=torch.int32)).shape == (0, 2)
    assert ue8m0.unpack(torch.zeros(0, 2, dtype=torch.int32), 6).shape == (0, 6)
