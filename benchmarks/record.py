"""What a run found: records, the file they are kept in, the table."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from .timing import Timing

__all__ = ["KEYS", "PeerResult", "Record", "gbps", "table", "to_json"]

KEYS = ("op", "case", "type", "n", "us", "gbps", "stream_ratio", "peers")


def gbps(nbytes: int, us: float) -> float:
    """Gigabytes per second, 10^9 bytes."""
    return nbytes / us / 1e3


@dataclass(frozen=True)
class PeerResult:
    """Somebody else's kernel on the same work.

    Attributes:
        us: median, None where it did not run.
        gbps: of its own bytes.
        note: what it does differently, or why it is absent.
    """

    us: float | None
    gbps: float | None
    note: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For the file: an absent peer has its reason alone."""
        if self.us is None:
            return {"absent": self.note}
        return {k: v for k, v in asdict(self).items() if v != ""}


@dataclass(frozen=True)
class Record:
    """One figure.

    Attributes:
        op: operator, or ``step``.
        case: what of it: shape, context, rotated or resident operands.
        type: GGML type of the weights, or of the output; None without one.
        n: rows.
        us: median.
        gbps: bytes that one call must move over the median.
        stream_ratio: of a matmul: its gbps over that of S, cuBLAS' bfloat16 product of the same
            shape and rows; of a step: its byte floor over its time; else None.
        spread: 10th and 90th percentile of the microseconds.
        nbytes: what one call must move.
        peers: by name.
        parts: further figures: of S, of a floor.
    """

    op: str
    case: str
    type: str | None
    n: int
    us: float
    gbps: float
    stream_ratio: float | None
    spread: tuple[float, float]
    nbytes: int
    peers: dict[str, PeerResult] = field(default_factory=dict)
    parts: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, op: str, case: str, type: str | None, n: int, nbytes: int, timing: Timing,
           stream_gbps: float | None, **more: Any) -> "Record":  # fmt: skip
        """From a timing; ``stream_gbps`` is what the ratio is against."""
        rate = gbps(nbytes, timing.us)
        ratio = None if stream_gbps is None else rate / stream_gbps
        spread = timing.low, timing.high
        return cls(op, case, type, n, timing.us, rate, ratio, spread, nbytes, **more)

    def to_dict(self) -> dict[str, Any]:
        """For the file, rounded to what the clock can tell."""
        return {
            "op": self.op,
            "case": self.case,
            "type": self.type,
            "n": self.n,
            "us": _rounded(self.us),
            "gbps": _rounded(self.gbps),
            "stream_ratio": _rounded(self.stream_ratio),
            "peers": {name: _rounded(p.to_dict()) for name, p in self.peers.items()},
            "spread": _rounded(self.spread),
            "nbytes": self.nbytes,
            **_rounded(self.parts),
        }


def _rounded(value: Any) -> Any:
    """Floats, however deep, to five digits."""
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def to_json(result: dict[str, Any]) -> str:
    """A result as text, with a line for every record and every kernel."""

    def lines(items: list[Any]) -> str:
        return "[\n  " + ",\n  ".join(map(json.dumps, items)) + "\n ]" if items else "[]"

    long = {"records": lines(result["records"])}
    kernels = result.get("kernels", {})
    if kernels:
        steps = (f"  {json.dumps(name)}: {lines(found)}" for name, found in kernels.items())
        long["kernels"] = "{\n" + ",\n".join(steps) + "\n }"
    head = {k: v for k, v in result.items() if k not in long}
    tail = (f',\n "{name}": {text}' for name, text in long.items())
    return json.dumps(head, indent=1).removesuffix("\n}") + "".join(tail) + "\n}\n"


def line(record: Record) -> str:
    """One row of the table."""
    ratio = "" if record.stream_ratio is None else f"{record.stream_ratio:.2f}"
    peers = "  ".join(
        f"{name} {p.us:.1f} ({p.us / record.us:.2f}x)"
        for name, p in record.peers.items()
        if p.us is not None
    )
    low, high = record.spread
    name = f"{record.op} {record.case}"
    return (
        f"{name:46}{record.type or '':9}{record.n:>3}{record.us:>10.2f}"
        f"{low:>9.2f}..{high:<9.2f}{record.gbps:>7.0f}{ratio:>7}  {peers}".rstrip()
    )


def table(records: Iterable[Record]) -> str:
    """All figures; the last column says how much longer each peer takes."""
    head = (
        f"{'operator, case':46}{'type':9}{'n':>3}{'us':>10}{'10%':>9}..{'90%':<9}{'GB/s':>7}"
        f"{'ratio':>7}  peers: us (theirs / ours)"
    )
    return "\n".join([head, *map(line, records)])
