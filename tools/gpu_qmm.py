"""Quantized matmuls of real sizes on a GPU against the CPU's results, bit for bit.

    python tools/gpu_qmm.py

For every type with tiles: repack and unpack give the bytes back; N rows, for N that fill no, one
and several tiles, equal the CPU's; stacked segments of all types; a bias; packed and float32
results of qmm_glu. The rest of an output is NaN before, other rows of activations are NaN.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from torch_dflash import ops
from torch_dflash.testing.samples.act import cpu_planes
from torch_dflash.testing.samples.quant import random_packed

TYPES = {"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_XS": 23, "Q8_0": 8, "Q4_0": 2}
OTHERS = {"F32": 0, "F16": 1, "Q4_1": 3, "IQ3_XXS": 18, "Q3_K": 11}
SHAPES = [(16, 256), (40, 512), (100, 1280), (3000, 2560), (5120, 5120), (300, 17408), (7, 6144)]
QUICK = [(40, 512), (100, 1280)]  # under compute-sanitizer
failures: list[str] = []


def check(name: str, good: bool) -> None:
    """Remembers what failed."""
    if not good:
        failures.append(name)
        print("FAILED", name, flush=True)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal, any NaN to any NaN."""
    a, b = a.cpu(), b.cpu()
    if not a.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def weight(kind: int, rows: int, columns: int, gen: torch.Generator) -> torch.Tensor:
    """Random bytes of finite values."""
    return random_packed(kind, rows, columns // ops.quant_geometry(kind)[0], gen)


def main(quick: bool) -> int:
    """Every comparison; the exit status."""
    gen = torch.Generator().manual_seed(1)
    rows_n = [1, 5, 16, 33] if quick else [1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 40]
    shapes = QUICK if quick else SHAPES
    for (name, kind), (rows, columns) in itertools.product(TYPES.items(), shapes):
        packed = weight(kind, rows, columns, gen)
        w_cpu = ops.repack(packed, kind, columns)
        w_gpu = ops.repack(packed.cuda(), kind, columns)
        check(
            f"unpack {name} {rows}x{columns}",
            torch.equal(ops.unpack(w_gpu, kind, rows, columns).cpu(), packed),
        )
        x = torch.randn(40, columns, generator=gen)
        want = ops.qmm(ops.quant_act(x, 1), w_cpu, [kind], [rows], columns)
        bias = torch.randn(rows, generator=gen)
        for n in rows_n:
            got = ops.qmm(ops.quant_act(x[:n].cuda(), 1), w_gpu, [kind], [rows], columns).cpu()
            check(f"qmm {name} {rows}x{columns} N {n}", torch.equal(got, want[:n]))
        got = ops.qmm(ops.quant_act(x[:3].cuda(), 1), w_gpu, [kind], [rows], columns, bias.cuda())
        check(f"bias {name} {rows}x{columns}", torch.equal(got.cpu(), want[:3] + bias))
        x[1:] = torch.nan
        got = ops.qmm(ops.quant_act(x[:7].cuda(), 1), w_gpu, [kind], [rows], columns).cpu()
        check(
            f"NaN {name} {rows}x{columns}",
            torch.equal(got[0], want[0]) and bool(got[1:].isnan().all()),
        )
    every = {**TYPES, **OTHERS}
    for columns, n in itertools.product((256, 1280 if quick else 5120), (1, 3, 8, 16, 30)):
        rows = [int(r) for r in torch.randint(1, 600, (len(every),), generator=gen)]
        packed_all = [weight(t, r, columns, gen) for t, r in zip(every.values(), rows, strict=True)]
        weights = [
            torch.cat(
                [
                    ops.repack(p.to(d), t, columns)
                    for t, p in zip(every.values(), packed_all, strict=True)
                ]
            )
            for d in ("cpu", "cuda")
        ]
        x = torch.randn(n, columns, generator=gen)
        a, b = (
            ops.qmm(ops.quant_act(x.to(w.device), 1), w, list(every.values()), rows, columns)
            for w in weights
        )
        check(f"stacked {columns} N {n}", same(a, b))
        for mode in (0, 1, 2):
            types = [12, 14] if n % 2 else [23, 23]
            packed_all = [weight(t, 700, columns, gen) for t in types]
            weights = [
                torch.cat(
                    [
                        ops.repack(p.to(d), t, columns)
                        for t, p in zip(types, packed_all, strict=True)
                    ]
                )
                for d in ("cpu", "cuda")
            ]
            a, b = (
                ops.qmm_glu(ops.quant_act(x.to(w.device), 1), w, types, 700, columns, mode)
                for w in weights
            )
            if mode == 1:
                b = cpu_planes(b)
            check(f"glu {columns} N {n} mode {mode}", same(a, b))
            if mode != 1:
                x2 = ops.quant_act(x, mode)
                a, b = (
                    ops.qmm(ops.quant_act(x.to(w.device), mode), w, types, [700, 700], columns)
                    for w in weights
                )
                check(f"act_mode {mode} {columns} N {n}", same(a, b) and x2 is not a)
    print("qmm:", "all equal" if not failures else f"{len(failures)} FAILED")
    return int(bool(failures))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few small shapes")
    sys.exit(main(parser.parse_args().quick))
