#include "cpu/avx512.h"

#include "cpu/act.inl"
