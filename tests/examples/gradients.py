"""Whether an example's gradients are those of one process that has the whole step as one batch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType

import torch

from tests.examples.run import EXAMPLES, Sample, finish, push, torchrun
from tests.frameworks.report import Integration
from tests.support.integration import integration_lines
from tests.support.server import ServeProcess
from tests.support.source import ROOT

RANKS = 2
RECORDED = ROOT / "tests" / "examples" / "recorded.py"


def measure(
    folder: Path,
    name: str,
    *arguments: str,
    pushed: Sequence[Sample],
    shim: Path | None = None,
    dtype: str = "float64",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> float:
    """Largest difference of a gradient of the first step, relative to the largest gradient.

    The example runs as it stands, on `RANKS` ranks in many micro-batches and on one rank in one. In
    arguments and environment ENDPOINT stands for the dispatcher's address. shim: a program that
    makes a GPU framework run here, and then runs what its arguments name.
    """
    found = {}
    for ranks, budget in ((RANKS, 64), (1, 1 << 16)):
        at = folder / f"ranks-{ranks}"
        at.mkdir()
        program = [RECORDED, dtype, at / "gradients.pt", EXAMPLES / name]
        command = [str(word) for word in ([] if shim is None else [shim]) + program]
        with ServeProcess(
            at, dp_size=ranks, global_batch_size=len(pushed), micro_batch_tokens=budget
        ) as server:
            push(server, pushed)
            words = [word.replace("ENDPOINT", server.endpoint) for word in arguments]
            env = {
                name: value.replace("ENDPOINT", server.endpoint)
                for name, value in environment.items()
            }
            with torchrun(at, ranks, *command, *words, **env) as process:
                finish(process, within=400)
            assert server.wait() == 0
        found[ranks] = torch.load(at / "gradients.pt", weights_only=True)
    assert len(found[1]) == len(found[RANKS]) > 0
    pairs = zip(found[1], found[RANKS], strict=True)
    difference = max(float((one - other).abs().max()) for one, other in pairs)
    return difference / max(float(each.abs().max()) for each in found[1])


def record(
    record_property: Callable[[str, object], None], framework: str, name: str, difference: float
) -> None:
    """Have `make test-frameworks` keep what an integration takes, and how exact it is."""
    found = Integration(
        framework=framework,
        example=f"examples/{name}",
        lines=integration_lines(EXAMPLES / name),
        ranks=RANKS,
        gradient_difference=difference,
    )
    for figure, value in asdict(found).items():
        record_property(figure, value)
