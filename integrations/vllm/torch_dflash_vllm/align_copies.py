"""Feature ``align_copies``: prefix caching of hybrids with speculation, on a CPU.

With prefix caching vLLM keeps recurrent states at block boundaries (``mamba_cache_mode=align``),
and two Triton kernels move the state that the accepted tokens lead to across such a boundary. A
CPU has no Triton, and vLLM registers CPU versions of all its kernels but these.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from .features import NotNeeded

__all__ = ["apply"]

_MODULE: Final = "vllm.v1.worker.mamba_utils"


@dataclass(frozen=True)
class _States:
    """Every state tensor of every layer, as addresses: what both kernels are given.

    One row per tensor; a convolution window has ``conv_widths > 0``, a recurrent state 0.
    """

    block_tables: Tensor  # int64 [groups], addresses of int32 [requests, columns]
    requests_stride: int  # columns from one request to the next
    bases: Tensor  # int64, address of block 0
    block_strides: Tensor  # bytes
    elem_sizes: Tensor  # bytes
    inner_sizes: Tensor  # elements of a window's row, or of a whole recurrent state
    conv_widths: Tensor
    groups: Tensor  # which block table
    row_counts: Tensor  # channels-first windows: rows of a block
    row_strides: Tensor  # and bytes between them
    rows_first: bool

    def copy(self, request: int, source: int, target: int, shift: int) -> None:
        """Copy all states of a request from one column of its block table to another.

        Args:
            request: row of the block tables.
            source, target: columns.
            shift: rows that were accepted beyond the first: a window moves up by so many, a
                recurrent state is that of column ``source + shift``.
        """
        for i in range(self.bases.numel()):
            table = int(self.block_tables[int(self.groups[i])])
            row = table + 4 * request * self.requests_stride

            def address(column: int, i: int = i, row: int = row) -> int:
                block = ctypes.c_int32.from_address(row + 4 * column).value
                return int(self.bases[i]) + block * int(self.block_strides[i])

            to, size = address(target), int(self.elem_sizes[i])
            inner, kept = int(self.inner_sizes[i]), int(self.conv_widths[i]) - shift
            if int(self.conv_widths[i]) == 0:
                ctypes.memmove(to, address(source + shift), inner * size)
            elif self.rows_first:
                start = address(source)
                for n in range(int(self.row_counts[i])):
                    row_at = n * int(self.row_strides[i])
                    ctypes.memmove(to + row_at, start + row_at + shift * size, kept * size)
            else:
                start = address(source) + shift * inner * size
                ctypes.memmove(to, start, kept * inner * size)


def precopy_mamba_align_fused_kernel(
    mamba_state_idx_ptr: Tensor,
    src_col_ptr: Tensor,
    token_bias_ptr: Tensor,
    block_table_ptrs_ptr: Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: Tensor,
    state_block_strides_ptr: Tensor,
    state_elem_sizes_ptr: Tensor,
    state_inner_sizes_ptr: Tensor,
    state_conv_widths_ptr: Tensor,
    state_group_indices_ptr: Tensor,
    state_dim_row_count_ptr: Tensor,
    state_dim_row_stride_ptr: Tensor,
    idx_mapping_ptr: Tensor | None,
    num_reqs: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = True,
    TEMPORAL_TILES: int = 1,
) -> None:
    """Before a step: where a request enters a new block, bring its state there."""
    states = _States(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    for request in _requests(idx_mapping_ptr, num_reqs):
        source, target = int(src_col_ptr[request]), int(mamba_state_idx_ptr[request])
        if source >= 0 and source != target:  # -1: nothing was computed yet
            states.copy(request, source, target, int(token_bias_ptr[request]))


def postprocess_mamba_fused_kernel(
    num_accepted_tokens_ptr: Tensor,
    mamba_state_idx_ptr: Tensor,
    num_scheduled_tokens_ptr: Tensor | None,
    num_computed_tokens_ptr: Tensor,
    num_draft_tokens_ptr: Tensor | None,
    block_table_ptrs_ptr: Tensor,
    block_table_stride_req: int,
    state_base_addrs_ptr: Tensor,
    state_block_strides_ptr: Tensor,
    state_elem_sizes_ptr: Tensor,
    state_inner_sizes_ptr: Tensor,
    state_conv_widths_ptr: Tensor,
    state_group_indices_ptr: Tensor,
    state_dim_row_count_ptr: Tensor,
    state_dim_row_stride_ptr: Tensor,
    num_accepted_tokens_out_ptr: Tensor,
    idx_mapping_ptr: Tensor | None,
    num_reqs: int,
    block_size: int,
    COPY_BLOCK_SIZE: int,
    CONV_STATE_DIM_FIRST: bool,
    HAS_IDX_MAPPING: bool = False,
    PRECOMPUTED_NEW_COMPUTED: bool = False,
    TEMPORAL_TILES: int = 1,
) -> None:
    """After a step: where the accepted tokens passed a boundary, keep the state from there."""
    states = _States(
        block_table_ptrs_ptr,
        block_table_stride_req,
        state_base_addrs_ptr,
        state_block_strides_ptr,
        state_elem_sizes_ptr,
        state_inner_sizes_ptr,
        state_conv_widths_ptr,
        state_group_indices_ptr,
        state_dim_row_count_ptr,
        state_dim_row_stride_ptr,
        CONV_STATE_DIM_FIRST,
    )
    for request in _requests(idx_mapping_ptr, num_reqs):
        accepted, source = int(num_accepted_tokens_ptr[request]), int(mamba_state_idx_ptr[request])
        computed = int(num_computed_tokens_ptr[request])
        if num_scheduled_tokens_ptr is None or num_draft_tokens_ptr is None:
            first = computed - accepted + 1  # tokens behind the state of the step's first row
        else:
            scheduled, drafts = num_scheduled_tokens_ptr[request], num_draft_tokens_ptr[request]
            first = computed + int(scheduled) - int(drafts)
            computed = first + accepted - 1
        boundary = computed // block_size * block_size
        if boundary < first:
            continue
        shift, target = boundary - first, boundary // block_size - 1
        if source == target:
            num_accepted_tokens_out_ptr[request] = 1
        if source != target or shift:
            states.copy(request, source, target, shift)


def _requests(mapping: Tensor | None, count: int) -> list[int]:
    """Rows of the block tables that take part."""
    rows = list(range(count)) if mapping is None else mapping[:count].tolist()
    return [r for r in rows if r >= 0]


def apply() -> str:
    """Register both kernels with vLLM's table of kernels that a platform replaces.

    Raises:
        NotNeeded: the platform has Triton, or a version of its own.
    """
    from vllm.platforms import current_platform
    from vllm.triton_utils import HAS_TRITON
    from vllm.triton_utils.dispatcher import _registry, register_kernels

    if not current_platform.is_cpu() or HAS_TRITON:
        raise NotNeeded("vLLM has its own here")
    kernels = {
        f"{_MODULE}.{kernel.__name__}": kernel
        for kernel in (precopy_mamba_align_fused_kernel, postprocess_mamba_fused_kernel)
    }
    missing = {name: kernel for name, kernel in kernels.items() if name not in _registry}
    if not missing:
        raise NotNeeded("vLLM has its own here")
    register_kernels(missing)
    return "copies of recurrent states at block boundaries: prefix caching on a CPU"
