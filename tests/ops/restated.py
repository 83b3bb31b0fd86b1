"""The arithmetic of docs/contracts.md section 2, restated in numpy without csrc/core."""

import gguf
import numpy as np
import torch

from torch_dflash.testing.samples.act import planes, q8_1
from torch_dflash.testing.samples.quant import gguf_dequantize

F = np.float32
# ggml type: offset of d and of dmin in a quant
SUPERBLOCKS = {12: (0, 2), 13: (0, 2), 14: (208, None), 23: (0, None)}
BLOCKS = {8: (0, None), 2: (0, None)}
TILED = {**SUPERBLOCKS, **BLOCKS}


def fma(a, b, c):
    """One rounding of a * b + c. The product is exact in long double, the sum nearly."""
    product, c = np.longdouble(a) * np.longdouble(b), np.longdouble(c)
    total = product + c
    part = total - product
    lost = (product - (total - part)) + (c - part)  # two-sum: what the sum dropped
    rounded = total.astype(F)
    beyond = np.nextafter(rounded, np.where(total > rounded, F(np.inf), F(-np.inf)))
    # half way between two float32 the dropped part decides, not evenness
    tie = (total != rounded) & (total - rounded == np.longdouble(beyond) - total) & (lost != 0)
    up, down = np.maximum(rounded, beyond), np.minimum(rounded, beyond)
    return np.where(tie, np.where(lost > 0, up, down), rounded)


def join(leaves):
    """Split at the largest power of two below the number of leaves."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return join(leaves[:half]) + join(leaves[half:])


def float_dot(w, x):
    """dot() of w [rows, K] and x [N, K] -> [N, rows]."""
    leaves = []
    for k in range(0, w.shape[1], 1024):
        acc = np.zeros((len(x), len(w), 128), F)
        for e in range(k, min(k + 1024, w.shape[1]), 128):
            n = min(128, w.shape[1] - e)
            n = min(n, k + 1024 - e)
            acc[..., :n] = fma(w[None, :, e : e + n], x[:, None, e : e + n], acc[..., :n])
        lane = (acc[..., 0::4] + acc[..., 1::4]) + (acc[..., 2::4] + acc[..., 3::4])
        while lane.shape[-1] > 1:
            half = lane.shape[-1] // 2
            lane = lane[..., :half] + lane[..., half:]
        leaves.append(lane[..., 0])
    return join(leaves)


def integers(packed, ggml_type, d, dmin):
    """Integer weights [rows, K]: gguf-py's values with the scales d and dmin of every quant set."""
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)][1]
    quants = packed.clone().view(-1, nbytes)
    for offset, value in zip(TILED[ggml_type], (d, dmin), strict=True):
        if offset is not None:
            bits = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
            quants[:, offset : offset + 2] = bits
    return gguf_dequantize(quants.view(packed.shape), ggml_type).numpy().astype(np.int64)


def halves(packed, ggml_type, offset):
    """Scales [rows, quants] at a byte offset of every quant."""
    nbytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(ggml_type)][1]
    quants = packed.view(packed.shape[0], -1, nbytes)
    return quants[..., offset : offset + 2].contiguous().view(torch.float16)[..., 0].float().numpy()


def planes_dot(weights, codes):
    """fma(float(hi . w), 254, float(lo . w)); weights [rows, n], codes two of [N, n]."""
    hi, lo = (F(c @ weights.T) for c in codes)
    return fma(hi, F(254), lo)


def leaf_sums(columns, shape, step):
    """Leaves of 1024 columns, each `leaf = step(leaf, k, end)` over its superblocks, joined."""
    leaves = []
    for first in range(0, columns, 1024):
        leaf = np.zeros(shape, F)
        for k in range(first, min(first + 1024, columns), 256):
            leaf = step(leaf, k, min(k + 256, columns))
        leaves.append(leaf)
    return join(leaves)


def matmul_q8(packed, ggml_type, x):
    """qmm of float32 rows x [N, K], packed as Q8_1 first -> float32 [N, rows]."""
    scale, codes = (t.numpy() for t in q8_1(x))
    columns = x.shape[1]
    if ggml_type not in TILED:
        values = (F(codes) * scale[..., None]).reshape(len(x), -1)[:, :columns]
        return float_dot(gguf_dequantize(packed, ggml_type).numpy(), values)
    scale = scale.reshape(len(x), -1, 1)
    codes = codes.reshape(len(x), -1)[:, :columns].astype(np.int64)
    offset, min_offset = TILED[ggml_type]
    w, d = integers(packed, ggml_type, 1, 0), halves(packed, ggml_type, offset)
    if min_offset is not None:
        mins = -integers(packed, ggml_type, 0, 1)
        dmin = halves(packed, ggml_type, min_offset)

    def dots(weights, leaf, k, end):
        """sum by fma of s * (weights . codes) over the 32s of a superblock."""
        total = np.zeros_like(leaf)
        for b in range(k, end, 32):
            exact = codes[:, b : b + 32] @ weights[:, b : b + 32].T
            assert abs(exact).max() < 2**24
            total = fma(F(exact), scale[:, b // 32], total)
        return total

    def step(leaf, k, end):
        if ggml_type in BLOCKS:
            for b in range(k, end, 32):
                exact = codes[:, b : b + 32] @ w[:, b : b + 32].T
                leaf = fma(F(exact), d[:, b // 32] * scale[:, b // 32], leaf)
            return leaf
        leaf = fma(dots(w, leaf, k, end), d[:, k // 256], leaf)
        if min_offset is not None:
            leaf = fma(-dots(mins, leaf, k, end), dmin[:, k // 256], leaf)
        return leaf

    return leaf_sums(columns, (len(x), len(w)), step)


def matmul(packed, ggml_type, x):
    """qmm of float32 rows x [N, K], packed as planes first -> float32 [N, rows]."""
    scale, hi, lo = (t.numpy() for t in planes(x))
    columns = x.shape[1]
    if ggml_type not in TILED:
        values = (F(254 * hi + lo) * scale[..., None]).reshape(len(x), -1)[:, :columns]
        return float_dot(gguf_dequantize(packed, ggml_type).numpy(), values)
    codes = [c.reshape(len(x), -1)[:, :columns].astype(np.int64) for c in (hi, lo)]
    offset, min_offset = TILED[ggml_type]
    w, d = integers(packed, ggml_type, 1, 0), halves(packed, ggml_type, offset)
    if min_offset is not None:
        mins = -integers(packed, ggml_type, 0, 1)
        dmin = halves(packed, ggml_type, min_offset)

    def step(leaf, k, end):
        s = scale[:, k // 256, None]
        if ggml_type in BLOCKS:
            value = np.zeros_like(leaf)
            for b in range(k, end, 32):
                t = planes_dot(w[:, b : b + 32], [c[:, b : b + 32] for c in codes])
                value = fma(d[:, b // 32], t, value)
            return fma(value, s, leaf)
        group = [c[:, k:end] for c in codes]
        leaf = fma(planes_dot(w[:, k:end], group), d[:, k // 256] * s, leaf)
        if min_offset is not None:
            leaf = fma(-planes_dot(mins[:, k:end], group), dmin[:, k // 256] * s, leaf)
        return leaf

    return leaf_sums(columns, (len(x), len(w)), step)
