// The typing rules: one pure constexpr function per op. It maps specs to the result's spec or to the reason for an
// error. The op, its compile error, the run-time check and the tests all call these functions.
#pragma once

#include "shardlib/rules/attention.hpp"
#include "shardlib/rules/collective_matmul.hpp"
#include "shardlib/rules/collectives.hpp"
#include "shardlib/rules/common.hpp"
#include "shardlib/rules/convolution.hpp"
#include "shardlib/rules/dtypes.hpp"
#include "shardlib/rules/einsum.hpp"
#include "shardlib/rules/einsum_bias.hpp"
#include "shardlib/rules/einsum_many.hpp"
#include "shardlib/rules/grad.hpp"
#include "shardlib/rules/index.hpp"
#include "shardlib/rules/layout.hpp"
#include "shardlib/rules/local.hpp"
#include "shardlib/rules/loops.hpp"
#include "shardlib/rules/loss.hpp"
#include "shardlib/rules/positions.hpp"
#include "shardlib/rules/ragged.hpp"
#include "shardlib/rules/reinterpret.hpp"
#include "shardlib/rules/scans.hpp"
#include "shardlib/rules/submesh.hpp"
