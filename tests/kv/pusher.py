"""A prefill process for the tests: reads a ticket (base64) from stdin, pushes that many layers, says so, sleeps."""

import base64
import sys
import time

from caches import LAYERS, prefill_cache

import torch_mooncake as tm
from torch_mooncake.kv import KVSender


def main() -> None:
    layers, pages = int(sys.argv[1]), [int(page) for page in sys.argv[2].split(",")]
    engine = tm.Engine(listen=["tcp://127.0.0.1:0"], token="t", name="pusher")
    sender = KVSender(engine, prefill_cache())
    print(engine.addresses[0], flush=True)
    session = sender.open(base64.b64decode(sys.stdin.readline()))
    for layer in range(layers):
        session.push_layer(layer, pages)
    if layers == LAYERS:
        print(session.finish({"first_token": 5}).nbytes, flush=True)
    print("pushed", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
