#include "cpu/avx512.h"

#include "cpu/sampling.inl"
