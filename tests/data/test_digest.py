import hashlib

import numpy as np
import pytest

from dubito.data.digest import hash_array, hash_bytes, hash_images, hash_parts, in_threads
from dubito.storage import encode


def test_parts_are_told_apart_by_their_borders():
    assert hash_parts(b"ab", b"c") != hash_parts(b"a", b"bc")
    assert hash_parts(b"") != hash_parts()


def test_blocks_are_joined():
    assert hash_bytes(b"ab", b"c") == hashlib.blake2b(b"abc", digest_size=16).digest()


def test_arrays_differ_by_type_shape_and_values():
    zeros = np.zeros((2, 3), np.uint8)
    others = [zeros.reshape(3, 2), zeros.astype(np.int8), zeros + np.uint8(1)]
    assert len({hash_array(array) for array in [zeros, *others]}) == 4
    assert hash_array(np.asfortranarray(zeros)) == hash_array(zeros)


@pytest.mark.parametrize("n", [1, 127, 128, 129, 1000])
def test_images_are_hashed_in_order_whatever_the_threads_do(n: int):
    ids = [f"{i}.png" for i in range(n)]
    expected = hash_bytes(*(hash_parts(key.encode(), b"%d" % i) for i, key in enumerate(ids))).hex()
    assert hash_images(ids, in_threads(lambda row: b"%d" % row, range(n))) == expected


def test_an_error_in_a_thread_reaches_the_caller():
    with pytest.raises(ZeroDivisionError):
        in_threads(lambda row: b"%d" % (1 // row), range(129))


def test_names_that_are_no_utf8_have_bytes():
    assert encode(b"caf\xe9.jpg".decode("utf-8", "surrogateescape")) == b"caf\xe9.jpg"
