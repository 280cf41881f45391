import doctest
import importlib

import pytest
import torch

from expertwire.errors import InvalidArgument
from expertwire.formats import BF16, FP8Block, LogFMT10, WireFormat

ALL = [
    BF16(),
    FP8Block(),
    FP8Block(block=32, scale="ue8m0"),
    FP8Block(scale="ue8m0", sf_layout="column"),
    LogFMT10(),
]
HIDDENS = [8, 24, 128, 768, 2880, 7168]


def test_every_bit_survives():
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    payload, sf = BF16().encode(x)
    back = BF16().decode_bfloat16(payload, sf, 256)
    assert sf is None
    assert torch.equal(back.view(torch.int16), x.view(torch.int16))


def test_bf16_has_no_scale_factors():
    x = torch.zeros(2, 8, dtype=torch.bfloat16)
    with pytest.raises(InvalidArgument, match="no scale factors"):
        BF16().decode_bfloat16(x, torch.zeros(2, 1), 8)


@pytest.mark.parametrize("wire", ALL, ids=str)
@pytest.mark.parametrize("hidden", HIDDENS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_sizes_and_dtypes_are_the_announced_ones(wire, hidden, rows):
    x = torch.randn(rows, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16()
    payload, sf = wire.encode(x)
    assert isinstance(wire, WireFormat)
    assert payload.dtype == wire.payload_dtype
    assert payload.is_contiguous()
    assert payload.nbytes == rows * wire.payload_bytes(hidden)
    assert (0 if sf is None else sf.numel() * sf.element_size()) == rows * wire.sf_bytes(hidden)
    assert (None if sf is None else sf.dtype) == wire.sf_dtype
    exact = wire.decode_float32(payload, sf, hidden)
    assert exact.shape == (rows, hidden)
    assert exact.dtype == torch.float32
    assert torch.equal(wire.decode_bfloat16(payload, sf, hidden), exact.bfloat16())


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_a_row_is_encoded_by_itself_whatever_its_strides(wire):
    x = torch.randn(7, 768, generator=torch.Generator().manual_seed(1)).bfloat16()
    payload, sf = wire.encode(x)
    transposed, _ = wire.encode(x.t().contiguous().t())
    assert torch.equal(transposed.view(torch.uint8), payload.view(torch.uint8))
    for row in range(7):
        one, one_sf = wire.encode(x[row : row + 1])
        assert torch.equal(one.view(torch.uint8), payload[row : row + 1].view(torch.uint8))
        if sf is not None:
            assert torch.equal(one_sf, sf[row : row + 1])


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_wrong_tensors_are_refused(wire):
    with pytest.raises(InvalidArgument, match="must be bfloat16"):
        wire.encode(torch.zeros(2, 128))
    for shape in ((128,), (2, 0), (1, 2, 128)):
        with pytest.raises(InvalidArgument, match="must be \\[num_tokens"):
            wire.encode(torch.zeros(shape, dtype=torch.bfloat16))
    payload, sf = wire.encode(torch.zeros(2, 256, dtype=torch.bfloat16))
    with pytest.raises(InvalidArgument, match="payload must be"):
        wire.decode_bfloat16(payload, sf, 128)
    if sf is not None:
        for wrong in (None, sf[:1], sf.double()):
            with pytest.raises(InvalidArgument, match="sf must be"):
                wire.decode_bfloat16(payload, wrong, 256)


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_encoding_leaves_no_autograd_edge(wire):
    x = torch.ones(2, 128, dtype=torch.bfloat16, requires_grad=True)
    payload, sf = wire.encode(x)
    assert not payload.requires_grad
    assert sf is None or not sf.requires_grad


def test_formats_are_values():
    assert FP8Block() == FP8Block(block=128, scale="float32", sf_layout="row", decode=False)
    assert len({BF16(), BF16(), LogFMT10(), LogFMT10(), FP8Block(), FP8Block(scale="ue8m0")}) == 4
    assert [wire.name for wire in ALL] == ["bf16", "fp8_f32", "fp8_ue8m0_b32", "fp8_ue8m0", "logfmt10"]


@pytest.mark.parametrize("module", ["wire", "bf16", "fp8", "ue8m0", "logfmt"])
def test_docstring_examples(module):
    assert doctest.testmod(importlib.import_module(f"expertwire.formats.{module}")).failed == 0
