#include "cpu/avx512.h"

#include "cpu/delta.inl"
