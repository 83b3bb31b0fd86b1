#include "cpu/avx2.h"

#include "cpu/sampling.inl"
