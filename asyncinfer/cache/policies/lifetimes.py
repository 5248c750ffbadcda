"""`Lifetimes`: how soon blocks of one kind are used again, learned from those that were."""

from __future__ import annotations

from math import exp
from typing import Final

__all__ = ["AGES", "Lifetimes", "age_class", "age_start"]

#: Ages fall into classes: the first below 64 ticks, then two to an octave.
FIRST_BITS: Final = 6
AGES: Final = 44
#: The assumption before any observation: the older an unused block is, the less likely it is used
#: again. It weighs as much as one block observed at every age.
PRIOR: Final = 0.2
PRIOR_AGE: Final = 1000
#: Calls of `ended` after which what was learned counts half.
MEMORY: Final = 20_000


def age_class(age: int) -> int:
    """The class of an age in ticks."""
    bits = age.bit_length()
    if bits <= FIRST_BITS:
        return 0
    return min(2 * (bits - FIRST_BITS) - 1 + (age >> (bits - 2) & 1), AGES - 1)


def age_start(number: int) -> int:
    """The lowest age of a class."""
    if not number:
        return 0
    octave, half = divmod(number - 1, 2)
    return (2 + half) << (FIRST_BITS + octave - 1)


_WIDTHS: Final = [age_start(j + 1) - age_start(j) for j in range(AGES)]


class Lifetimes:
    """Statistics of the time from a block's release to its next use.

    `density[j]` is what keeping a block of age class `j` earns: hits per tick of its room, up to
    the age at which giving it up is best. That is Gittins' index of the block (Gittins, "Bandit
    processes and dynamic allocation indices", JRSS B 1979), and the hit density of Beckmann,
    Chen and Cidon, "LHD: improving cache hit rate by maximizing hit density", NSDI 2018, with
    the stopping time chosen instead of observed.
    """

    def __init__(self) -> None:
        self._hits = [0.0] * AGES
        self._ends = [0.0] * AGES
        self._count = 0.0
        self.density = self._densities()

    def ended(self, age: int, hit: bool) -> None:
        """A block was used again at this age; or it was given up and forgotten at this age."""
        j = age_class(age)
        self._ends[j] += 1
        if hit:
            self._hits[j] += 1
        self._count += 1

    def learn(self) -> None:
        """Bring `density` up to date: about 1,000 multiplications."""
        if self._count > MEMORY:
            self._count /= 2
            self._hits = [count / 2 for count in self._hits]
            self._ends = [count / 2 for count in self._ends]
        self.density = self._densities()

    def _densities(self) -> list[float]:
        unused = self._unused()
        best = []
        for j in range(AGES):
            alive, room, most = 1.0, 0.0, 0.0
            for k in range(j, AGES):
                after = alive * unused[k]
                room += _WIDTHS[k] * (alive + after) / 2
                alive = after
                most = max(most, (1.0 - alive) / room)
            best.append(most)
        return best

    def _unused(self) -> list[float]:
        """For each age class, the probability of passing through it without a use. The rate is
        hits over the time that blocks were watched at that age (an actuarial life table), so
        that those given up early do not count as never used."""
        survivors, chances = 0.0, [0.0] * AGES
        for j in reversed(range(AGES)):
            width = _WIDTHS[j]
            watched = width * (1.0 + survivors + self._ends[j] / 2)
            expected = PRIOR * width / (age_start(j) + PRIOR_AGE)
            chances[j] = exp(-width * (self._hits[j] + expected) / watched)
            survivors += self._ends[j]
        return chances
