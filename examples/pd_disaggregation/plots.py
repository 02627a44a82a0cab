"""Draws latencies of replays beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib

matplotlib.use("Agg")  # files only, no display
from matplotlib import pyplot as plt

if TYPE_CHECKING:
    from load import Replay

_COLOURS = {"disaggregated": "tab:blue", "colocated": "tab:orange"}


def draw(replays: Sequence[Replay], title: str, path: Path) -> None:
    """A PNG of four panels: the distributions of TTFT and TBT (which part of all took no longer), TTFT over the time of
    arrival, and each request's longest gap."""
    figure, ((ttft, tbt), (arrivals, longest)) = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for replay in replays:
        style = {"label": replay.mode, "color": _COLOURS[replay.mode]}
        for axes, values in ((ttft, replay.ttft_s), (tbt, replay.gaps_s)):
            ordered = sorted(value * 1e3 for value in values)
            axes.step(ordered, [(index + 1) / len(ordered) for index in range(len(ordered))], where="post", **style)
        at = [one.request.at_s for one in replay.served]
        arrivals.scatter(at, [value * 1e3 for value in replay.ttft_s], s=14, **style)
        longest.scatter(at, [max(one.gaps_s, default=0) * 1e3 for one in replay.served], s=14, **style)
    for axes, name in ((ttft, "time to first token"), (tbt, "time between tokens")):
        axes.set(xlabel=f"{name}, ms", ylabel="part of all", ylim=(0, 1.02), xscale="log")
    arrivals.set(xlabel="arrival, s", ylabel="time to first token, ms", ylim=(0, None))
    longest.set(xlabel="arrival, s", ylabel="longest time between tokens, ms", ylim=(0, None))
    for axes in (ttft, tbt, arrivals, longest):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
