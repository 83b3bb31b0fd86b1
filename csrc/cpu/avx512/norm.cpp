#include "cpu/avx512.h"

#include "cpu/norm.inl"
