// First include of a translation unit compiled for AVX-512 VNNI. Standard headers come before the
// pragma: their inline functions are shared with every other unit by the linker.
#pragma once
#include "cpu/prelude.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#define DFLASH_ISA avx512
// g++ reads a whole file's tokens before it acts on the pragma, so its own macros would come too
// late for the #ifdef of our headers.
#ifndef __AVX512F__
#define __AVX512F__ 1
#endif
// g++ 12's own intrinsics start from an undefined vector.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
