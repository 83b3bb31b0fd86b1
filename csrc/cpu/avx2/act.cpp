#include "cpu/avx2.h"

#include "cpu/act.inl"
