// Kernels of flip and roll for a device's shard.
#pragma once

#include "shardlib/autodiff/tape.hpp"
#include "shardlib/ops/positions.hpp"
#include "shardlib/runtime/value.hpp"
#include "shardlib/support/inline.hpp"

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/positions.hpp"
#endif
