"""Shuffles with random access and constant memory.

``Permutation(n, seed, epoch)`` is a pseudo-random permutation of ``range(n)``. Any part of it can be asked for at
any time, without the rest, so ranks, workers and resumed runs need no common list.

Sources. For ``n`` up to 2**16 the permutation sorts distinct 64-bit hashes of the positions, which is a uniform
shuffle for random hashes. Above, it is a generalised Feistel network on the grid ``a x b >= n`` with cycle walking
(J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5). Its round function is
the finaliser of SplitMix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014;
constants: D. Stafford's Mix13), scaled to the side by the high half of a product (D. Lemire, "Fast Random Integer
Generation in an Interval", TOMACS 2019). Round keys are the BLAKE2b digest of (n, seed, epoch) (RFC 7693).
All arithmetic is on unsigned integers, so the order is equal on every platform and numpy version.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from hvdkit.arguments import whole
from hvdkit.errors import UsageError

ORDER_VERSION = 1
"""Goes up when the order for the same (n, seed, epoch) changes; saved with the plan, so that a resume notices."""

MAX_LENGTH = 2**62
_SORTED_UP_TO = 2**16  # the sorted order of that many positions fits 128 KiB as uint16
_TABLES_UP_TO = 2**30  # round functions as tables: 8 rounds x 2**15 x 4 bytes = 1 MiB; above they are computed
_GRIDS = 64
_ROUNDS = 8  # as many as the digest has 64-bit words
_BLOCK = 2**13  # intermediate arrays of 64 KiB stay in the cache and below the size that malloc maps anew each time

_U32 = npt.NDArray[np.uint32]
_U64 = npt.NDArray[np.uint64]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Permutation:
    """A permutation of ``range(n)`` that depends on ``(n, seed, epoch)`` only.

    ``n`` in [0, 2**62], ``seed`` and ``epoch`` in [0, 2**64). Holds no array of length n beyond 2**16 items.

    Raises:
        UsageError: a number is out of range or not whole.
    """

    n: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", whole("n", self.n, 0, MAX_LENGTH))
        object.__setattr__(self, "seed", whole("seed", self.seed, 0, 2**64 - 1))
        object.__setattr__(self, "epoch", whole("epoch", self.epoch, 0, 2**64 - 1))

    def __len__(self) -> int:
        return self.n

    @cached_property
    def _keys(self) -> tuple[int, ...]:
        digest = hashlib.blake2b(struct.pack("<QQQ", self.n, self.seed, self.epoch), person=b"hvdkit-order-1")
        return struct.unpack(f"<{_ROUNDS}Q", digest.digest())

    def __call__(self, indices: npt.ArrayLike) -> _I64:
        """The items at ``indices``: int64, of the shape of ``indices``.

        Raises:
            UsageError: an index is not a whole number or not in ``range(n)``.
        """
        places = np.asarray(indices)
        if places.size == 0:
            return np.empty(places.shape, np.int64)
        if places.dtype.kind not in "iu":
            raise UsageError(f"indices of type {places.dtype} were given; whole numbers were expected.")
        if int(places.min()) < 0 or int(places.max()) >= self.n:
            raise UsageError(f"indices from {places.min()} to {places.max()} were given; expected 0 to {self.n - 1}.")
        if self.n <= _SORTED_UP_TO:
            small: _I64 = _sorted_order(self.n, self._keys[0])[places].astype(np.int64)
            return small
        items = np.empty(places.size, np.int64)
        flat = places.reshape(-1)
        network = _Feistel.of(self.n, self._keys)
        for start in range(0, flat.size, _BLOCK):
            items[start : start + _BLOCK] = network.walk(flat[start : start + _BLOCK].astype(np.uint64))
        return items.reshape(places.shape)


@lru_cache(maxsize=8)
def _sorted_order(n: int, key: int) -> npt.NDArray[np.uint16]:
    """Positions sorted by their hashes. The hash is a bijection of 64-bit words, so there are no ties to break."""
    return np.argsort(_hash(np.arange(n, dtype=np.uint64), key)).astype(np.uint16)


def _hash(values: _U64, key: int) -> _U64:
    """SplitMix64 at position ``values`` of the stream that starts at ``key``: a bijection on 64-bit words."""
    z: Any = values * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    hashed: _U64 = z
    return hashed


def _round_function(values: _U64, key: int, side: int) -> _U32:
    """A keyed pseudo-random number below ``side`` <= 2**31 for each of ``values``."""
    scaled: Any = ((_hash(values, key) >> np.uint64(32)) * np.uint64(side)) >> np.uint64(32)
    noise: _U32 = scaled.astype(np.uint32)
    return noise


@dataclass(frozen=True)
class _Feistel:
    """The network on pairs (left < a, right < b), ``a * b`` barely above n; even rounds move left, odd ones right."""

    n: int
    a: int
    b: int
    keys: tuple[int, ...]
    tables: tuple[_U32, ...] | None

    @staticmethod
    @lru_cache(maxsize=2)
    def of(n: int, keys: tuple[int, ...]) -> _Feistel:
        root = math.isqrt(n - 1) + 1
        if n > _TABLES_UP_TO:
            return _Feistel(n, root, -(-n // root), keys, None)
        # of some nearly square grids the one with the fewest cells to spare: each spare cell costs further passes
        a, b = min(((a, -(-n // a)) for a in range(max(1, root - _GRIDS), root + 1)), key=math.prod)
        sides = [(b, a) if number % 2 == 0 else (a, b) for number in range(_ROUNDS)]
        tables = [
            _round_function(np.arange(one, dtype=np.uint64), k, to) for (one, to), k in zip(sides, keys, strict=True)
        ]
        return _Feistel(n, a, b, keys, tuple(tables))

    def walk(self, places: _U64) -> _U64:
        """One pass, and further passes for the few (at most one in sqrt(n)) that land at n or above."""
        items = self._encrypt(places)
        outside = np.flatnonzero(items >= self.n)
        while outside.size:
            again = self._encrypt(items[outside])
            items[outside] = again
            outside = outside[again >= self.n]
        return items

    def _encrypt(self, places: _U64) -> _U64:
        quotient = places // np.uint64(self.b)
        left = quotient.astype(np.uint32)
        right = (places - quotient * np.uint64(self.b)).astype(np.uint32)
        for number in range(0, _ROUNDS, 2):
            left += self._noise(number, right, self.a)
            np.minimum(
                left, left - np.uint32(self.a), out=left
            )  # modulo a: below a the difference wraps to a large number
            right += self._noise(number + 1, left, self.b)
            np.minimum(right, right - np.uint32(self.b), out=right)
        items: _U64 = left.astype(np.uint64) * np.uint64(self.b) + right
        return items

    def _noise(self, number: int, values: _U32, side: int) -> _U32:
        if self.tables is not None:
            return self.tables[number].take(values, mode="clip")  # clip skips a check; all values are in range
        return _round_function(values.astype(np.uint64), self.keys[number], side)
