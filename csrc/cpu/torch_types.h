#pragma once
#include "host/dispatch.h"
