#include "cpu/avx2.h"

#include "cpu/norm.inl"
