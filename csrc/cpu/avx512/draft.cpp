#include "cpu/avx512.h"

#include "cpu/draft.inl"
