"""A run that is recorded, from outside: killed in the middle, and with a disk that is not there."""

import gzip
import signal
from operator import le
from pathlib import Path

import pytest

from rollout_dispatcher.cli.main import main
from rollout_dispatcher.cli.simulate_options import own_setting
from rollout_dispatcher.record.recording import load_recording
from rollout_dispatcher.simulate.recorded import Course
from tests.service.conftest import SMALL, Serve
from tests.support.client import Producer, Trainer
from tests.support.server import ServeProcess, eventually


def train(server: ServeProcess, producer: Producer, trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        producer.push([5, 3, 8, 2], policy_versions=[1] * 4)
        (step, *_) = {held.header.step for held in trainer.train()}
        server.await_status(steps_committed=step + 1)


def test_a_run_that_is_killed_is_on_record_up_to_then_and_goes_on(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record, options = tmp_path / "record", {"journal_dir": tmp_path / "j"}
    server = serve(record_dir=record, **options)
    with Producer(server.endpoint, "p") as producer, Trainer(server.endpoint, 2) as trainer:
        train(server, producer, trainer, 3)
        eventually(lambda: written(record) == 3, "three steps on record")
    server.send_signal(signal.SIGKILL)
    server.wait()
    server = serve(record_dir=record, **options)
    with Producer(server.endpoint, "q") as producer, Trainer(server.endpoint, 2) as trainer:
        train(server, producer, trainer, 2)
    server.send_signal(signal.SIGTERM)
    server.wait()

    recording = load_recording(record)
    steps = recording.trained()
    assert recording.notes == []
    assert [step.number for step in steps] == [0, 1, 2, 3, 4]
    assert len(recording.processes) == 2
    assert len({header.run for header in recording.processes.values()}) == 1
    assert len(recording.samples) == 20
    for step in steps:
        assert step.released is not None
        assert step.committed is not None
        assert step.at <= step.released <= min(step.taken)
        assert all(map(le, step.taken, step.done))
        assert max(step.done) <= step.committed
        tokens = sorted(recording.samples[step.run, ticket].tokens for ticket in step.tickets)
        assert tokens == [2, 3, 5, 8]
    assert {sample.version for sample in recording.samples.values()} == {1}
    assert recording.config["global_batch_size"] == 4
    assert main(["report", str(record), "-o", str(tmp_path / "report.html")]) == 0
    assert main(["simulate", str(record), "--recommend"]) == 0
    assert "as it ran: 5 steps" in capsys.readouterr().out


def test_settings_that_change_are_on_record_and_so_is_the_window_of_their_time(
    tmp_path: Path,
) -> None:
    record, file = tmp_path / "record", tmp_path / "serve.toml"
    file.write_text("window = 1")
    flags = {name: value for name, value in SMALL.items() if name != "window"}
    with (
        ServeProcess(tmp_path, warm=True, **flags, record_dir=record, config=file) as server,
        Producer(server.endpoint, "p") as producer,
        Trainer(server.endpoint, 2) as trainer,
    ):
        train(server, producer, trainer, 1)
        file.write_text("window = 2")
        server.send_signal(signal.SIGHUP)
        eventually(lambda: "window 1.0 -> 2.0" in server.log(), "it is read")
        train(server, producer, trainer, 1)
        eventually(lambda: written(record) == 2, "two steps on record")
    recording = load_recording(record)
    assert [step.window_multiple for step in recording.trained()] == [1, 2]
    assert recording.config["window"] == 2
    assert own_setting(recording).window == 2
    assert Course.of(recording.trained(), own_setting(recording)).fill.tolist() == [1, 0.5]


def written(record: Path) -> int:
    try:
        return len(load_recording(record).trained())
    except Exception:  # there is nothing yet
        return 0


def test_no_payload_and_no_id_is_on_record(serve: Serve, tmp_path: Path) -> None:
    record = tmp_path / "record"
    server = serve(record_dir=record, groups="step")
    with Producer(server.endpoint, "secret-p") as producer, Trainer(server.endpoint, 2) as trainer:
        producer.push([5, 3, 8, 2], group_ids=["secret-g"] * 4, group_sizes=[4] * 4)
        trainer.train()
        eventually(lambda: written(record) == 1, "a step on record")
    recording = load_recording(record)
    (step,) = recording.trained()
    assert len({recording.samples[step.run, ticket].group for ticket in step.tickets}) == 1
    text = b"".join(gzip.decompress(path.read_bytes()) for path in record.iterdir())
    assert b"secret" not in text
