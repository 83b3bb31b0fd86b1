// clang-format off: the target comes first
#include "cpu/avx512.h"
#include "cpu/conv.inl"
