#include "cpu/avx512.h"

#include "cpu/quantize.inl"
