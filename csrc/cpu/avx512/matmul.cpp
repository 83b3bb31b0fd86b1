#include "cpu/avx512.h"

#include "cpu/matmul.inl"
