"""What a cache policy costs per block, by the number of blocks it ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from time import thread_time

from asyncinfer.cache import metadata
from asyncinfer.protocols import CachedBlock, CapacityAware, EvictionPolicy

__all__ = ["policy_cost"]

#: Blocks of a prompt.
PROMPT = 16


def policy_cost(policy: EvictionPolicy, blocks: int, churn: int = 20_000) -> float:
    """CPU seconds of the policy per block that passes through a full cache. For each block the
    policy names a victim, forgets it, and is told of a new block, published and released. Every
    fourth prompt is used again and released.

    Args:
        policy: a new one.
        blocks: evictable blocks, at least 64.
        churn: blocks to pass through once it is full.
    """
    if isinstance(policy, CapacityAware):
        policy.opened(blocks)
    cache = _FullCache(policy, blocks)
    for _ in range(blocks // PROMPT):
        cache.admit(PROMPT)
    cache.turn_over(churn // 10)
    before = thread_time()
    done = cache.turn_over(churn)
    return (thread_time() - before) / done


class _FullCache:
    def __init__(self, policy: EvictionPolicy, blocks: int) -> None:
        self._policy = policy
        self._free = list(range(blocks))
        self._blocks: dict[int, CachedBlock] = {}
        self._prompts: deque[list[CachedBlock]] = deque()
        self._time = 0
        self._keys = self._new_keys()

    def admit(self, count: int) -> None:
        """Publish and release a prompt of so many blocks."""
        prompt: list[CachedBlock] = []
        for depth in range(count):
            above = prompt[-1] if prompt else None
            parent = None if above is None else above.block
            block = metadata.make_block(
                self._free.pop(), parent, depth, 16, scope="", key=next(self._keys)
            )
            if above is not None:
                metadata.set_children(above, 1)
            self._touch(block)
            metadata.set_created(block, self._time)
            prompt.append(block)
            self._blocks[block.block] = block
            self._policy.published(block)
        self._prompts.append(prompt)
        self._release(prompt)

    def turn_over(self, count: int) -> int:
        done = 0
        while done < count:
            freed = self._policy.victims(PROMPT)
            for number in freed:
                block = self._blocks.pop(number)
                above = None if block.parent is None else self._blocks.get(block.parent)
                if above is not None:
                    metadata.set_children(above, above.children - 1)
                self._policy.removed(block)
                self._free.append(number)
            done += len(freed)
            self.admit(len(freed))
            if len(self._prompts) % 4 == 0:
                self._use_again()
        return done

    def _use_again(self) -> None:
        """Reuse and release the oldest prompt, as far as it is still cached."""
        prompt = [b for b in self._prompts.popleft() if self._blocks.get(b.block) is b]
        for block in prompt:
            metadata.set_uses(block, block.uses + 1)
            self._touch(block)
            self._policy.reused(block)
        self._release(prompt)

    def _release(self, prompt: list[CachedBlock]) -> None:
        for block in reversed(prompt):
            self._touch(block)
            self._policy.released(block)

    def _touch(self, block: CachedBlock) -> None:
        self._time += 1
        metadata.set_last_use(block, self._time)
        metadata.set_now(block, self._time * 1e-4)

    @staticmethod
    def _new_keys() -> Iterator[bytes]:
        number = 0
        while True:
            number += 1
            yield number.to_bytes(16, "little")
