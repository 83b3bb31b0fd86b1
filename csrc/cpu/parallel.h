// Threads of the CPU kernels. OpenMP's workers spin while they wait, and a neighbour on the same
// core then costs a decode step forty times its length. Here work is claimed item by item: a worker
// that the scheduler holds back simply finds nothing left, and the caller does its share.
#pragma once
#include <cstdint>
#include <type_traits>

namespace dflash::cpu {

using RangeBody = void (*)(void* context, int64_t begin, int64_t end);

// Runs body over [0, count) in pieces of `grain`, on torch.get_num_threads() threads at the most.
// Returns when all is done. The pieces must not depend on each other.
void parallel_ranges(int64_t count, int64_t grain, RangeBody body, void* context);

// body(begin, end)
template <class Body>
void parallel_for(int64_t count, int64_t grain, Body&& body) {
  parallel_ranges(
      count, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<std::remove_reference_t<Body>*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace dflash::cpu
