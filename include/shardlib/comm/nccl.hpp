// NCCL: the functions of it that are called, and groups of GPUs that communicate by them.
#pragma once

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/stream.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

struct ncclComm;     // an ncclComm_t points to one
struct CUstream_st;  // a cudaStream_t points to one

namespace shardlib::detail::nccl {

// Declarations of our own, so that a build needs no nccl.h. tests/nccl_header.cu compares them with it.

/// An ncclUniqueId.
struct UniqueId {
  std::array<char, 128> bytes{};
};
/// An ncclResult_t. All other numbers are errors.
enum class Result : int { success = 0, in_progress = 7 };
/// An ncclDataType_t.
enum class Type : int { uint8 = 1, int32 = 2, uint32 = 3, float32 = 7, float64 = 8, bfloat16 = 9 };
/// An ncclRedOp_t.
enum class Operation : int { sum = 0 };

/// An ncclConfig_t of NCCL 2.14. Later versions take defaults for what it lacks.
struct Config {
  std::size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;  ///< 0: functions return while NCCL still connects to other ranks; see CommGetAsyncError
};

/// The functions of NCCL, by their names without "nccl".
struct Functions {
  const char* (*GetErrorString)(Result) = nullptr;
  Result (*GetUniqueId)(UniqueId*) = nullptr;
  Result (*CommInitRank)(ncclComm**, int ranks, UniqueId, int rank) = nullptr;
  Result (*CommDestroy)(ncclComm*) = nullptr;
  Result (*CommAbort)(ncclComm*) = nullptr;
  Result (*CommGetAsyncError)(ncclComm*, Result*) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;
  Result (*Send)(const void*, std::size_t count, Type, int peer, ncclComm*, CUstream_st*) = nullptr;
  Result (*Recv)(void*, std::size_t count, Type, int peer, ncclComm*, CUstream_st*) = nullptr;
  Result (*AllGather)(const void*, void*, std::size_t count, Type, ncclComm*, CUstream_st*) = nullptr;
  Result (*AllReduce)(const void*, void*, std::size_t count, Type, Operation, ncclComm*, CUstream_st*) = nullptr;
  Result (*ReduceScatter)(const void*, void*, std::size_t count, Type, Operation, ncclComm*, CUstream_st*) = nullptr;
  // Null before NCCL 2.14.
  Result (*CommInitRankConfig)(ncclComm**, int ranks, UniqueId, int rank, Config*) = nullptr;
  Result (*CommFinalize)(ncclComm*) = nullptr;
};

/// Calls f(name, function), `function` being a reference, for each of them that every version has, and newer(name,
/// function) for the others.
template <class F, class G>
void for_functions(Functions& all, const F& f, const G& newer) {
  f("ncclGetErrorString", all.GetErrorString);
  f("ncclGetUniqueId", all.GetUniqueId);
  f("ncclCommInitRank", all.CommInitRank);
  f("ncclCommDestroy", all.CommDestroy);
  f("ncclCommAbort", all.CommAbort);
  f("ncclCommGetAsyncError", all.CommGetAsyncError);
  f("ncclGroupStart", all.GroupStart);
  f("ncclGroupEnd", all.GroupEnd);
  f("ncclSend", all.Send);
  f("ncclRecv", all.Recv);
  f("ncclAllGather", all.AllGather);
  f("ncclAllReduce", all.AllReduce);
  f("ncclReduceScatter", all.ReduceScatter);
  newer("ncclCommInitRankConfig", all.CommInitRankConfig);
  newer("ncclCommFinalize", all.CommFinalize);
}

/// The functions of a shared library, or why it has none.
struct Library {
  const Functions* functions = nullptr;
  std::string reason = {};  ///< why `functions` is null, as a clause: "libnccl.so.2 cannot be loaded (...)"
};

/// Loads a library, for the rest of the program.
[[nodiscard]] SHARDLIB_INLINE Library load(const std::string& file);

/// Whether SHARDLIB_NCCL is unset or 1. Throws UsageError if it is not 0 either.
[[nodiscard]] SHARDLIB_INLINE bool is_wanted();

/// The functions that a test gives, or if it gives none the library of this machine, libnccl.so.2, if it is wanted.
[[nodiscard]] SHARDLIB_INLINE Library library(const Functions* given);

/// Starts a kernel in a stream: out = the sums of n elements of each of `ranks` ranks, whose arrays follow each other
/// in `in`, in the order of reduce_tree.
using TreeKernel = std::function<void(Stream&, DType, Reduction, const Buffer& in, std::size_t ranks, std::size_t n,
                                      const Buffer& out)>;

/// How a device calls NCCL.
struct Use {
  Library library = {};
  GpuSums sums = GpuSums::tree;
  std::shared_ptr<Pool> pool = {};      ///< the device's memory
  std::shared_ptr<Stream> stream = {};  ///< of the collectives of all its groups, which keep their order in it
  TreeKernel tree = {};
  std::string device = {};  ///< a description, for errors that are found late
  bool apart = false;       ///< for tests: the device is as in a process of its own
};

/// Lines for the console that say which devices communicate through host memory because they lack NCCL, and why. All
/// devices call it, with a group of all; the text is on the first one. Empty if all groups can use NCCL. This decides
/// nothing: each group decides at its first collective.
[[nodiscard]] SHARDLIB_INLINE std::string note(Communicator& everybody, const Use& use);

/// A group of devices that have memory of their own. Its collectives of device memory are NCCL's. They start when all
/// members have called them: before, the members compare their calls by `staged`, so that NCCL gets no calls that do
/// not match. The host does not wait for their results: the device's stream does. Errors that show later are thrown
/// where the host waits for the device, or starts another communication. Messages of device memory are NCCL's, too, if
/// both members are in processes of their own and have called `set_direct`. `staged` is the same group by copies in
/// host memory, and does the rest. It does all if a member has no NCCL, or if two have the same GPU, which NCCL does
/// not allow. The first collective decides this for collectives. If sums were to be NCCL's, it then throws UsageError.
[[nodiscard]] SHARDLIB_INLINE std::unique_ptr<Communicator> group(std::unique_ptr<Communicator> staged, const Use& use);

}  // namespace shardlib::detail::nccl

#ifndef SHARDLIB_COMPILED
#include "shardlib/comm/impl/nccl.hpp"
#include "shardlib/comm/impl/nccl_library.hpp"
#include "shardlib/comm/impl/nccl_note.hpp"
#endif
