"""Producers close groups, and withdraw members of them: a group is whole sooner, or never."""

from collections.abc import Iterable

from rollout_dispatcher.core.admission.held_pushes import HeldPushes
from rollout_dispatcher.core.buffer.buffer import SampleBuffer
from rollout_dispatcher.core.buffer.closed_groups import ClosedGroups
from rollout_dispatcher.core.buffer.dropping import Dropping
from rollout_dispatcher.core.effects import Advised, Effect
from rollout_dispatcher.core.producers.duplicates import DuplicateMemory

CLOSED = "it was closed without all of its members"
UNKNOWN = (
    "group {} is not known, so closing it changes nothing: none of its members has come, or it "
    "ended so long ago that --sample-id-horizon has it forgotten. Close a group under the group_id "
    "of its samples and after they are pushed, or before with size="
)


class Closing:
    """What producers say of groups. memory: what each has said once is not heard again."""

    def __init__(
        self,
        buffer: SampleBuffer,
        held: HeldPushes,
        closed_groups: ClosedGroups,
        dropping: Dropping,
        memory: DuplicateMemory,
    ) -> None:
        self._buffer, self._held, self._closed_groups = buffer, held, closed_groups
        self._dropping, self._memory = dropping, memory

    def close(
        self,
        group_id: str,
        size: int | None,
        keep: bool | None,
        now: float,
        *,
        said: tuple[str, int] | None,
    ) -> list[Effect]:
        """No member beyond `size` will come, or none but those that are held back.

        An incomplete group is then dropped whole, or trained on as it is: with `keep`, or if its
        size was to be told now. said: by which producer, and the number that it gave to this: it
        is heard once. A group of which nothing is known cannot be closed, and that is told.
        """
        if said is not None and not self._memory.hears_close(*said):
            return []
        groups, waiting = self._buffer.groups, self._held.members(group_id)
        keep = self._dropping.keep if keep is None else keep
        group, limits = groups.get(group_id), self._buffer.limits
        if group is None:
            if group_id in self._closed_groups:
                return []
            if size is not None and groups.may_open_empty:
                group = groups.open(group_id, size, now)
        elif size is None and (keep or group.size is None):
            size = len(group.entries) + group.lost + waiting
        if group is None:
            if not waiting:
                return [Advised(UNKNOWN.format(group_id), "" if said is None else said[0])]
            self._closed_groups.lack(group_id, CLOSED, waiting)
        elif size is None:
            self._dropping.give_up(group, CLOSED, keep=False)
        elif too_large := limits.too_large(size):
            why = f"it has {size} samples, and {too_large}"
            self._dropping.give_up(group, why)
        else:
            self._dropping.resize(group, size)
        return []

    def withdraw(
        self, group_id: str, size: int | None, producer: str, numbers: Iterable[int], now: float
    ) -> None:
        """A producer gives up these samples of a group, which will lack each of them, once."""
        for seq in numbers:
            if self._memory.refuse(producer, seq):
                why = "a member was withdrawn by its producer"
                self._dropping.lost_member(group_id, size, why, now)
