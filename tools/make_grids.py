"""Writes csrc/core/formats/grids.h: the code tables of the IQ formats, taken from gguf-py.

    python tools/make_grids.py            # rewrite the header
    python tools/make_grids.py --check    # fail when it differs

A grid row is 8 (or 4) small indices into a handful of levels. We keep the indices, a row per
16-bit word, 9 kB for all grids together, and compute the level of an index.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from gguf import quants

HEADER = Path(__file__).parents[1] / "csrc/core/formats/grids.h"

PREAMBLE = """\
// Code tables of the IQ formats. Written by tools/make_grids.py from gguf-py; do not edit.
//
// A grid row is one 16-bit word of indices, the first in the low bits. The tables are static
// variables of functions, so that host and device each get a copy. Levels are a line plus a
// deviation of four bits: shifts and adds stay vector instructions where a table would not.
#pragma once
#include "core/formats/format.h"

namespace dflash {
"""

SIGNS = """
// Eight sign bits whose number is even: seven are stored, the eighth completes the parity.
DFLASH_HD constexpr uint32_t even_signs(uint32_t seven) {
  uint32_t parity = seven ^ seven >> 4;
  parity ^= parity >> 2;
  parity ^= parity >> 1;
  return seven | (parity & 1) << 7;
}

// magnitude, negative when bit j of `signs` is set
DFLASH_HD constexpr int with_sign(int magnitude, uint32_t signs, int j) {
  const int negative = int(signs >> j & 1);
  return (magnitude ^ -negative) + negative;
}
"""


def even_signs(seven: int) -> int:
    return seven | (seven.bit_count() & 1) << 7


def line(table: tuple[int, ...]) -> str:
    """An expression of int i for table[i]: a line plus a deviation of four bits."""
    step = (table[-1] - table[0]) // (len(table) - 1)
    deviation = [level - step * i for i, level in enumerate(table)]
    first = min(deviation)
    nibbles = [d - first for d in deviation]
    assert max(nibbles) < 16, table
    text = f"{step} * i" if step > 1 else "i"
    text += f" - {-first}" if first < 0 else f" + {first}" if first else ""
    packed = sum(n << 4 * i for i, n in enumerate(nibbles))
    return text + (f" + int(0x{packed:x}u >> 4 * i & 15)" if packed else "")


def rows(name: str, quant) -> str:
    """The lookup of one grid: row number -> word of indices."""
    quant.init_grid()
    bits = 2 if len(quant.grid_map) <= 4 else 3
    index = {level: i for i, level in enumerate(quant.grid_map)}
    grid = quant.grid.reshape(quant.grid_shape)
    words = [sum(index[int(v)] << bits * j for j, v in enumerate(row)) for row in grid]
    assert max(words) < 1 << 16
    body = ", ".join(f"0x{w:04x}" for w in words)
    return f"""
// {quant.grid_shape[1]} indices of {bits} bits
DFLASH_HD uint32_t {name}_row(int row) {{
  static constexpr uint16_t table[{len(words)}] = {{{body}}};
  return table[row];
}}
"""


def levels(name: str, quant) -> str:
    """Index j of a word -> level."""
    bits = 2 if len(quant.grid_map) <= 4 else 3
    text = ", ".join(map(str, quant.grid_map))
    return f"""
// levels {text}
DFLASH_HD constexpr int {name}_level(uint32_t word, int j) {{
  const int i = int(word >> {bits} * j & {(1 << bits) - 1});
  return {line(quant.grid_map)};
}}
"""


def iq4(table: tuple[int, ...]) -> str:
    text = ", ".join(map(str, table))
    return f"""
// IQ4_NL and IQ4_XS: {text}
DFLASH_HD constexpr int iq4_value(int nibble) {{
  const int i = nibble & 7;
  return nibble < 8 ? {line(table[:8])} : {line(table[8:])};
}}
"""


def fp4(table: tuple[int, ...]) -> str:
    text = ", ".join(map(str, table[:8]))
    assert [-v for v in table[:8]] == list(table[8:])
    return f"""
// MXFP4 and NVFP4, twice an e2m1 number: {text}; the fourth bit is the sign
DFLASH_HD constexpr int fp4_value(int nibble) {{
  const int i = nibble & 7;
  return with_sign({line(table[:8])}, nibble, 3);
}}
"""


def header() -> str:
    ksigns = quants.IQ2_XXS.ksigns
    assert [even_signs(i) for i in range(128)] == list(ksigns)
    assert quants.NVFP4.kvalues == quants.MXFP4.kvalues
    assert quants.IQ2_XXS.grid_map == quants.IQ2_XS.grid_map == quants.IQ2_S.grid_map
    parts = [
        PREAMBLE,
        SIGNS,
        iq4(quants.IQ4_NL.kvalues),
        fp4(quants.MXFP4.kvalues),
        levels("iq2", quants.IQ2_XXS),
        levels("iq3_xxs", quants.IQ3_XXS),
        levels("iq3_s", quants.IQ3_S),
        levels("iq1", quants.IQ1_S),
    ]
    for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"):
        parts.append(rows(name.lower().replace("iq1_s", "iq1"), getattr(quants, name)))
    text = "".join(parts) + "\n}  // namespace dflash\n"
    style = ["clang-format", f"--assume-filename={HEADER}"]
    return subprocess.run(style, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    text = header()
    if parser.parse_args().check:
        if HEADER.read_text() != text:
            sys.exit(f"{HEADER}: differs from gguf-py's tables; run tools/make_grids.py")
    else:
        HEADER.write_text(text)


if __name__ == "__main__":
    main()
