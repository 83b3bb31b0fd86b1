// Which keys a query may attend to. They are one range, so that no kernel has to ask key by key.
#pragma once
#include "core/hd.h"

namespace dflash {

template <class Int>
struct Keys {
  Int begin, end;  // empty: end == begin
};
using KeyRange = Keys<int64_t>;

// Keys 0 .. length - 1 exist. window 0: none; otherwise the query itself counts, and without
// causality the window also ends at query + window - 1. query + window must be an Int.
template <class Int>
DFLASH_HD Keys<Int> visible_keys(Int query, Int length, Int window, bool causal) {
  const Int first = window > 0 ? query - window + 1 : 0;
  Int end = length;
  if (causal && query + 1 < end) end = query + 1;
  if (!causal && window > 0 && query + window < end) end = query + window;
  const Int begin = first > 0 ? first : 0;
  return {begin, end > begin ? end : begin};
}

}  // namespace dflash
