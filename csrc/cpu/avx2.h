// First include of a translation unit compiled for the platform floor (see setup.py: -mavx2 -mfma).
#pragma once
#include "cpu/prelude.h"

#define DFLASH_ISA avx2
