"""The table says what it shows."""

from dataclasses import replace

import numpy as np

from rollout_dispatcher.simulate.figures import summary
from rollout_dispatcher.simulate.result import Result
from rollout_dispatcher.simulate.run import Scenario, simulate
from rollout_dispatcher.simulate.table import table
from rollout_planner.types import Strategy
from tests.simulate.bench import make_setting, make_trace

TRACE = make_trace(
    [int(tokens) for tokens in np.geomspace(20, 20_000, 150)],
    arrival=[float(at) for at in range(150)],
)
OPTIONS = {
    "dp_size": 2,
    "global_batch_size": 8,
    "micro_batch_size": 1,
    "micro_batch_tokens": None,
    "layout": "packed",
    "sync": "micro-step",
    "arrivals": "steady",
    "cost": "quadratic:1,24576,0",
    "seed": 0,
}


def made(*, timed: bool = False) -> Result:
    settings = [make_setting(1, strategy) for strategy in Strategy]
    settings += [make_setting(1.25), make_setting(2)]
    scenario = Scenario(load=0.9) if timed else Scenario(steps=10)
    return Result(summary(TRACE), OPTIONS, simulate(TRACE, settings, scenario))


def test_the_table_is_aligned_and_says_what_its_columns_mean() -> None:
    lines = table(made()).splitlines()
    ruler = next(at for at, line in enumerate(lines) if set(line) == {"-"})
    rows = lines[ruler + 1 : ruler + 7]
    assert [row.split()[0] for row in rows] == [*map(str, Strategy), "window", "window"]
    assert len({len(row) for row in rows}) == 1
    assert len(lines[ruler]) == max(map(len, rows))
    assert any(line.startswith("excess:") for line in lines)


def test_a_padded_layout_shows_its_padding_and_timed_arrivals_their_waits() -> None:
    result = made()
    padded = replace(result, options=OPTIONS | {"layout": "padded"})
    assert "padding" in table(padded)
    assert "padding" not in table(result)
    multiple = replace(result, options=OPTIONS | {"sample_length_multiple": 1024})
    assert "padding" in table(multiple)
    assert "samples padded to multiples of 1,024" in table(multiple)
    assert "p50 s" in table(made(timed=True))
