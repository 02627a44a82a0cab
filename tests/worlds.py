"""Worlds of rank processes for the tests of the distributed backend."""

from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(
    fn: Callable[..., Any],
    rank: int,
    world: int,
    path: str,
    backend: str,
    timeout_s: float,
    environ: dict[str, str],
    args: tuple[Any, ...],
    results: Any,
) -> None:
    os.environ.clear()
    os.environ.update(environ)  # the server's is that of the first test that needed it
    import torch

    import torch_mooncake.distributed  # noqa: F401

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{path}",
            rank=rank,
            world_size=world,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        results.put((rank, True, fn(rank, world, *args)))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, False, traceback.format_exc()))
        raise


def run_world(
    world: int,
    fn: Callable[..., Any],
    *args: Any,
    backend: str = "mooncake",
    timeout_s: float = 60,
    expect_dead: tuple[int, ...] = (),
    limit_s: float = 150,
) -> dict[int, Any]:
    """Runs fn(rank, world, *args) on every rank and returns {rank: result}. Ranks in `expect_dead` kill themselves."""
    # Forked from a server that has torch loaded and runs nothing: as clean as spawned ones, and there in no time.
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch_mooncake.distributed"])
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store")
        settings = (path, backend, timeout_s, dict(os.environ))
        processes = [
            context.Process(target=_rank, args=(fn, rank, world, *settings, args, results), daemon=True)
            for rank in range(world)
        ]
        for process in processes:
            process.start()
        try:
            out: dict[int, Any] = {}
            for _ in range(world - len(expect_dead)):
                rank, good, value = results.get(timeout=limit_s)
                assert good, f"rank {rank}: {value}"
                out[rank] = value
            for process in processes:
                process.join(30)
            codes = [process.exitcode for process in processes]
            assert codes == [-signal.SIGKILL if rank in expect_dead else 0 for rank in range(world)], codes
            return out
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join(10)


def torchrun(script: os.PathLike[str], *args: str, world: int, options: tuple[str, ...] = ()) -> str:
    """Runs a script under torchrun on this machine; what it printed, once it has ended well."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", *options]
    done = subprocess.run(
        [*command, os.fspath(script), *args],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
