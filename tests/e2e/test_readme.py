"""What README and guide show, run as it stands: server, producer, trainer, checkpoints, ranks."""

import asyncio
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_dispatcher.errors import SampleRefused
from rollout_dispatcher.protocol.messages import EndStream
from rollout_workers import RolloutProducer
from tests.e2e.harness import finish, running
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess
from tests.support.source import ROOT
from tests.support.torchrun import torchrun_command

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]
SHOWN = "".join(
    (ROOT / name).read_text() for name in ("README.md", "docs/guide.md", "docs/operate.md")
)

PRODUCER_SETUP = """
import numpy as np
rollouts = [(np.arange(n) % 7, np.ones(n, dtype=bool)) for n in range(2, 50)]
"""
TRAINER_SETUP = """
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def token_losses(model, micro_batch):
    logits = model(micro_batch.input_ids)
    return nn.functional.cross_entropy(logits, micro_batch.input_ids, reduction="none")

"""
CHECKPOINT_SETUP = """
newest = None

def train(step):
    for micro_batch in step:
        pass

"""
TRAINER_END = """
stream.close()
dist.destroy_process_group()
"""


def block(containing: str) -> str:
    """The one Python block with this text, its address still the default."""
    blocks = re.findall(r"```python\n(.*?)```", SHOWN, flags=re.DOTALL)
    (found,) = [text for text in blocks if containing in text]
    return str(found)


def serve_options() -> dict[str, Any]:
    """The options of the README's `dispatcher serve`."""
    line = re.search(r"^dispatcher serve (.*)$", SHOWN, flags=re.MULTILINE)
    assert line is not None
    words = shlex.split(line[1])
    return {
        flag.removeprefix("--"): value for flag, value in zip(words[::2], words[1::2], strict=True)
    }


def run_script(path: Path, text: str, launcher: Sequence[str] = (sys.executable,)) -> None:
    path.write_text(text)
    done = subprocess.run([*launcher, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_readme_shows_trains_on_every_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    options = serve_options() | {"buffer-capacity": 100}
    with ServeProcess(tmp_path, **options) as server:
        producer = block("RolloutProducer").replace("127.0.0.1:7077", server.endpoint)
        trainer = block("import MicroBatchStream").replace("127.0.0.1:7077", server.endpoint)
        run_script(tmp_path / "producer.py", PRODUCER_SETUP + producer)
        assert server.status()["accepted"] == 48
        script = TRAINER_SETUP + trainer + TRAINER_END
        run_script(tmp_path / "train.py", script, torchrun_command(2, tmp_path))
        assert server.wait() == 0


def test_checkpoints_are_saved_as_the_readme_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    journal = {"journal-dir": tmp_path / "journal", "buffer-capacity": 100}
    with ServeProcess(tmp_path, **(serve_options() | journal)) as server:
        endpoint = server.endpoint
        producer = block("RolloutProducer").replace("127.0.0.1:7077", endpoint)
        stream = block("import MicroBatchStream").replace("127.0.0.1:7077", endpoint)
        connect = stream[: stream.index("for step")] + f"folder = {str(tmp_path)!r}\n"
        often = block("dcp.save").replace("% 100 == 99", "% 2 == 1")
        run_script(tmp_path / "producer.py", PRODUCER_SETUP + producer)
        script = TRAINER_SETUP + connect + CHECKPOINT_SETUP + often + TRAINER_END
        run_script(tmp_path / "trainer.py", script, torchrun_command(2, tmp_path))
        assert server.wait() == 0
    assert (tmp_path / "1" / ".metadata").exists()
    with ServeProcess(tmp_path, **serve_options()) as server:  # of another run
        connect = connect.replace(endpoint, server.endpoint)
        load = f"import torch.distributed.checkpoint as dcp\nnewest = {str(tmp_path / '1')!r}\n"
        end = "assert saved['stream']['step'] == 1\nassert stream.state_dict()['step'] == -1\n"
        script = TRAINER_SETUP + connect + load + block("strict=False") + end + TRAINER_END
        run_script(tmp_path / "begin.py", script, torchrun_command(2, tmp_path))


def test_more_ranks_than_the_dispatcher_was_started_for_train_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "torchrun"))  # as --log-dir would say
    commands = re.findall(r"^torchrun (.*) train.py", SHOWN, flags=re.MULTILINE)
    assert [" 2 " in words for words in commands] == [True, False]
    with ServeProcess(tmp_path, **serve_options()) as server:
        producer = block("RolloutProducer").replace("127.0.0.1:7077", server.endpoint)
        trainer = block("import MicroBatchStream").replace("127.0.0.1:7077", server.endpoint)
        script = tmp_path / "train.py"
        script.write_text(TRAINER_SETUP + trainer + TRAINER_END)
        with Trainer(server.endpoint, 2):
            pass  # the group before, which was killed
        launcher = [sys.executable, "-m", "torch.distributed.run", *shlex.split(commands[1])]
        with running(*launcher, str(script)) as trainers:
            run_script(tmp_path / "producer.py", PRODUCER_SETUP + producer)
            finish(trainers)
        assert server.wait() == 0


