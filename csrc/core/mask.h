// Which keys a query may attend to. They are one range, so that no kernel has to ask key by key.
#pragma once
#include "core/hd.h"

namespace dflash {

struct KeyRange {
  int64_t begin, end;  // empty: end == begin
};

// Keys 0 .. length - 1 exist. window 0: none; otherwise the query itself counts, and without
// causality the window also ends at query + window - 1.
DFLASH_HD KeyRange visible_keys(int64_t query, int64_t length, int64_t window, bool causal) {
  const int64_t first = window > 0 ? query - window + 1 : 0;
  int64_t end = length;
  if (causal && query + 1 < end) end = query + 1;
  if (!causal && window > 0 && query + window < end) end = query + window;
  const int64_t begin = first > 0 ? first : 0;
  return {begin, end > begin ? end : begin};
}

}  // namespace dflash
