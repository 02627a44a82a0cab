"""What a step of vLLM's scheduler means for the requests in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Progress:
    """Of one request: its blocks, in the order of its tokens, and how many tokens are computed after the step."""

    blocks: list[int] = field(default_factory=list)
    computed: int = 0


class Steps:
    """Follows the requests that it is asked to, through ``SchedulerOutput`` objects. One thread."""

    def __init__(self) -> None:
        self.followed: dict[str, Progress] = {}

    def follow(self, request_id: str) -> None:
        self.followed.setdefault(request_id, Progress())

    def forget(self, request_id: str) -> None:
        self.followed.pop(request_id, None)

    def scheduled(self, output: Any) -> Iterator[tuple[str, Progress]]:
        """Those that this step computes tokens of."""
        if not self.followed:
            return
        tokens = output.num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            if (progress := self.followed.get(new.req_id)) is not None:
                progress.blocks = list(new.block_ids[0])
                progress.computed = new.num_computed_tokens + tokens.get(new.req_id, 0)
                yield new.req_id, progress
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            if (progress := self.followed.get(request_id)) is None:
                continue
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                progress.blocks = []
            progress.blocks += list(blocks[0]) if blocks else []
            progress.computed = cached.num_computed_tokens[index] + tokens.get(request_id, 0)
            yield request_id, progress
