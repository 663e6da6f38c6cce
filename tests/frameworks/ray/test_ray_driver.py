"""`examples/ray_driver.py`: actors push and train, the driver has the dispatcher."""

import ast

import pytest

from tests.examples.run import example, finish

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_everything_that_actors_push_is_trained_on_by_actors_and_learnt() -> None:
    with example("ray_driver.py") as process:
        printed = finish(process, within=280)
    (line,) = [line for line in printed.splitlines() if line.startswith("{")]
    found = ast.literal_eval(line)
    assert (found["pushed"], found["trained on"], found["everything"]) == (128, 128, True)
    assert found["losses"][-1] < 0.8 * found["losses"][0]
