"""Chain keys: what names a full block of tokens together with everything before it.

    key[j] = BLAKE2b(key[j - 1] || token ids of block j),    key[-1] = BLAKE2b(scope, adapter)

keyed with a secret of the engine's own (RFC 7693), so that nobody outside can construct a
collision or guess the keys of another namespace. Pure functions: a prompt of 32,768 tokens has
2,048 blocks, and its keys are best computed before the request reaches the engine's thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

__all__ = ["TOKEN_BYTES", "BlockHasher", "chain_keys", "pack", "unpack"]

DIGEST_SIZE = 16
TOKEN_BYTES = array("i").itemsize
#: Blocks hashed between two calls of `pause`: a fifth of a millisecond.
PIECE = 256


def pack(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes, `TOKEN_BYTES` each: what is hashed and what is compared."""
    return array("i", tokens).tobytes()


def unpack(data: bytes) -> list[int]:
    """The token ids that were packed."""
    return array("i", data).tolist()


class BlockHasher:
    """Makes the keys of one cache. Stateless, so usable from any thread.

    Tests override `digest` to force collisions.
    """

    def __init__(self, block_size: int, secret: bytes) -> None:
        self.block_size = block_size
        # Copying a state that has absorbed the secret is cheaper than keying a new one.
        self._keyed = blake2b(key=secret, digest_size=DIGEST_SIZE)

    def digest(self, data: bytes) -> bytes:
        state = self._keyed.copy()
        state.update(data)
        return state.digest()

    def root(self, scope: str, adapter: str) -> bytes:
        """The key before the first block. Scopes and adapters share nothing."""
        name = scope.encode("utf-8", "surrogatepass")
        rest = adapter.encode("utf-8", "surrogatepass")
        return self.digest(len(name).to_bytes(8, "little") + name + rest)

    def next(self, parent: bytes, data: bytes) -> bytes:
        """The key of a block of packed tokens after the block `parent`."""
        return self.digest(parent + data)

    def keys(
        self,
        tokens: Sequence[int],
        scope: str = "",
        adapter: str = "",
        pause: Callable[[], object] | None = None,
    ) -> list[bytes]:
        """Keys of every full block of `tokens`, in order. `pause` is called between any two
        pieces of `PIECE` blocks, so that a thread can let others run."""
        piece, width = PIECE * self.block_size, self.block_size * TOKEN_BYTES
        key, keys = self.root(scope, adapter), []
        for first in range(0, len(tokens), piece):
            if first and pause is not None:
                pause()
            data = pack(tokens[first : first + piece])
            for start in range(0, len(data) - width + 1, width):
                key = self.next(key, data[start : start + width])
                keys.append(key)
        return keys


def chain_keys(
    tokens: Sequence[int], block_size: int, secret: bytes, scope: str = "", adapter: str = ""
) -> list[bytes]:
    """Keys of every full block of `tokens`, in order."""
    return BlockHasher(block_size, secret).keys(tokens, scope, adapter)
