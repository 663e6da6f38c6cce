"""What is shown, as values: made from the history of one dispatcher, by pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_dispatcher.cli.top.history import History, Loss
from rollout_dispatcher.cli.top.ranks import RankRow, rank_rows
from rollout_dispatcher.cli.top.reading import STAGES, Reading


@dataclass(frozen=True, slots=True)
class Away:
    """The dispatcher does not answer. since: time of day, or when this began to ask."""

    since: str
    seconds: float
    why: str


@dataclass(frozen=True, slots=True)
class Level:
    """How much of a cap is taken. cap: None where there is none that is told. window: of samples,
    where a full window lies if the cap is beyond. where: said behind an amount without its name.
    """

    name: str
    value: float
    cap: float | None
    unit: str
    window: float | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """One dispatcher at a moment. Rates are per second, over the last `over` seconds; None until
    there are two readings. losses, curves: by stage. delays: what the next step waits for, each
    with for how many seconds.
    """

    run_id: str
    version: str
    state: str
    is_ready: bool
    uptime: float
    over: float
    steps: float | None
    samples: float | None
    tokens: float | None
    steps_committed: int
    open_steps: int
    in_flight: int
    levels: tuple[Level, ...]
    open_groups: int
    delays: tuple[tuple[str, float], ...]
    losses: Mapping[str, Loss | None]
    curves: Mapping[str, Sequence[float]]
    why_not_measured: str
    staleness: float | None
    policy_version: int | None
    accepted: int
    dropped: Mapping[str, int]
    producers: int
    pushes_held: int
    backpressure: bool
    generation: int
    ranks_connected: int
    rows: tuple[RankRow, ...]

    @property
    def slow(self) -> list[RankRow]:
        """Ranks that are slower than the median, the slowest first."""
        return sorted(
            (row for row in self.rows if row.is_slow), key=lambda row: -(row.slowness or 0)
        )


def view(history: History) -> View:
    """What the newest reading shows, and what it and those before add up to."""
    at = history.last
    said = at.status
    return View(
        run_id=said["run_id"],
        version=said["version"],
        state=said["run_state"],
        is_ready=said["is_ready"],
        uptime=at.uptime,
        over=history.seconds,
        steps=history.rate("steps_committed"),
        samples=history.rate("samples_committed"),
        tokens=history.rate("dispatched_tokens"),
        steps_committed=said["steps_committed"],
        open_steps=said["open_steps"],
        in_flight=said["in_flight"],
        levels=_levels(at),
        open_groups=said["open_groups"],
        delays=tuple((each["text"], each["seconds"]) for each in said["delays"]),
        losses={stage: history.loss(stage) for stage in STAGES},
        curves={stage: tuple(points) for stage, points in history.points.items()},
        why_not_measured=said["measured"]["why_not"],
        staleness=history.staleness(),
        policy_version=said["policy_version"],
        accepted=said["accepted"],
        dropped={reason: count for reason, count in said["dropped"].items() if count},
        producers=said["producers_connected"],
        pushes_held=said["pushes_held"],
        backpressure=said["backpressure"],
        generation=said["generation"],
        ranks_connected=said["ranks_connected"],
        rows=tuple(rank_rows(history)),
    )


def _levels(at: Reading) -> tuple[Level, ...]:
    """What is ready; of tokens and bytes what is held, as their caps count it."""
    said, config = at.status, at.status["config"]
    unit = "groups" if config["dispatch_batch_groups"] else "samples"
    window, capacity = at.value("window_samples"), at.value("buffer_capacity_samples")
    ready = said.get("ready_units", said["ready"])  # without them it is one of an older release
    levels = (
        Level("ready", ready, capacity, unit, window),
        Level("tokens", said["buffered_tokens"], config["buffer_tokens"], "tokens"),
        Level("bytes", said["buffered_bytes"], config["buffer_bytes"], "B"),
    )
    if not config.get("payload_stores"):  # as with dispatchers of older releases
        return levels
    stored, cap = said["buffered_referenced_bytes"], config["referenced_bytes"]
    return (*levels, Level("stores", stored, cap, "B", where=" in payload stores"))
