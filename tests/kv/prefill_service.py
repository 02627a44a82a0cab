"""A prefill process for sustained load: takes tickets (JSON, one a line on stdin), pushes in several threads, answers
with how each session ended, and says what it holds when it is asked."""

import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from processes import eventually
from sides import PrefillSide, cache

import torch_mooncake as tm


def held(side: PrefillSide) -> dict[str, int]:
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("tm-kv")]
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(threads),
        "regions": side.engine.stats()["regions"],
        "sessions": len(side.sender.sessions),
    }


def main() -> None:
    shape = tuple(json.loads(sys.argv[1]))
    kv = cache(shape, sys.argv[2])
    for number, layer in enumerate(kv.layers):
        layer.copy_(torch.arange(shape[1]).view(-1, 1, 1, 1, 1).expand_as(layer) + 100 * number)
    side = PrefillSide(kv, ("shm", "tcp"))
    answering = threading.Lock()

    def say(**answer) -> None:
        with answering:
            print(json.dumps(answer), flush=True)

    def serve(request: dict) -> None:
        push = None
        try:
            push = side.sender.open(bytes.fromhex(request["ticket"]), wire=request["wire"])
            for layer in range(shape[0]):
                if request["cancel_at"] == layer:
                    push.cancel()
                push.push_layer(layer, request["pages"])
            push.finish({"id": request["id"]})
            outcome = push.state
        except tm.Error as error:
            if push is not None:
                push.cancel()  # returns when its end is final
            outcome = type(error).__name__ if push is None else push.state
        say(id=request["id"], outcome=outcome)

    with ThreadPoolExecutor(8) as pool:
        for line in sys.stdin:
            request = json.loads(line)
            if request["id"] == "held":
                eventually(side.at_rest, 20)
                say(id="held", outcome=held(side))
            else:
                pool.submit(serve, request)
    side.close()


if __name__ == "__main__":
    main()
