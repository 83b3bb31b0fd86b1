#include "cpu/avx2.h"

#include "cpu/attention.inl"
