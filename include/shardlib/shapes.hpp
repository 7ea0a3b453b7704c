// Types only: specs, rules, Tensor, and every op with the type of its result. It needs only the standard library and
// checks the shapes of a whole model at compile time. Include shardlib.hpp to run the program.
#pragma once

#include "shardlib/spec/spec.hpp"  // the spec language

#include "shardlib/ops/arithmetic.hpp"         // + - * /, floor_divide, mod
#include "shardlib/ops/asynchronous.hpp"       // all_gather_start, reduce_scatter_start, wait
#include "shardlib/ops/attention.hpp"          // causal_attention
#include "shardlib/ops/collective_matmul.hpp"  // einsums of an operand that gathers, or with a result that scatters
#include "shardlib/ops/collectives.hpp"        // all_gather, reduce_scatter, all_reduce, all_to_all, shift, shard
#include "shardlib/ops/convolution.hpp"        // conv_unreduced
#include "shardlib/ops/create.hpp"             // full, zeros, iota, random numbers; item
#include "shardlib/ops/dropout.hpp"            // dropout
#include "shardlib/ops/einsum.hpp"             // einsum_unreduced, einsum
#include "shardlib/ops/einsum_bias.hpp"        // einsum_bias, einsum_bias_gelu
#include "shardlib/ops/elementwise.hpp"        // exp, relu, pow, maximum, where, cast, stop_gradient
#include "shardlib/ops/index.hpp"              // index_unreduced, scatter_add, take_along
#include "shardlib/ops/layout.hpp"    // rename, rearrange, transpose, merge, split, concat, narrow, pad, stack, unstack
#include "shardlib/ops/log_softmax.hpp"  // log_softmax; softmax and logsumexp along sharded dims
#include "shardlib/ops/loops.hpp"     // scan_layers, fori, scan
#include "shardlib/ops/loss.hpp"      // cross_entropy, linear_cross_entropy
#include "shardlib/ops/map.hpp"       // map, for any function of numbers
#include "shardlib/ops/norms.hpp"     // softmax, rms_norm, layer_norm, rope
#include "shardlib/ops/ordering.hpp"  // argsort, sort, top_k
#include "shardlib/ops/positions.hpp"       // flip, roll, one_hot, tril, triu, diagonal
#include "shardlib/ops/prefetch.hpp"        // prefetch
#include "shardlib/ops/ragged.hpp"          // ragged_all_to_all, grouped_einsum
#include "shardlib/ops/reductions.hpp"      // sum, mean, max, min, prod, argmax, broadcast
#include "shardlib/ops/reinterpret.hpp"     // reinterpret, of meshes and of tensors
#include "shardlib/ops/scans.hpp"           // cumsum, cumprod, cummax, linear_scan
#include "shardlib/ops/sequences.hpp"       // orders of positions along a sharded length
#include "shardlib/ops/statistics.hpp"      // logsumexp, var, vector_norm, any, all
#include "shardlib/ops/submesh.hpp"         // submesh, on_submeshes
#include "shardlib/ops/unstack.hpp"         // unstack and stack of trees of tensors
#include "shardlib/ops/value_and_grad.hpp"  // value_and_grad, explicit_activation_checkpointing
#include "shardlib/support/version.hpp"
#include "shardlib/types/spec_functions.hpp"  // functions from specs to specs, for generic code
#include "shardlib/types/tree_operators.hpp"  // compile errors for arithmetic of structs of tensors
