"""Draws a result of benchmarks.run, needs matplotlib: python -m benchmarks.plot RESULT PICTURE."""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["plot"]

Json = dict[str, Any]


def _matmul(axis: Any, records: list[Json], title: str) -> None:
    """Fraction of S over rows, a line per type; peers dashed, in the colour of their type."""
    colours: dict[str, Any] = {}
    for kind in dict.fromkeys(r["type"] for r in records):
        rows = [r for r in records if r["type"] == kind]
        n = [r["n"] for r in rows]
        (drawn,) = axis.plot(n, [r["stream_ratio"] for r in rows], marker="o", label=kind)
        colours[kind] = drawn.get_color()
        for peer in dict.fromkeys(p for r in rows for p in r["peers"]):
            points = [
                (r["n"], r["peers"][peer]["gbps"] / r["stream"]["gbps"])
                for r in rows
                if "gbps" in r["peers"].get(peer, {})
            ]
            if points:
                axis.plot(*zip(*points, strict=True), linestyle="--", linewidth=0.8,
                          color=colours[kind])  # fmt: skip
    axis.set(
        title=title, xscale="log", xlabel="rows", ylabel="packed bytes/s over S", ylim=(0, None)
    )
    axis.set_xticks(sorted({r["n"] for r in records}), sorted({r["n"] for r in records}))
    axis.legend(fontsize=6, ncol=2)


def _bars(axis: Any, records: list[Json], title: str) -> None:
    """Microseconds of ours and of peers."""
    names = [f"{r['op']} {r['case']} n={r['n']} {r['type'] or ''}" for r in records]
    peers = list(dict.fromkeys(p for r in records for p in r["peers"]))
    series = {"ours": [r["us"] for r in records]}
    for peer in peers:
        series[peer] = [r["peers"].get(peer, {}).get("us", 0.0) for r in records]
    height = 0.8 / len(series)
    for i, (name, values) in enumerate(series.items()):
        axis.barh([y + i * height for y in range(len(names))], values, height, label=name)
    axis.set_yticks([y + 0.4 for y in range(len(names))], names, fontsize=5)
    axis.invert_yaxis()
    axis.set(title=title, xlabel="us", xscale="log")
    axis.legend(fontsize=6)


def plot(result: Json, path: Path) -> None:
    """Draw.

    Args:
        result: what benchmarks.run wrote.
        path: of the picture; its ending says which kind.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    records = result["records"]
    shapes = dict.fromkeys((r["op"], r["case"]) for r in records if r["op"].startswith("qmm"))
    others = [r for r in records if not r["op"].startswith("qmm") and r["op"] != "step"]
    others = [r for r in others if "resident" not in r["case"]]
    panels = [(f"{op} {case}", op, case) for op, case in shapes]
    count = len(panels) + bool(others)
    if not count:
        raise SystemExit("plot: the result must hold a record, got none")
    figure, axes = pyplot.subplots(1, count, figsize=(5 * count, 6), squeeze=False)
    for axis, (title, op, case) in zip(axes[0], panels, strict=False):
        _matmul(axis, [r for r in records if (r["op"], r["case"]) == (op, case)], title)
    if others:
        _bars(axes[0][-1], others, "between the matmuls")
    environment = result["environment"]
    figure.suptitle(
        f"{environment['device']}, {result['model']}, {result['date']}, {result['commit']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    plot(json.loads(args.result.read_text()), args.picture)
