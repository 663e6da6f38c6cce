"""What each DP rank of a block has of a sample that they train together.

A sample is padded to 2 * k pieces of one length for a block of k ranks. Causal attention makes late
tokens dearer than early ones, so that with `zigzag` each rank has a piece of both ends. For k = 2:

    piece         0    1    2    3
    zigzag        r0   r1   r1   r0
    contiguous    r0   r0   r1   r1

A row predicts the next token of its sample, so a rank is sent the token behind each of its pieces.
Example: 11 tokens on 2 ranks are pieces of 3. By zigzag rank 0 trains tokens 0 to 3 and 9 to 11,
and is sent 0 to 4 and 9 to 11.
"""

from enum import StrEnum


class Slicing(StrEnum):
    """Which pieces of a sample a rank of its block has."""

    ZIGZAG = "zigzag"
    CONTIGUOUS = "contiguous"

    def pieces_of(self, rank: int, size: int) -> tuple[int, int]:
        """The two pieces that a rank has, of a block of `size`."""
        if self is Slicing.ZIGZAG:
            return rank, 2 * size - 1 - rank
        return 2 * rank, 2 * rank + 1

    def ranges(self, tokens: int, multiple: int, rank: int, size: int) -> list[tuple[int, int]]:
        """Where the tokens begin and end that a rank is sent of a sample: ascending, and apart.

        multiple: of tokens, that each piece is padded to.
        """
        piece = -(-tokens // (2 * size * multiple)) * multiple
        found = list[tuple[int, int]]()
        for at in self.pieces_of(rank, size):
            start, stop = at * piece, min((at + 1) * piece + 1, tokens)
            if start < tokens:
                if found and start <= found[-1][1]:
                    start, _ = found.pop()
                found.append((start, stop))
        return found
