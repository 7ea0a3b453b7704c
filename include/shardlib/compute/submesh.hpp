// The run-time part of submesh and on_submeshes.
#pragma once

#include "shardlib/ops/submesh.hpp"
#include "shardlib/support/inline.hpp"

#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/submesh.hpp"
#endif
