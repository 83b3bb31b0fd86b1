#pragma once
#include "core/float_type.h"
