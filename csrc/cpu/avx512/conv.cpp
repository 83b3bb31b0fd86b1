#include "cpu/avx512.h"

#include "cpu/conv.inl"