def test_the_request_that_is_shown_is_accepted(tmp_path: Path) -> None:
    body = re.search(r"-d '(.*)'", SHOWN)
    assert body is not None
    with ServeProcess(tmp_path, **serve_options()) as server:
        answer = server.post("/v1/samples", body[1].encode())
        assert (answer.status, json.loads(answer.text)["outcomes"]) == (200, ["accepted"])


def test_a_trainer_s_integration_is_short() -> None:
    assert len(block("import MicroBatchStream").strip().splitlines()) <= 13


GROUP_SETUP = """
import numpy as np
import torch
import torch.distributed as dist
from rollout_workers import MicroBatchStream, RolloutProducer
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
endpoint, version = {endpoint!r}, 3
producer = RolloutProducer(endpoint)
answers = [(np.arange(n) % 7, np.ones(n, dtype=bool), 0.25 * n) for n in range(2, 18)]

def log_probs(model, micro_batch):
    return micro_batch.input_ids * model

"""
STEP_SETUP = """
producer.end_stream()
model = torch.ones((), requires_grad=True)
stream = MicroBatchStream(endpoint, loss_normalisation="sequence-mean-token-sum")
step = next(stream)
"""
STEP_END = """
expected = sum(-advantage * ids[1:].sum() for ids, _, advantage in answers) / len(answers)
torch.testing.assert_close(total.item(), float(expected), rtol=1e-5, atol=0)
assert {each for m in step for each in m.policy_versions} == {version}
step.commit()
stream.close()
"""


def test_a_group_is_pushed_and_trained_on_as_the_guide_shows(tmp_path: Path) -> None:
    """Of the advantages, one a sample, each token's loss has its own sample's."""
    with ServeProcess(
        tmp_path, dp_size=1, global_batch_size=16, micro_batch_tokens=40, max_staleness=8
    ) as server:
        setup = GROUP_SETUP.format(endpoint=server.endpoint)
        step = STEP_SETUP + block("repeat_interleave") + STEP_END
        run_script(tmp_path / "group.py", setup + block("push_group") + step)
        assert server.wait() == 0


def test_a_producer_ends_with_the_stream_as_the_guide_shows(tmp_path: Path) -> None:
    fields = {"input_ids": [1, 2, 3]}
    with (
        ServeProcess(tmp_path, **serve_options()) as server,
        RolloutProducer(server.endpoint) as producer,
    ):
        names: dict[str, Any] = {"producer": producer, "rollouts": [fields] * 3}
        exec(block("RunFinished"), names)
        assert server.status()["accepted"] == 3
        assert server.post("/v1/stream/end?force=true", b"").status == 200
        exec(block("RunFinished"), names)
        assert server.status()["accepted"] == 3
        with pytest.raises(SampleRefused, match="input_ids"):
            exec(block("RunFinished"), names | {"rollouts": [{"loss_mask": [True]}]})


async def test_a_dispatcher_inside_of_a_program_runs_as_written() -> None:
    class Workers:
        """A producer and two ranks, who wait for each other's answers in a thread."""

        def __init__(self, endpoint: str) -> None:
            self._task = asyncio.create_task(asyncio.to_thread(self._work, endpoint))

        def _work(self, endpoint: str) -> None:
            producer, trainer = Producer(endpoint, "p"), Trainer(endpoint, 2)
            producer.push([3] * 16)
            producer.send(EndStream())
            producer.bye()
            while trainer.train():
                pass
            trainer.bye()

        async def wait(self) -> None:
            await self._task

    async def start_workers(endpoint: str) -> Workers:
        return Workers(endpoint)

    names: dict[str, Any] = {"start_workers": start_workers}
    exec(block("Dispatcher(config)"), names)
    async with asyncio.timeout(60):
        assert await names["main"]() == (True, 16)


def test_the_credentials_are_made_as_written() -> None:
    names: dict[str, Any] = {}
    exec(block("Credentials"), names)
    assert names["credentials"].token_file == "token"


def test_the_sampler_runs_as_written() -> None:
    lengths = [9000, 120, 300, 8000, 450, 130, 7000, 200]
    names: dict[str, Any] = {"lengths": lengths, "dataset": lengths}
    exec(block("LengthBucketSampler"), names)
    batches = [batch.tolist() for batch in names["loader"]]
    assert sorted(length for batch in batches for length in batch) == sorted(lengths)
    assert all(len(batch) == 2 for batch in batches)
