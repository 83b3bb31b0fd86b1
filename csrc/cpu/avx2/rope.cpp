#include "cpu/avx2.h"

#include "cpu/rope.inl"
