// Random numbers that depend on what they are for, not on when they are drawn: Philox 4x32-10 of
// (seed; position, stream). A token's draw is then the same in any batch, order or replay.
//
// Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
#pragma once
#include "core/hd.h"

namespace dflash {

// Streams keep the draws of one position independent of each other.
constexpr int kStreamTarget = 0, kStreamDraft = 1, kStreamAcceptance = 2, kStreams = 3;

struct Philox {
  uint32_t counter[4];
};

DFLASH_HD Philox philox4x32_10(Philox c, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t(0xD2511F53u) * c.counter[0];
    const uint64_t b = uint64_t(0xCD9E8D57u) * c.counter[2];
    c = {uint32_t(b >> 32) ^ c.counter[1] ^ key0, uint32_t(b),
         uint32_t(a >> 32) ^ c.counter[3] ^ key1, uint32_t(a)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return c;
}

// In [0, 1), a multiple of 2^-24, so that every value is exact in float32.
DFLASH_HD float uniform(int64_t seed, int64_t position, int stream) {
  const uint64_t s = uint64_t(seed), p = uint64_t(position);
  const Philox counter = {uint32_t(p), uint32_t(p >> 32), uint32_t(stream), 0u};
  const Philox random = philox4x32_10(counter, uint32_t(s), uint32_t(s >> 32));
  return float(random.counter[0] >> 8) * 5.9604644775390625e-8f;
}

}  // namespace dflash
