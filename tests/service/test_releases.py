"""Objects of payload stores that nobody needs: who is asked to release them, of a real process."""

from signal import SIGKILL

from rollout_dispatcher.protocol import messages as m
from tests.service.conftest import Serve
from tests.support.client import Producer, Trainer
from tests.support.references import STORE, make_references
from tests.support.server import ServeProcess


def train(server: ServeProcess) -> None:
    """One step, by ranks that leave without having done what they may be asked."""
    with Trainer(server.endpoint, 2, opens_stores=True) as trainer:
        trainer.train()


def test_what_a_committed_step_has_used_up_is_released_by_who_is_there(start: Serve) -> None:
    server = start()
    with Producer(server.endpoint, "p", opens_stores=True) as producer:
        producer.send(*make_references("p", 0, [5, 3, 8, 2]))
        producer.expect(m.Pushed)
        train(server)
        free = producer.expect(m.Free)
        assert (free.store, free.keys) == (STORE, ["p.1/0"])
        assert server.status()["objects"]["unneeded"] == 1
        producer.send(m.Freed(number=free.number))
        producer.send(m.Ping())
        producer.expect(m.Pong)
        objects = server.status()["objects"]
        assert (objects["needed"], objects["unneeded"], objects["freed"]) == (0, 0, 1)


def test_a_killed_dispatcher_remembers_what_is_to_be_released(start: Serve) -> None:
    killed = start()
    with Producer(killed.endpoint, "p", opens_stores=True) as producer:
        producer.send(*make_references("p", 0, [5, 3, 8, 2]))
        producer.expect(m.Pushed)
        train(killed)
        producer.expect(m.Free)
        killed.send_signal(SIGKILL)
        killed.wait()
    server = start()
    with Producer(server.endpoint, "q", opens_stores=True) as producer:
        free = producer.expect(m.Free)
        assert free.keys == ["p.1/0"]
        producer.send(m.Freed(number=free.number, left=free.keys, why="it is read-only"))
        again = producer.expect(m.Free)
        assert again.keys == free.keys
        producer.send(m.Freed(number=again.number))
        producer.send(m.Ping())
        producer.expect(m.Pong)
    assert server.status()["objects"]["failures"] == 1


def test_the_last_to_leave_releases_what_is_left_before_its_goodbye_is_answered(
    start: Serve,
) -> None:
    server = start()
    with Producer(server.endpoint, "p", opens_stores=True) as producer:
        producer.send(*make_references("p", 0, [5, 3, 8, 2]))
        producer.expect(m.Pushed)
    with Trainer(server.endpoint, 2, opens_stores=True) as trainer:
        last, other = trainer.ranks
        trainer.train()
        other.send(m.Bye())
        other.receive()  # the list, if it was asked, or its goodbye
        other.close()
        server.await_status(ranks_connected=1)
        heard = [last.receive()[0]]  # the other one's last step; the list, if that one left with it
        while not isinstance(heard[-1], m.LastStep):
            heard.append(last.receive()[0])
        last.send(m.Bye())
        asked = [each for each in heard if isinstance(each, m.Free)]
        free = asked[0] if asked else last.expect(m.Free)
        assert server.status()["objects"]["unneeded"] == 1
        last.send(m.Freed(number=free.number))
        last.expect(m.Bye)
    assert server.status()["objects"]["unneeded"] == 0


def test_what_a_producer_put_and_never_pushed_is_looked_for_when_it_has_left(start: Serve) -> None:
    server = start()
    with Producer(server.endpoint, "q", opens_stores=True) as other:
        with Producer(server.endpoint, "p", opens_stores=True, incarnation="p.1") as producer:
            producer.send(*make_references("p", 0, [5, 3]))
            producer.expect(m.Pushed)
            producer.send(m.Bye())
            producer.expect(m.Bye)
        sweep = other.expect(m.Sweep)
        assert (sweep.store, sweep.prefix) == (STORE, "p.1/")
        other.send(m.Swept(number=sweep.number, keys=["p.1/0", "p.1/2"]))
        free = other.expect(m.Free)
        assert free.keys == ["p.1/2"], "samples in the other one wait to be trained on"
        other.send(m.Freed(number=free.number))
