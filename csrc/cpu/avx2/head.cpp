#include "cpu/avx2.h"

#include "cpu/head.inl"
