"""Collectives that happen unseen: counted, so that nobody mistakes a wait in them for compute.

Every process group numbers its collectives. Where that number moves in a micro-batch, and not while
somebody timed what the rank was blocked for, there was a collective that looks like compute: all
ranks would look alike, and it has to be said instead.
"""

from typing import Any

import torch.distributed as dist

#: Of no group.
NONE: frozenset[str] = frozenset()


class Collectives:
    """Looks at the process groups that several DP ranks are in.

    dp_ranks: global ranks of the DP ranks; None where every process is one. groups: those of them
        that count their collectives; while there are none, nobody need `look`.
    """

    def __init__(self, dp_ranks: frozenset[int] | None) -> None:
        self._dp_ranks = dp_ranks
        self.groups: list[dist.ProcessGroup] = []
        self._joined = self._known = 0
        self._numbers: list[int] = []
        self._common: tuple[dist.ProcessGroup, ...] = ()

    def cannot_be_seen(self, *, probed: bool) -> str:
        """Why nobody could tell whether there are any; "" if somebody can.

        probed: whether there are models that tell what they wait for.
        """
        if not self._joined:
            return "there is no process group with other DP ranks to see collectives of"
        if len(self.groups) < self._joined and not probed:
            return "a process group does not count its collectives"
        return ""

    def find_groups(self) -> None:
        """Look for groups again, if there are others than before."""
        if not (dist.is_available() and dist.is_initialized()):
            self.groups, self._joined, self._known = [], 0, 0
            self._common = ()
            return
        groups = list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001  there is no other list
        if len(groups) != self._known:
            self._known = len(groups)
            joined = [group for group in groups if self._joins_dp_ranks(group)]
            self._joined, self.groups = len(joined), [*filter(_counts, joined)]
            self._common = tuple(filter(self._joins_all, self.groups))

    def look(self) -> None:
        """What there was up to now is known."""
        self._numbers = [_number(group) for group in self.groups]

    def since(self, forgiven: dist.ProcessGroup | None = None) -> frozenset[str]:
        """Names of the groups that had collectives since `look`, but for one."""
        if not self.groups:
            return NONE
        return frozenset(
            group.group_desc or group.group_name
            for group, before in zip(self.groups, self._numbers, strict=False)
            if group is not forgiven and _number(group) != before
        )

    def begun(self) -> int:
        """How many there were so far in groups that every DP rank is in; from any thread.

        A rank that hangs before a collective has begun fewer than those that wait for it there.
        """
        return sum(map(_number, self._common))

    def _joins_all(self, group: dist.ProcessGroup) -> bool:
        ranks = set(dist.get_process_group_ranks(group))
        every = range(dist.get_world_size()) if self._dp_ranks is None else self._dp_ranks
        return ranks.issuperset(every)

    def _joins_dp_ranks(self, group: dist.ProcessGroup) -> bool:
        ranks = set(dist.get_process_group_ranks(group))
        return len(ranks if self._dp_ranks is None else ranks & self._dp_ranks) > 1


def _number(group: Any) -> int:
    """Of its last collective."""
    return int(group._get_sequence_number_for_group())  # noqa: SLF001


def _counts(group: dist.ProcessGroup) -> bool:
    try:
        _number(group)
    except RuntimeError:  # its backend does not
        return False
    return True
