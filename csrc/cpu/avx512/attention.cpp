#include "cpu/avx512.h"

#include "cpu/attention.inl"
