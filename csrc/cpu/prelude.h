// Standard headers of the kernels that are compiled once per instruction set.
#pragma once
#include <immintrin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>
#include <utility>

#include "core/hd.h"
#include "core/numeric.h"
#include "core/reduce.h"
#include "cpu/parallel.h"
