// Pipeline parallelism: stages on an axis of the mesh, pipeline schedules, their execution, and a simulation of their
// cost.
#pragma once

#include "shardlib/pipeline/task.hpp"           // forward and backward tasks of a microbatch
#include "shardlib/pipeline/schedule.hpp"       // GPipe, 1F1B, interleaved, or a custom schedule, also as CSV
#include "shardlib/pipeline/validate.hpp"       // whether a schedule is complete and free of deadlock
#include "shardlib/pipeline/communication.hpp"  // the transfers that a schedule needs
#include "shardlib/pipeline/simulate.hpp"       // time and memory of a schedule
#include "shardlib/pipeline/timeline.hpp"       // a drawing of a schedule
#include "shardlib/pipeline/staged_mesh.hpp"    // a mesh with a stage axis
#include "shardlib/pipeline/program.hpp"        // the computation of each stage, checked at compile time
#include "shardlib/pipeline/execute.hpp"        // execution
