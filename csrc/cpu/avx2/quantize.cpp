#include "cpu/avx2.h"

#include "cpu/quantize.inl"
