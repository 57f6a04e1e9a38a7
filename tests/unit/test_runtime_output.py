"""What is kept of a stream equals slicing the whole of it, however it was cut into pieces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandboxd.model import Truncate
from sandboxd.runtime.output import Capture


def kept(whole, cap, truncate):
    if len(whole) <= cap:
        return whole
    if truncate is Truncate.HEAD:
        return whole[:cap]
    if truncate is Truncate.TAIL:
        return whole[len(whole) - cap :]
    tail = cap // 2
    return whole[: cap - tail] + whole[len(whole) - tail :]


@given(
    st.lists(st.binary(max_size=40), max_size=30),
    st.integers(min_value=0, max_value=100),
    st.sampled_from(Truncate),
)
def test_equals_slicing_the_whole(pieces, cap, truncate):
    capture = Capture(cap, truncate)
    for piece in pieces:
        capture.feed(piece)
    whole = b"".join(pieces)
    result = capture.result()
    assert result.data == kept(whole, cap, truncate)
    assert result.total_bytes == len(whole)
    assert result.truncated == (len(whole) > cap)


@pytest.mark.parametrize("truncate", Truncate)
def test_single_bytes_cost_no_more_than_the_cap(truncate):
    capture = Capture(1000, truncate)
    for n in range(50_000):
        capture.feed(bytes((n % 251,)))
    assert len(capture._head) + len(capture._tail) == 1000
    assert capture.result().data == kept(bytes(n % 251 for n in range(50_000)), 1000, truncate)


def test_nothing_written_is_nothing_kept():
    result = Capture(10, Truncate.BOTH).result()
    assert (result.data, result.total_bytes, result.truncated) == (b"", 0, False)
