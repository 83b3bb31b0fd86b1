#include "cpu/avx512.h"

#include "cpu/rope.inl"
