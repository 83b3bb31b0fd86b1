// First include of a translation unit compiled for AVX-512 VNNI. Standard headers come before the
// pragma: their inline functions are shared with every other unit by the linker.
#pragma once
#include "cpu/prelude.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define DFLASH_ISA avx512
