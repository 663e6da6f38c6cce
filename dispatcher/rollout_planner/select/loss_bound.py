"""How far the loss tokens of a step may stray from those that arrivals have.

Under `token-mean` a token of a step with twice the loss tokens counts half as much. A selection
that lets the longest samples leave together halves their weight; one that keeps each step's loss
tokens within a share v of the mean gives every sample a weight between 1/(1+v) and 1/(1-v).

Invariant: what is due goes, whatever its loss tokens. Everything else is exchanged, as few samples
as can be, until the step is within the bound or nothing that brings it nearer is left.

Example, mean 3 and v = 1/3: a step of 9 9 1 1 has 20 loss tokens where 8 to 16 may be. One of the
9s stays behind, and a 2 leaves instead: 9 2 1 1.
"""

from dataclasses import dataclass

import numpy as np

from rollout_planner.types import BoolArray, FloatArray, IntArray, PlanConfig, Window


@dataclass(frozen=True, slots=True)
class LossBound:
    """above: float64[n], loss tokens of each item beyond those of as many mean samples. most: what
    the items of a step may sum up to, above or below 0.
    """

    above: FloatArray
    most: float

    @classmethod
    def of(
        cls, window: Window, config: PlanConfig, take: float, index: IntArray | None = None
    ) -> "LossBound | None":
        """For a step of `take` samples; None where there is no bound.

        index: group of each sample, where items are groups.
        """
        tokens, share = window.loss_tokens, config.max_step_variation
        if tokens is None or share is None:
            return None
        usual = window.usual_loss_tokens
        mean, deviation = usual or (float(tokens.mean()), float(tokens.std()))
        most = max(share * mean * take, deviation * float(np.sqrt(take)))
        above = tokens.astype(np.float64) - mean
        held = above if index is None else np.bincount(index, weights=above).astype(np.float64)
        return cls(held, most)

    def due(self, left: IntArray, forced: BoolArray, take: int) -> BoolArray:
        """What goes now beside what is forced, so that no later step has to carry too much.

        For every j, what has at most j skips left leaves within j + 1 steps, which carry `most`
        each: what is beyond j * most goes now, the most urgent first.
        """
        order = np.argsort(left, kind="stable")
        sums, heavy = self.above[order].cumsum(), self.above[order] > 0
        later = np.maximum(left[order], 0) * self.most
        need = float(np.maximum.reduce(sums - later, initial=0.0))
        if need <= 0:
            return forced
        going = np.where(heavy, self.above[order], 0.0).cumsum() - self.above[order]
        due = forced.copy()
        due[order[heavy & (going < min(need, self.most))]] = True
        return due if np.count_nonzero(due) <= take else forced

    def within(self, keep: BoolArray, forced: BoolArray) -> BoolArray:
        """The same number of items, within the bound, or as near to it as exchanging brings them.

        Heavy items change places with light ones: with those that wait longest, or that came last
        if they are to stay. The least heavy are the first to be exchanged, as the others are
        company for each other; where all of them are not enough the heaviest are.
        """
        total = float(self.above[keep].sum())
        over = abs(total)
        if over <= self.most:
            return keep
        free, others = np.flatnonzero(keep & ~forced), np.flatnonzero(~keep)
        heavy, light = (free, others) if total > 0 else (others, free[::-1])
        heavy, light = heavy[self.above[heavy] > 0], light[self.above[light] <= 0]
        heavy = heavy[np.argsort(self.above[heavy], kind="stable")]
        found, n = keep.copy(), min(len(heavy), len(light))
        best, least = heavy[:0], over
        for order in (heavy[:n], heavy[::-1][:n]):
            left = np.abs(over - (self.above[order] - self.above[light[:n]]).cumsum())
            reached = np.flatnonzero(left <= self.most)
            at = int(reached[0]) if len(reached) else int(left.argmin()) if n else 0
            if n and left[at] < least:
                best, least = order[: at + 1], float(left[at])
            if least <= self.most:
                break
        found[best], found[light[: len(best)]] = total < 0, total > 0
        return found
