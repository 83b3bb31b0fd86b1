#include "cpu/avx512.h"

#include "cpu/head.inl"
