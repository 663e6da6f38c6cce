"""What goes wrong in the runs that alerts are tested on, and which alerts that is.

Rules count in minutes, and real runs of that length are no tests. So a run is scraped each second
where Prometheus would do so every 15 (`SCALE`), and the rules are tested with all their durations
divided by that. Values are as they were.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.alerts.process import Process
from tests.deploy.runs import (
    BATCH,
    Run,
    long_lengths,
    mixed_lengths,
    tailed_lengths,
    unwieldy_lengths,
)

#: Scrapes each 15 s, in a run in which they come each second.
SCALE = 15
#: Seconds of every run in which all is well.
WELL_S = 30


@dataclass(slots=True)
class Scene:
    """What a scenario has its hands on."""

    run: Run
    server: Process
    folder: Path


@dataclass(frozen=True, slots=True)
class Scenario:
    """A run that goes well at first, and then not.

    trouble: what happens each second after that, given how many have passed. lasts: so long.
    options: other than `runs.OPTIONS`. fires: all alerts that are
    firing at its end; clears: that are when half of the trouble has passed, and not at its end.
    disk: with a journal on a small disk of its own. slow_disk: with one on a disk that `trouble`
    may slow down. breaks: clients lose the dispatcher. begins: conditions of all of the run,
    unless changed.
    """

    trouble: Callable[[Scene, int], None]
    fires: frozenset[str] = frozenset()
    lasts: int = 75
    options: Mapping[str, object] = field(default_factory=dict)
    clears: frozenset[str] = frozenset()
    disk: bool = False
    slow_disk: bool = False
    breaks: bool = False
    begins: Mapping[str, Any] = field(default_factory=dict)


def at_once(**conditions: object) -> Callable[[Scene, int], None]:
    """The run goes on under these conditions."""

    def change(scene: Scene, second: int) -> None:
        if second == 0:
            for name, value in conditions.items():
                setattr(scene.run.now, name, value)

    return change


def nothing(_: Scene, __: int) -> None:
    """All stays well."""


def pause(scene: Scene, second: int) -> None:
    """Twelve minutes of evaluation, and then it goes on; producers do not stop."""
    scene.run.now.paused, scene.run.now.push_s = second < 48, 0.6


def weight_syncs(scene: Scene, second: int) -> None:
    """A minute of every three."""
    scene.run.now.paused = second % 12 < 4


def kill(scene: Scene, second: int) -> None:
    """It is gone, and nobody starts it again."""
    if second == 0:
        scene.server.kill()


def restarts(scene: Scene, second: int) -> None:
    """It dies every two minutes, and a supervisor starts it."""
    if second % 8 == 0:
        scene.server.kill()
        scene.server.start()


def lose_a_rank(scene: Scene, second: int) -> None:
    """One of the ranks dies, and the others do not notice."""
    if second == 0:
        scene.run.now.silent_rank = 3
        scene.run.ranks[3].close()


def stutter(scene: Scene, second: int) -> None:
    """Its machine stands still again and again."""
    scene.server.stop_for(0.7)


def drop_for_a_while(scene: Scene, second: int) -> None:
    """Seven minutes, and then all is well again."""
    scene.run.now.old_every = 4 if second < 30 else None


def slow_the_disk(scene: Scene, second: int) -> None:
    """Each sync takes a second."""
    if second == 0:
        (scene.folder / "slow").touch()


def fill_the_disk(scene: Scene, second: int) -> None:
    """Others take all the room that there is, while longer samples come."""
    scene.run.now.lengths, scene.run.now.push_s = long_lengths, 0.1
    if second == 0:
        others = scene.folder / "disk" / "others"
        with contextlib.suppress(OSError), others.open("wb", buffering=0) as file:
            while file.write(bytes(1 << 16)):  # until there is no space left on the device
                pass


SCENARIOS: dict[str, Scenario] = {
    "healthy": Scenario(nothing, lasts=90),
    "pause": Scenario(pause, lasts=90, options={"buffer_capacity": 2 * BATCH}),
    "weight_syncs": Scenario(weight_syncs, lasts=90),
    "not_separated": Scenario(at_once(separated=False, slow_rank=2), lasts=90),
    # A quarter of an hour a step, and no sample comes meanwhile.
    "in_turn": Scenario(nothing, lasts=120, begins={"in_turn": True, "step_s": 60.0}),
    "down": Scenario(kill, frozenset({"DispatcherDown"}), 20, breaks=True),
    "restarts": Scenario(restarts, frozenset({"RestartLoop"}), 40, breaks=True),
    "stalled": Scenario(
        at_once(pushing=False), frozenset({"DispatcherStalled", "RanksStarved"}), 60
    ),
    "journal": Scenario(fill_the_disk, frozenset({"JournalFailing"}), 20, disk=True),
    "ranks_missing": Scenario(
        lose_a_rank, frozenset({"RanksMissing", "RankSilent"}), 60, breaks=True
    ),
    # Taken for hung after 30 s of real time, 7 minutes and a half in the time of the rules.
    "rank_hung": Scenario(at_once(hung_rank=2), frozenset({"RankHung"}), 60),
    "rank_silent": Scenario(at_once(silent_rank=1), frozenset({"RankSilent"}), 45),
    "rank_slow": Scenario(at_once(slow_rank=2), frozenset({"RankSlow", "RankTimeLost"}), 110),
    # The same in a run whose steps take eleven minutes.
    "long_steps": Scenario(
        nothing,
        frozenset({"RankSlow", "RankTimeLost"}),
        175,
        begins={"slow_rank": 2, "step_s": 32.0},
    ),
    "starved": Scenario(at_once(push_s=2.0), frozenset({"RanksStarved"}), 90),
    "backpressure": Scenario(
        at_once(push_s=0.0), frozenset({"Backpressure"}), 110, {"buffer_capacity": 2 * BATCH}
    ),
    "dropped": Scenario(
        at_once(old_every=4), frozenset({"SamplesDropped"}), 60, {"max_staleness": 16}
    ),
    "dropped_for_a_while": Scenario(
        drop_for_a_while,
        lasts=60,
        options={"max_staleness": 16},
        clears=frozenset({"SamplesDropped"}),
    ),
    "all_stale": Scenario(
        at_once(old_every=1),
        frozenset({"SamplesDropped", "RanksHeldUp", "DispatcherStalled"}),
        60,
        {"max_staleness": 16},
    ),
    "slow_journal": Scenario(slow_the_disk, frozenset({"RanksHeldUp"}), 60, slow_disk=True),
    "excess": Scenario(
        at_once(lengths=tailed_lengths),
        frozenset({"RankTimeLost"}),
        110,
        {"window": 1, "max_step_variation": "off"},
    ),
    # Plans balance tokens; what ranks take grows with their squares, as they tell.
    "cost_model": Scenario(
        nothing,
        frozenset({"CostModelOff"}),
        110,
        begins={"lengths": mixed_lengths, "square": 0.02},
    ),
    "right_cost": Scenario(
        nothing,
        frozenset(),
        110,
        {"cost": "quadratic:0.02,1,0"},
        begins={"lengths": mixed_lengths, "square": 0.02},
    ),
    "stale": Scenario(at_once(lag=20), frozenset({"StalenessHigh"}), 80),
    "no_versions": Scenario(
        nothing,
        frozenset({"StalenessUnjudged"}),
        40,
        {"max_staleness": 16},
        begins={"reports_versions": False},
    ),
    # Steps shorter than any model's, and lengths that a planner with time compares for long.
    "plans": Scenario(
        at_once(step_s=0.0, look_s=0.001),
        frozenset({"RanksHeldUp"}),
        90,
        {
            "global_batch_size": 4 * BATCH,
            "micro_batch_size": "none",
            "micro_batch_tokens": 512,
            "window": 1,
            "planning_budget": "1s",
        },
        begins={"lengths": unwieldy_lengths},
    ),
    "lag": Scenario(stutter, frozenset({"EventLoopLag"}), 60),
}
