"""A vLLM engine that does what it is told, line by line.

    python engine_process.py '{"model": FOLDER, "transfer": {…KVTransferConfig…} or null, "options": {…LLM…}}'

Reads commands (JSON, a line each) and answers each with a line "REPLY {…}". Run in the environment of `make env-vllm`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ.update(VLLM_CPU_KVCACHE_SPACE="1", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"


class Told:
    def __init__(self, told: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = told.get("transfer")
        self.llm = LLM(
            model=told["model"],
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            disable_log_stats=True,
            kv_transfer_config=KVTransferConfig(**transfer) if transfer else None,
            **{"max_model_len": 1024, "max_num_batched_tokens": 1024, "max_num_seqs": 4, **told.get("options", {})},
        )
        self.engine = self.llm.llm_engine

    def generate(
        self,
        prompt: str | list[int],
        max_tokens: int = 12,
        params: dict[str, Any] | None = None,
        salt: str | None = None,
    ) -> dict[str, Any]:
        """Text, tokens, how many tokens of the prompt were not computed, seconds to the first token."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        name = f"request-{time.monotonic_ns()}"
        began = time.perf_counter()
        self.engine.add_request(name, given, sampling)
        first, out = 0.0, None
        while self.engine.has_unfinished_requests():
            for one in self.engine.step():
                out = one
                if not first and one.outputs and one.outputs[0].token_ids:
                    first = time.perf_counter() - began
        assert out is not None
        answer = out.outputs[0]
        return {
            "text": answer.text,
            "tokens": list(answer.token_ids),
            "reason": answer.finish_reason,
            "prompt": len(out.prompt_token_ids or ()),
            "cached": out.num_cached_tokens,
            "params": out.kv_transfer_params,
            "ttft_s": first,
        }

    def timed(self, prompt: list[int], max_tokens: int = 1) -> dict[str, Any]:
        """``generate``, and the seconds of it that were spent in calls of the connector."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        spent, depth = [0.0], [0]
        connectors = [self.engine.engine_core.engine_core.scheduler.connector, get_kv_transfer_group()]  # type: ignore[attr-defined]
        names = [name for name in dir(type(connectors[0])) if not name.startswith("_")]
        replaced = []

        def timing(call: Any) -> Any:
            def timed(*args: Any, **kwargs: Any) -> Any:
                depth[0] += 1
                began = time.perf_counter()
                try:
                    return call(*args, **kwargs)
                finally:
                    depth[0] -= 1
                    if not depth[0]:
                        spent[0] += time.perf_counter() - began

            return timed

        for connector in connectors:
            for name in names:
                if callable(getattr(type(connector), name)):
                    setattr(connector, name, timing(getattr(connector, name)))
                    replaced.append((connector, name))
        try:
            return {**self.generate(prompt, max_tokens), "connector_s": spent[0]}
        finally:
            for connector, name in replaced:
                delattr(connector, name)

    def begin(self, prompt: str | list[int], params: dict[str, Any] | None = None, steps: int = 3) -> dict[str, Any]:
        """A request that is left standing after some steps."""
        from vllm import SamplingParams

        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, extra_args=extra)
        name = f"request-{time.monotonic_ns()}"
        given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
        name = self.engine.add_request(name, given, sampling) or name
        for _ in range(steps):
            self.engine.step()
        return {"name": name}

    def abort(self, name: str) -> dict[str, Any]:
        self.engine.abort_request([name], internal=True)
        return {}

    def settle(self, timeout: float = 20) -> dict[str, Any]:
        """Steps until no request holds blocks; how many blocks are free then, and how many there are."""
        core = self.engine.engine_core.engine_core  # type: ignore[attr-defined]
        end = time.monotonic() + timeout
        while core.scheduler.requests and time.monotonic() < end:
            self.engine.step()
            time.sleep(0.002)
        pool = core.scheduler.kv_cache_manager.block_pool
        return {"held": len(core.scheduler.requests), "free": pool.get_num_free_blocks(), "all": pool.num_gpu_blocks}

    def reset(self) -> dict[str, Any]:
        """Forget the engine's own prefixes."""
        self.settle()
        return {"reset": self.llm.reset_prefix_cache()}

    def generate_without_pages(self, prompt: list[int]) -> dict[str, Any]:
        """A request whose pages are removed from the pool between the look-up and the load."""
        import torch_mooncake as tm

        scheduler = self.engine.engine_core.engine_core.scheduler.connector.scheduler  # type: ignore[attr-defined]
        allocated = scheduler.allocated

        def remove(*args: Any) -> None:
            with tm.Pool() as pool:
                pool.delete(pool.keys("kv/")[::2])
            allocated(*args)

        scheduler.allocated = remove
        try:
            return self.generate(prompt)
        finally:
            scheduler.allocated = allocated

    def opened(self, transfer: str) -> dict[str, Any]:
        """Whether decode's session is open on this rank, within 20 s."""
        end = time.monotonic() + 20
        while time.monotonic() < end:
            found = self._prefill()._transfers.get(transfer)
            if found is not None and found.session is not None:
                return {"open": True}
            time.sleep(0.01)
        return {"open": False}

    def spoil(self, transfer: str, position: int) -> dict[str, Any]:
        """Zeroes a block of a prompt that waits to be sent."""
        prefill = self._prefill()
        block = prefill._transfers[transfer].blocks[position]
        for layer in prefill._kv.layers:
            layer[block].zero_()
        return {}

    def _prefill(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker.prefill

    def early(self) -> dict[str, Any]:
        """Layers that prefill has pushed within the steps that computed them."""
        return {"layers": self._prefill().pushed_early}


def main() -> None:
    told = Told(json.loads(sys.argv[1]))
    print('REPLY {"ready": true}', flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            reply = getattr(told, command.pop("do"))(**command)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        print("REPLY " + json.dumps(reply), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
