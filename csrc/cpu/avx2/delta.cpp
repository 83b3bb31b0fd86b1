#include "cpu/avx2.h"

#include "cpu/delta.inl"
