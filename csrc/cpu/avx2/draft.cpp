#include "cpu/avx2.h"

#include "cpu/draft.inl"
