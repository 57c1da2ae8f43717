"""A shuffled order that needs no memory: where each number goes can be asked for alone.

A Feistel network permutes the numbers below a power of four; walking on until the result is below `size` makes it a
permutation of those (cycle walking, Black and Rogaway, CT-RSA 2002). Unlike a random generator's shuffle it is the same
for every version of every library.
"""

from __future__ import annotations

import hashlib

_ROUNDS = 4


def permuted(number: int, size: int, key: str) -> int:
    """Where `number` lies in the order that `key` names; a permutation of 0 .. size - 1."""
    assert 0 <= number < size, (number, size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    while True:
        number = _feistel(number, half_bits, key)
        if number < size:
            return number


def _feistel(number: int, half_bits: int, key: str) -> int:
    mask = (1 << half_bits) - 1
    left, right = number >> half_bits, number & mask
    for index in range(_ROUNDS):
        digest = hashlib.blake2b(f"{key}:{index}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ int.from_bytes(digest, "big") & mask
    return left << half_bits | right
