"""Keys and values of one sequence, one page per layer."""

import torch
from torch import Tensor

__all__ = ["KVCache", "Rows"]

_FIRST = 256  # rows of a fresh cache; it doubles from there


class Rows:
    """Row offsets of one forward pass of one sequence, on the device.

    Attributes:
        rows: how many.
        positions: int64 ``[rows]``; also the rows of the caches.
        following: int64 ``[rows]``, the position behind each row.
        cu_seqlens: int32 ``[2]``.
        lengths: int32 ``[1]``, keys including these rows.

    Args:
        cache: has room for the rows afterwards.
        start: position of the first row.
        rows: how many.
        own: tensors of its own, which :meth:`move` changes in place.
    """

    def __init__(self, cache: "KVCache", start: int, rows: int, own: bool = False) -> None:
        cache.reserve(start + rows)
        self.rows = rows
        # Views of tables that the cache keeps: making small tensors costs more than using them.
        self.cu_seqlens = cache.cu_seqlens(rows)
        table = cache.positions[start : start + rows + 1]
        self.lengths = cache.counts[start + rows : start + rows + 1]
        if own:
            self._ahead = cache.positions[: rows + 1].clone()  # 0, 1, ..
            self._table = table = table.clone()
            # The length is the position behind the rows: an int32 in its lower half.
            self.lengths = table[rows:].view(torch.int32)[:1]
        self.positions, self.following = table[:rows], table[1:]

    def move(self, start: int) -> None:
        """Let rows that own their tensors stand at ``start ..``, wherever they stood.

        One addition with the start as its argument: on a GPU a launch that waits for no copy.
        """
        torch.add(self._ahead, start, out=self._table)


class KVCache:
    """Caches ``[1, capacity, kv_heads, head_dim]`` of every layer, growing as rows are reserved.

    Rows beyond the committed length are never read: what a rejected draft left there may stay.

    Args:
        layers: number of attention layers.
        kv_heads: heads of K and V.
        head_dim: values per head.
        dtype: float32, float16 or bfloat16; what is stored is what is read back.
        device: where the caches live.
    """

    @torch.inference_mode(False)  # to be written from either mode
    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        def empty() -> Tensor:
            return torch.zeros(1, 0, kv_heads, head_dim, dtype=dtype, device=device)

        self.k = [empty() for _ in range(layers)]
        self.v = [empty() for _ in range(layers)]
        self.page_table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self.positions = torch.empty(0, dtype=torch.int64, device=device)
        self.counts = torch.empty(0, dtype=torch.int32, device=device)
        self._cu_seqlens: dict[int, Tensor] = {}

    @property
    def capacity(self) -> int:
        """Rows that fit without growing."""
        return max(0, self.positions.shape[0] - 1)

    def cu_seqlens(self, rows: int) -> Tensor:
        """``[0, rows]`` as int32, made once."""
        if rows not in self._cu_seqlens:
            device = self.counts.device
            self._cu_seqlens[rows] = torch.tensor([0, rows], dtype=torch.int32, device=device)
        return self._cu_seqlens[rows]

    def reserve(self, rows: int) -> None:
        """Make room for ``rows`` positions in total. Pointers change when it grows."""
        if rows <= self.capacity:
            return
        capacity = max(_FIRST, self.capacity)
        while capacity < rows:
            capacity *= 2
        with torch.inference_mode(False), torch.no_grad():
            grown = {
                "k": [self._grown(old, capacity) for old in self.k],
                "v": [self._grown(old, capacity) for old in self.v],
                "positions": torch.arange(capacity + 1, device=self.positions.device),
                "counts": torch.arange(capacity + 1, dtype=torch.int32, device=self.counts.device),
            }
        # All or nothing: neither an interrupt nor a lack of memory may leave some layers behind.
        self.__dict__.update(grown)

    @staticmethod
    def _grown(old: Tensor, capacity: int) -> Tensor:
        new = old.new_zeros(1, capacity, *old.shape[2:])
        new[:, : old.shape[1]] = old
        return new
