"""Counting by size: a bound belongs to the bucket below it, and buckets include those before them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trio_gateway.ledger import Histogram

BOUNDS = (0.1, 1.0, 10.0)


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.11, 1.0, 5.0, 10.0, 11.0]), st.integers(0, 3))))
def test_each_bucket_has_all_that_are_not_above_it(seen: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in seen:
        if times == 1:
            histogram.see(value)
        elif times == 2:
            histogram.see_all([value, value])
        else:
            histogram.see_often(value, times)
    values = [value for value, times in seen for _ in range(times)]
    expected = {str(bound): sum(value <= bound for value in values) for bound in BOUNDS}
    assert dict(histogram.buckets()) == {**expected, "+Inf": len(values)}
    assert list(histogram.buckets())[-1][0] == "+Inf"
    assert histogram.count == len(values)
    assert abs(histogram.total - sum(values)) < 1e-9
