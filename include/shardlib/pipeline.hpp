// Pipeline parallelism: stages on an axis of the mesh, schedules, their execution, and what a schedule will cost.
#pragma once

#include "shardlib/pipeline/task.hpp"           // forward and backward tasks of a microbatch
#include "shardlib/pipeline/schedule.hpp"       // GPipe, 1F1B, interleaved, or one's own, also as CSV
#include "shardlib/pipeline/validate.hpp"       // whether a schedule is complete and free of deadlock
#include "shardlib/pipeline/communication.hpp"  // the transfers that a schedule needs
#include "shardlib/pipeline/simulate.hpp"       // time and memory of a schedule
#include "shardlib/pipeline/timeline.hpp"       // a drawing of it
#include "shardlib/pipeline/staged_mesh.hpp"    // a mesh one of whose axes holds stages
#include "shardlib/pipeline/program.hpp"        // what each stage computes, checked at compile time
#include "shardlib/pipeline/execute.hpp"        // running it
