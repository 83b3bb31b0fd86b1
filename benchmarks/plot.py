"""Draws a result of benchmarks.run, needs matplotlib: python -m benchmarks.plot RESULT PICTURE."""

import argparse
import json
from pathlib import Path
from typing import Any

__all__ = ["plot"]

Json = dict[str, Any]
_BROKEN = ("--", ":", "-.", (0, (5, 5)))


def _matmul(axis: Any, records: list[Json], title: str) -> None:
    """Fraction of S over rows, a line per type; peers broken, in the colour of their type."""
    from matplotlib import colormaps

    measured = {name for r in records for name, p in r["peers"].items() if "us" in p}
    styles = dict(zip(sorted(measured), _BROKEN, strict=False))
    colours = colormaps["tab20"].colors
    for i, kind in enumerate(dict.fromkeys(r["type"] for r in records)):
        rows = [r for r in records if r["type"] == kind]
        n = [r["n"] for r in rows]
        (drawn,) = axis.plot(n, [r["stream_ratio"] for r in rows], marker="o", label=kind,
                              color=colours[i % len(colours)])  # fmt: skip
        for peer in dict.fromkeys(p for r in rows for p in r["peers"]):
            points = [
                (r["n"], r["peers"][peer]["gbps"] / r["stream"]["gbps"])
                for r in rows
                if "gbps" in r["peers"].get(peer, {})
            ]
            if points:
                axis.plot(
                    *zip(*points, strict=True),
                    linestyle=styles[peer],
                    linewidth=1.0,
                    color=drawn.get_color(),
                )
    axis.set(title=title, xscale="log", xlabel="rows", ylabel="packed bytes/s over S")
    axis.set_ylim(bottom=0)
    axis.set_xticks(sorted({r["n"] for r in records}), sorted({r["n"] for r in records}))
    axis.minorticks_off()
    named = axis.get_legend_handles_labels()
    for peer, style in styles.items():
        named[0].append(axis.plot([], [], linestyle=style, color="grey")[0])
        named[1].append(peer)
    axis.legend(*named, fontsize=6, ncol=2)


def _steps(axis: Any, records: list[Json]) -> None:
    """Fraction of each step's byte floor, with its time."""
    names = [r["case"] for r in records]
    bars = axis.barh(names, [r["stream_ratio"] or 0.0 for r in records])
    axis.bar_label(bars, [f"{r['us'] / 1e3:.2f} ms" for r in records], fontsize=7)
    axis.invert_yaxis()
    axis.tick_params("y", labelsize=6)
    axis.set(title="whole steps", xlabel="byte floor over time", xlim=(0, 1))


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
    stepped = [r for r in records if r["op"] == "step"]
    count = len(panels) + bool(others) + bool(stepped)
    if not count:
        raise SystemExit("plot: the result must hold a record, got none")
    size = 5 * count, max(6.0, 0.16 * len(others))
    figure, axes = pyplot.subplots(1, count, figsize=size, squeeze=False)
    for axis, (title, op, case) in zip(axes[0], panels, strict=False):
        _matmul(axis, [r for r in records if (r["op"], r["case"]) == (op, case)], title)
    if stepped:
        _steps(axes[0][len(panels)], stepped)
    if others:
        _bars(axes[0][-1], others, "between the matmuls")
    facts = result["environment"]["device"], result["model"], result["date"], result["commit"]
    figure.suptitle(", ".join(facts))
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    plot(json.loads(args.result.read_text()), args.picture)
