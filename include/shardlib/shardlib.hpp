// shardlib: typed sharding, explicit communication, autodiff. The parts are in reading order; tests/rooms.py lists
// the folders in the order in which they may include each other. This header does not include shardlib/pipeline.hpp
// (stages and schedules), shardlib/interop/eigen.hpp (as_eigen), shardlib/io (text, tokens, checkpoints) and
// shardlib/run (a trainer's options, metrics, reports).
#pragma once

#include "shardlib/support/version.hpp"  // SHARDLIB_VERSION

// Types, which need only the standard library. shapes.hpp alone checks shapes at compile time.
#include "shardlib/rules/all.hpp"             // the rules of each op, as pure functions
#include "shardlib/shapes.hpp"                // every op, with the type of its result
#include "shardlib/spec/dtype.hpp"            // f32, bf16, f64, i32, u32, u8, bool_
#include "shardlib/spec/spec.hpp"             // the spec language
#include "shardlib/types/gradient.hpp"        // the types of gradients
#include "shardlib/types/spec_functions.hpp"  // functions from specs to specs, for generic code
#include "shardlib/types/tensor.hpp"          // Tensor<f32, "batch/d in">, Mesh<"d t">, Dual
#include "shardlib/types/tree.hpp"            // structs of tensors

// Devices.
#include "shardlib/comm/backend.hpp"       // threads, shared memory or MPI
#include "shardlib/comm/communicator.hpp"  // the type-erased communicator
#include "shardlib/device/device.hpp"      // one device of a mesh
#include "shardlib/device/launch.hpp"      // threads of one process, or MPI ranks
#include "shardlib/memory/buffer.hpp"      // pooled memory
#include "shardlib/memory/region.hpp"      // the memory from which pools allocate blocks
#include "shardlib/support/error.hpp"

// Execution.
#include "shardlib/autodiff/backward.hpp"        // the backward pass
#include "shardlib/autodiff/tape.hpp"            // reverse-mode differentiation: the tape
#include "shardlib/autodiff/value_and_grad.hpp"  // loss and gradients; activation checkpointing
#include "shardlib/compute/attention.hpp"        // kernels for a device's shards, in the order of ops/
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/convolution.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/custom.hpp"  // ops defined outside the library
#include "shardlib/compute/dropout.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/einsum_bias.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/index.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/compute/loss.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/compute/norms.hpp"
#include "shardlib/compute/ordering.hpp"
#include "shardlib/compute/ragged.hpp"
#include "shardlib/compute/reductions.hpp"
#include "shardlib/compute/scans.hpp"
#include "shardlib/runtime/names.hpp"   // the sizes of names; Scope
#include "shardlib/runtime/tensor.hpp"  // members of Tensor and Mesh
#include "shardlib/runtime/value.hpp"   // the run-time value of a tensor

// Other parts of a program.
#include "shardlib/interop/arrays.hpp"           // Kokkos, the user's memory
#include "shardlib/interop/check_gradients.hpp"  // gradients against finite differences, in tests
#include "shardlib/interop/find_nan.hpp"         // the op that makes the first NaN
#include "shardlib/interop/format.hpp"           // fmt, visualize_sharding
#include "shardlib/interop/hessian.hpp"          // Hessian-vector products
#include "shardlib/interop/shard_map.hpp"        // host arrays in and out; spmd
#include "shardlib/optim/adafactor.hpp"          // Adafactor
#include "shardlib/optim/gather_weights.hpp"     // weights gathered once for several microbatches
#include "shardlib/optim/global_norm.hpp"        // the global norm of a tree
#include "shardlib/optim/initialize.hpp"         // initial values of a tree
#include "shardlib/optim/leaf_rules.hpp"         // learning rates and weight decay by patterns of leaf names
#include "shardlib/optim/lr_schedule.hpp"        // learning-rate schedules
#include "shardlib/optim/muon.hpp"               // Muon
#include "shardlib/optim/optimizers.hpp"         // AdamW, SGD, Lion
#include "shardlib/optim/reduce_gradients.hpp"   // sums of gradients over axes of replicated weights

// The definitions of headers of ops/ whose kernels are no templates, so no header of compute/ brings them.
// shardlib::compiled has them.
#ifndef SHARDLIB_COMPILED
#include "shardlib/compute/impl/collective_matmul.hpp"
#include "shardlib/compute/impl/positions.hpp"
#include "shardlib/compute/impl/reinterpret.hpp"
#include "shardlib/compute/impl/submesh.hpp"
#endif
