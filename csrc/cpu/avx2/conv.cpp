#include "cpu/avx2.h"

#include "cpu/conv.inl"
