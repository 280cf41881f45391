"""Comparison and data of the test kit."""

import pytest
import torch

from expertwire.testing import assert_equal, data, first_mismatch


def test_mismatch_says_where():
    expected = torch.zeros(3, 4, dtype=torch.bfloat16)
    seen = expected.clone()
    seen[1, 2], seen[2, 0] = 1.5, 2.0
    with pytest.raises(AssertionError) as caught:
        assert_equal(seen, expected, "x of rank 3")
    assert str(caught.value) == ("x of rank 3: first difference at row 1, column 2: expected 0.0, seen 1.5; 2 of 12")
    assert first_mismatch(seen, seen) is None


def test_comparison_is_bitwise_but_for_nan():
    with pytest.raises(AssertionError, match="row 0"):
        assert_equal(torch.tensor([-0.0]), torch.tensor([0.0]))
    quiet = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_equal(quiet[:1], quiet[1:])
    with pytest.raises(AssertionError, match="expected 1, seen 2"):
        assert_equal(torch.tensor([2]), torch.tensor([1]))


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (None, torch.zeros(2)),
        (torch.zeros(2), None),
    ],
)
def test_shape_and_dtype_must_agree(seen, expected):
    with pytest.raises(AssertionError, match="t: expected"):
        assert_equal(seen, expected, "t")


def test_empty_and_float8():
    assert_equal(torch.empty(0, 8), torch.empty(0, 8))
    assert_equal(None, None)
    octets = torch.tensor([[1, 0x7F, 0xFF]], dtype=torch.uint8)
    other = torch.tensor([[1, 0xFF, 0x7F]], dtype=torch.uint8)  # both are NaN
    assert_equal(octets.view(torch.float8_e4m3fn), other.view(torch.float8_e4m3fn))


def test_payload():
    assert data.payload(1, 2, 4).tolist() == [[-3.0, -2.0, -1.0, 0.0], [0.0, 1.0, 2.0, 3.0]]


def test_routings_have_their_shape_and_range():
    for make in (data.uniform_routing, data.skewed_routing, data.repeated_routing):
        topk_idx = make(1, 200, 4, 16)
        assert topk_idx.shape == (200, 4)
        assert topk_idx.dtype == torch.int64
        assert 0 <= topk_idx.min() <= topk_idx.max() < 16
        assert torch.equal(topk_idx, make(1, 200, 4, 16))
        assert not torch.equal(topk_idx, make(2, 200, 4, 16))
        repeats = any(len(set(row)) < 4 for row in topk_idx.tolist())
        assert repeats == (make is data.repeated_routing)
    counts = torch.bincount(data.skewed_routing(1, 200, 4, 16).flatten(), minlength=16)
    assert counts[0] > 2 * counts[8]
    assert data.round_robin(1, 2, 3, 4).tolist() == [[1, 2, 3], [2, 3, 0]]
    holes = data.with_holes(data.round_robin(0, 10, 3, 4), seed=0)
    assert (holes[4] == -1).all()
    assert (holes == -1).any(dim=1).sum() < 10


def test_random_numbers_are_reproducible():
    assert torch.equal(data.random_rows(3, 5, 8), data.random_rows(3, 5, 8))
    weights = data.random_weights(3, 5, 8)
    assert weights.dtype == torch.float32
    assert torch.allclose(weights.sum(dim=1), torch.ones(5))
