#include "cpu/avx2.h"

#include "cpu/matmul.inl"
