"""Totals over the DP ranks: a collective that every rank leaves with the same, or with an error.

What can fail on one rank is computed before, and told to the others where they wait:

    compute --> all_gather [failed?, length, what] --> all agree --> all_reduce float64
                                    |
                                    +--> one failed, or they differ: all_gather of words, all raise

A rank waits without being deaf: what ends its stream meanwhile, as the loss of another rank does,
ends the wait.
"""

from collections.abc import Callable
from time import monotonic, sleep
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rollout_dispatcher.errors import ConfigError, PeerFailed
from rollout_workers.micro_batch.loss.normalisers.base import FloatArray
from rollout_workers.process_group import MESSAGE_BYTES, Place, device_of, initialised

#: How long a rank that has failed waits for the others to hear why.
PATIENCE_S = 10.0
#: Between two looks at whether the others have come: from the first to the second.
POLLS_S = 20e-6, 2e-3


def require_group(what: str, place: Place, group: dist.ProcessGroup | None) -> None:
    """Raise ConfigError if there is no process group of exactly the DP ranks to add up in."""
    if place.dp_size == 1:
        return
    need = f"{what} takes a total over {place.dp_size} DP ranks"
    if not initialised():
        raise ConfigError(
            f"{need}, and there is no process group to add it up in: call "
            "torch.distributed.init_process_group() before the stream is made"
        )
    here = Place(dist.get_rank(group), dist.get_world_size(group))
    if here != place:
        which = "the default process group" if group is None else "process_group"
        raise ConfigError(
            f"{need}: this is DP rank {place.dp_rank}, but rank {here.dp_rank} of {here.dp_size} "
            f"in {which}; pass process_group= with the DP ranks in their order"
        )


class RankTotals:
    """Adds up over the DP ranks of one stream.

    check: raises what has ended the stream for good.
    """

    def __init__(
        self, place: Place, group: dist.ProcessGroup | None, check: Callable[[], None]
    ) -> None:
        self._place, self._group, self._check = place, group, check

    def total(self, what: str, local: Callable[[], FloatArray]) -> FloatArray:
        """The sum of what every rank has, float64 of the same length; call it on every DP rank.

        what: the same on all of them, or they differ. Raises what `local` raises, PeerFailed where
        another rank's failed or is of another length, and what ended the stream.
        """
        if self._place.dp_size == 1:
            return local()
        require_group(what, self._place, self._group)
        try:
            values = np.asarray(local(), np.float64)
        except Exception as error:
            self._tell(what, error)
            raise
        self._agree(what, values)
        total = torch.from_numpy(values.copy()).to(device_of(self._group))
        self._wait(dist.all_reduce(total, group=self._group, async_op=True), self._check)
        found: FloatArray = total.cpu().numpy()
        return found

    # -- agreeing

    def _agree(self, what: str, values: FloatArray) -> None:
        rows = self._gathered(_status(what, len(values)), self._check)
        if bool((rows == rows[0]).all()):
            return
        words = self._words(f"takes {what} ({len(values)} long)", self._check)
        failed = [rank for rank, row in enumerate(rows.tolist()) if row[0]]
        who = failed or range(self._place.dp_size)
        said = "; ".join(f"DP rank {rank} {words[rank]}" for rank in who)
        if failed:
            raise PeerFailed(f"{what}: {said}")
        raise PeerFailed(f"the DP ranks do not take the same total: {said}")

    def _tell(self, what: str, error: Exception) -> None:
        """Tell the others why there will be no total, if they come to hear it."""
        until = monotonic() + PATIENCE_S

        def patience() -> None:
            if monotonic() > until:
                raise error

        self._gathered(_status(what, 0, failed=True), patience)
        self._words(f"failed: {type(error).__name__}: {error}", patience)

    def _words(self, text: str, check: Callable[[], None]) -> list[str]:
        data = text.encode()[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")
        rows = self._gathered(torch.frombuffer(bytearray(data), dtype=torch.uint8), check)
        return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows.tolist()]

    # -- waiting

    def _gathered(self, row: Tensor, check: Callable[[], None]) -> Tensor:
        """One row a rank."""
        row = row.to(device_of(self._group))
        rows = [torch.empty_like(row) for _ in range(self._place.dp_size)]
        self._wait(dist.all_gather(rows, row, group=self._group, async_op=True), check)
        return torch.stack(rows).cpu()

    def _wait(self, work: dist.Work | None, check: Callable[[], None]) -> None:
        assert work is not None, "this rank is in the group"
        pause, longest = POLLS_S
        while not work.is_completed():
            check()
            sleep(pause)
            pause = min(2 * pause, longest)
        work.wait()


def _status(what: str, length: int, *, failed: bool = False) -> Tensor:
    return torch.tensor([int(failed), length, crc32(what.encode())])
