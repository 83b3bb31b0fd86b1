// clang-format off: the target comes first
#include "cpu/avx2.h"
#include "cpu/conv.inl"
