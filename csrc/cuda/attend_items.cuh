// What a cluster that attends has to do: items are a piece, a KV head and some of its queries.
#pragma once
#include "cuda/attention_pieces.cuh"
#include "cuda/cluster.cuh"

namespace dflash::cuda {

constexpr int kMostSequences = 256;

struct AttendQuery {
  int at;          // row * heads + head, or -1
  int slot;        // of its piece
  int begin, end;  // keys it sees, counted from the chunk's first
};

struct AttendBounds {
  int queries;
  int begin, end;                // keys that some query sees
  int common_begin, common_end;  // keys that all see
};

// An item, and one of its chunks.
struct AttendPlace {
  int item, sequence, part, kv_head;
  int begin, end, chunk;  // of the piece, and which of its chunks
  int slot;               // of the piece's first row, before heads are counted
  bool there;
  SequenceKeys keys;

  // Keys of the chunk that a row of the sequence sees.
  __device__ __forceinline__ Keys<int> seen(const AttentionView& a, const AttentionPieces& w,
                                            int row) const {
    const Keys<int> all = keys.seen(a, w, row);
    const int origin = chunk * kChunkKeys;
    return {min(max(all.begin - origin, 0), kChunkKeys), min(max(all.end - origin, 0), kChunkKeys)};
  }
  // The page of a key of the chunk, and its row of the cache. Keys that do not exist have no page.
  __device__ __forceinline__ int page_of(const AttentionView& a, int key) const {
    const int position = chunk * kChunkKeys + key;
    const int32_t* table = a.page_table + sequence * a.table_pages;
    return position < keys.length ? table[position / int(a.page_size)] : 0;
  }
  __device__ __forceinline__ int row_of(const AttentionView& a, int key, int page) const {
    if (page < 0 || page >= a.pages) return kBadPage;
    return page * int(a.page_size) + (chunk * kChunkKeys + key) % int(a.page_size);
  }
};

struct AttendItems {
  int items[kMostSequences], base[kMostSequences];  // up to and with, in front of a sequence
  int chunks;
  AttendPlace place[3];  // now, next, and the one behind

  // By one warp: how many items the sequences up to each have, and where its slots begin.
  __device__ __forceinline__ void count(const AttentionView& a, const AttentionPieces& w,
                                        int queries) {
    const int lane = gpu::lane_id(), group = int(a.heads / a.kv_heads);
    const int of_piece = chunks_of_piece(a, w);
    int upto_all = 0, base_all = 0;
    for (int64_t from = 0; from < a.sequences; from += kLanes) {
      int own_items = 0, own_base = 0;
      if (from + lane < a.sequences) {
        const SequenceKeys keys = sequence_keys(a, w, from + lane);
        const int pieces = keys.pieces(of_piece);
        own_items = pieces * ceil_div(keys.rows * group, queries) * int(a.kv_heads);
        own_base = pieces * keys.rows;
      }
      int upto_items = own_items, upto_base = own_base;
      for (int step = 1; step < kLanes; step *= 2) {
        const int i = gpu::from_lane(upto_items, (lane - step) & 31);
        const int b = gpu::from_lane(upto_base, (lane - step) & 31);
        if (lane >= step) upto_items += i, upto_base += b;
      }
      const bool there = from + lane < a.sequences;
      store_if(there, items + from + lane, upto_all + upto_items);
      store_if(there, base + from + lane, base_all + upto_base - own_base);
      upto_all += gpu::from_lane(upto_items, kLanes - 1);
      base_all += gpu::from_lane(upto_base, kLanes - 1);
    }
    store_if(lane == 0, &chunks, of_piece);
  }

  // The first chunk of an item, which is not in front of `sequence`.
  __device__ __forceinline__ void find(const AttentionView& a, const AttentionPieces& w,
                                       int queries, int sequence, int item, AttendPlace& to) const {
    int s = sequence;
    while (s < a.sequences && item >= items[s]) ++s;
    to.item = item;
    to.sequence = s;
    to.there = s < a.sequences;
    if (!to.there) return;
    const SequenceKeys keys = sequence_keys(a, w, s);
    const int group = int(a.heads / a.kv_heads), heads = int(a.kv_heads);
    const int parts = ceil_div(keys.rows * group, queries);
    int rest = item - (s == 0 ? 0 : items[s - 1]);
    to.part = rest % parts;
    rest /= parts;
    to.kv_head = rest % heads;
    rest /= heads;
    const int first = (keys.first / chunks + rest) * chunks;
    to.begin = to.chunk = max(first, keys.first);
    to.end = min(first + chunks, keys.end);
    to.slot = base[s] + rest * keys.rows;
    to.keys = keys;
  }

  // What a cluster of `ranks` blocks does after `from`.
  __device__ __forceinline__ void find_next(const AttentionView& a, const AttentionPieces& w,
                                            int queries, int ranks, const AttendPlace& from,
                                            AttendPlace& to) const {
    if (from.there && from.chunk + 1 < from.end) {
      to = from;
      ++to.chunk;
    } else {
      find(a, w, queries, from.sequence, from.item + int(gridDim.x) / ranks, to);
    }
  }
};

}  // namespace dflash::cuda
