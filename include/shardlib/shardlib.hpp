// shardlib: typed sharding, explicit communication, autodiff. The headers in reading order. Folders of their own, not
// included here: shardlib/pipeline (stages and schedules), shardlib/io (text, tokens, checkpoints), shardlib/run (a
// trainer's options, metrics, reports).
#pragma once

// Types, standard library only (shardlib/shapes.hpp alone checks shapes at compile time).
#include "shardlib/dtype.hpp"     // f32, bf16, f64, i32, u32, u8, bool_
#include "shardlib/spec.hpp"      // the spec language
#include "shardlib/rules.hpp"     // what each op allows, as pure functions
#include "shardlib/tensor.hpp"    // Tensor<f32, "batch/d in">, Mesh<"d t">, Dual
#include "shardlib/tree.hpp"      // structs of tensors
#include "shardlib/gradient.hpp"  // the types of gradients
#include "shardlib/shapes.hpp"    // the declaration of every op

// Devices.
#include "shardlib/error.hpp"
#include "shardlib/region.hpp"  // memory to cut blocks from
#include "shardlib/buffer.hpp"  // pooled memory
#include "shardlib/comm.hpp"    // the erased communicator
#include "shardlib/device.hpp"  // one device of a mesh
#include "shardlib/launch.hpp"  // threads of one process, or MPI ranks

// What runs.
#include "shardlib/value.hpp"     // what a tensor holds
#include "shardlib/tape.hpp"      // reverse-mode differentiation: what ops record
#include "shardlib/backward.hpp"  // and running it backward
#include "shardlib/ops/attention.hpp"
#include "shardlib/ops/collectives.hpp"
#include "shardlib/ops/create.hpp"
#include "shardlib/ops/dropout.hpp"
#include "shardlib/ops/einsum.hpp"
#include "shardlib/ops/elementwise.hpp"
#include "shardlib/ops/index.hpp"
#include "shardlib/ops/layout.hpp"
#include "shardlib/ops/linear_cross_entropy.hpp"
#include "shardlib/ops/loss.hpp"
#include "shardlib/ops/map.hpp"
#include "shardlib/ops/norms.hpp"
#include "shardlib/ops/reductions.hpp"
#include "shardlib/grad.hpp"        // value_and_grad, recompute
#include "shardlib/initialize.hpp"  // first values of a tree
#include "shardlib/spmd.hpp"        // host arrays in and out
#include "shardlib/interop.hpp"     // Eigen, Kokkos, the user's memory
#include "shardlib/format.hpp"      // fmt, visualize_sharding
#include "shardlib/optim.hpp"       // AdamW, global norm
#include "shardlib/schedule.hpp"    // learning rates
