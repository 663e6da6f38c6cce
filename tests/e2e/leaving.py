"""A rank of a trainer that leaves after some steps, or goes on without those that did.

    RANK=0 WORLD_SIZE=2 MASTER_ADDR=... leaving.py ENDPOINT --steps 2 --then close

Mostly started without torchrun, which would end the others. Prints what ended its loop, as a line
of JSON.
"""

import argparse
import json
import os
import signal
import sys
from itertools import islice

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rollout_dispatcher.errors import DispatcherError
from rollout_workers import MicroBatchStream

ENDS = ("close", "exit", "kill", "finish", "raise", "raise-in-with")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("endpoint")
    parser.add_argument("--steps", type=int, help="steps that it takes; default: as many as come")
    parser.add_argument("--then", default="close", choices=ENDS)
    parser.add_argument("--tp", type=int, default=1, help="ranks of a model replica")
    parser.add_argument("--timeout", type=float)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    shape = (dist.get_world_size() // args.tp, args.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) if args.tp > 1 else None
    dims = None if mesh is None else "dp"
    stream = MicroBatchStream(args.endpoint, mesh=mesh, dp_dims=dims, timeout=args.timeout)
    found: dict[str, object] = {"steps": 0}
    try:
        for number, step in enumerate(islice(stream, args.steps), 1):
            list(step)
            step.commit()
            found["steps"] = number
        end(args.then, stream)
    except DispatcherError as error:
        found |= {"error": type(error).__name__, "text": str(error)}
    line = json.dumps(found | {"reason": stream.end_reason}) + "\n"
    os.write(sys.stdout.fileno(), line.encode())  # in one piece: ranks share the pipe
    stream.close()


def end(then: str, stream: MicroBatchStream) -> None:
    match then:
        case "close":
            stream.close()
        case "exit":
            sys.exit(0)
        case "finish":
            stream.finish()
        case "raise":
            raise RuntimeError("CUDA out of memory")
        case "raise-in-with":
            with stream:
                raise RuntimeError("CUDA out of memory")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
