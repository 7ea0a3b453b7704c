// shardlib: typed sharding, explicit communication, autodiff. The rooms in reading order; each includes only those
// before it. Not included here: shardlib/pipeline.hpp (stages and schedules), and the rooms shardlib/io (text, tokens,
// checkpoints) and shardlib/run (a trainer's options, metrics, reports).
#pragma once

#include "shardlib/support/version.hpp"  // SHARDLIB_VERSION

// Types, standard library only. shapes.hpp alone checks shapes at compile time.
#include "shardlib/spec/dtype.hpp"            // f32, bf16, f64, i32, u32, u8, bool_
#include "shardlib/spec/spec.hpp"             // the spec language
#include "shardlib/rules/all.hpp"             // what each op allows, as pure functions
#include "shardlib/types/tensor.hpp"          // Tensor<f32, "batch/d in">, Mesh<"d t">, Dual
#include "shardlib/types/tree.hpp"            // structs of tensors
#include "shardlib/types/gradient.hpp"        // the types of gradients
#include "shardlib/types/spec_functions.hpp"  // specs made from specs, for generic code
#include "shardlib/shapes.hpp"                // every op, with the type of its result

// Devices.
#include "shardlib/support/error.hpp"
#include "shardlib/memory/region.hpp"      // memory to cut blocks from
#include "shardlib/memory/buffer.hpp"      // pooled memory
#include "shardlib/comm/communicator.hpp"  // the erased communicator
#include "shardlib/comm/backend.hpp"       // threads, shared memory or MPI
#include "shardlib/device/device.hpp"      // one device of a mesh
#include "shardlib/device/launch.hpp"      // threads of one process, or MPI ranks

// What runs.
#include "shardlib/runtime/value.hpp"            // what a tensor holds
#include "shardlib/autodiff/tape.hpp"            // reverse-mode differentiation: what ops record
#include "shardlib/autodiff/backward.hpp"        // and running it backward
#include "shardlib/autodiff/value_and_grad.hpp"  // loss and gradients; recompute
#include "shardlib/compute/attention.hpp"         // what ops do with a device's blocks, in the order of ops/
#include "shardlib/compute/collectives.hpp"
#include "shardlib/compute/create.hpp"
#include "shardlib/compute/custom.hpp"             // ops of one's own
#include "shardlib/compute/dropout.hpp"
#include "shardlib/compute/einsum.hpp"
#include "shardlib/compute/elementwise.hpp"
#include "shardlib/compute/index.hpp"
#include "shardlib/compute/layout.hpp"
#include "shardlib/compute/loss.hpp"
#include "shardlib/compute/map.hpp"
#include "shardlib/compute/norms.hpp"
#include "shardlib/compute/reductions.hpp"

// What programs need besides.
#include "shardlib/optim/initialize.hpp"   // first values of a tree
#include "shardlib/optim/optimizers.hpp"   // AdamW, global norm
#include "shardlib/optim/lr_schedule.hpp"  // learning rates
#include "shardlib/interop/shard_map.hpp"  // host arrays in and out; spmd
#include "shardlib/interop/arrays.hpp"     // Eigen, Kokkos, the user's memory
#include "shardlib/interop/format.hpp"     // fmt, visualize_sharding
