"""The schedule as a picture: a line for each NIC and direction, darker where it carries more."""

from __future__ import annotations

import numpy as np

from torch_mooncake.weights.simulate import Prediction

WIDTH, COLUMNS, LINES, LINE, LEFT = 900, 150, 64, 6, 130


def svg(said: Prediction, rate: float) -> str:
    """At most 64 lines for each direction: the NICs in order, evenly chosen. ``rate``: bytes a second, full black."""
    group = max(1, len(said.times) // COLUMNS)
    firsts = np.arange(0, len(said.times), group)
    times = np.append(said.times[firsts[1:] - 1], said.times[-1:])
    spans = np.diff(times, prepend=0)
    sent, received = (np.add.reduceat(table, firsts, axis=0) for table in (said.sent, said.received))
    y = 24
    title = f"predicted {said.seconds:.3f} s, bound {said.bound:.3f} s"
    shapes = [f'<text x="4" y="16" font-size="12">{title}</text>']
    for what, table in (("sends", sent), ("receives", received)):
        busy = [i for i in range(len(said.nics)) if table[:, i].any()]
        chosen = busy[:: max(1, -(-len(busy) // LINES))]
        for i in chosen:
            place = said.nics[i]
            label = f"{place.host}.{place.nic} {what}"
            shapes.append(f'<text x="4" y="{y + LINE}" font-size="{LINE}">{label}</text>')
            for begin, span, nbytes in zip(times - spans, spans, table[:, i], strict=True):
                load = min(1.0, nbytes / (rate * span)) if span else 0.0
                if load > 0.01:
                    x, width = LEFT + begin / said.seconds * WIDTH, span / said.seconds * WIDTH
                    shapes.append(
                        f'<rect x="{x:.1f}" y="{y}" width="{width:.2f}" height="{LINE}" fill-opacity="{load:.2f}"/>'
                    )
            y += LINE + 1
        y += 10
    size = f'width="{LEFT + WIDTH + 10}" height="{y}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" font-family="monospace" {size}>\n' + "\n".join(shapes) + "\n</svg>\n"
    )
