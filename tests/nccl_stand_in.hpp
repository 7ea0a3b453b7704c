// A stand-in for NCCL's contract, over streams of the simulated device: operations run late and in the order of their
// stream, and what NCCL would answer by a hang, a crash or wrong numbers is a fault with a text.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/comm/nccl.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/memory/simulated_stream.hpp"
#include "shardlib/spec/dtype.hpp"

namespace shardlib::test::stand_in {

using detail::SimulatedStream;
using detail::nccl::Config;
using detail::nccl::Operation;
using detail::nccl::Result;
using detail::nccl::Type;
using detail::nccl::UniqueId;

inline constexpr auto cuda_error = static_cast<Result>(1), invalid_usage = static_cast<Result>(5),
                      remote_error = static_cast<Result>(6);

enum class Kind : std::uint8_t { send, recv, all_gather, all_reduce, reduce_scatter };
inline std::string name(Kind kind) {
  constexpr const char* names[] = {"ncclSend", "ncclRecv", "ncclAllGather", "ncclAllReduce", "ncclReduceScatter"};
  return names[static_cast<std::size_t>(kind)];
}

struct Call {
  Kind kind = Kind::send;
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  std::size_t count = 0;
  Type type = Type::uint8;
  int peer = -1;
  std::uint64_t number = 0;  ///< of a collective in its communicator
  bool done = false;
  int rank = 0;
  Region* region = nullptr;

  [[nodiscard]] bool is_collective() const { return kind != Kind::send && kind != Kind::recv; }
  [[nodiscard]] std::size_t element() const {
    return type == Type::uint8 ? 1 : type == Type::bfloat16 ? 2 : type == Type::float64 ? 8 : 4;
  }
  [[nodiscard]] std::size_t bytes() const { return count * element(); }
  [[nodiscard]] std::string text() const {
    return name(kind) + " of " + std::to_string(count) + " elements of type " + std::to_string(static_cast<int>(type)) +
           (is_collective() ? "" : (kind == Kind::send ? " to rank " : " from rank ") + std::to_string(peer));
  }
};

/// The work that one call, or the calls of a group, put into a stream.
struct Launch {
  std::vector<std::shared_ptr<Call>> calls;
  bool has_arrived = false;
};

struct Clique {
  std::vector<ncclComm*> members;
  std::map<std::uint64_t, std::vector<std::shared_ptr<Call>>> meetings;              ///< collectives, by number
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Call>>> sends, receives;  ///< by (from, to)
  std::set<std::pair<int, int>> senders, receivers;  ///< (from, to) of which one end has called its first message
  bool is_broken = false;                            ///< aborted or faulty: nothing of it completes any more
};

}  // namespace shardlib::test::stand_in

struct ncclComm {
  std::shared_ptr<shardlib::test::stand_in::Clique> clique;
  int rank = 0;
  std::uint64_t collectives = 0;
  std::deque<std::shared_ptr<shardlib::test::stand_in::Launch>> queue;
  shardlib::detail::SimulatedStream* stream = nullptr;
  bool has_ended = false;
  /// A communicator that does not block must not be used while its last call is in progress. The rest of the call,
  /// `late`, is done after its state was asked for.
  bool blocks = true;
  shardlib::detail::nccl::Result state = {};
  std::function<shardlib::detail::nccl::Result()> late{};
  bool has_begun = false;  ///< the last call is done, and nobody has asked since
  bool is_finalized = false;
};

namespace shardlib::test::stand_in {

/// The state of all communicators. SimulatedStream::stopped guards it.
struct World {
  std::vector<std::string> faults;
  std::map<std::uint32_t, std::shared_ptr<Clique>> cliques;  ///< by the first bytes of their id
  std::vector<std::unique_ptr<ncclComm>> comms;              ///< also those that have ended
  Result in_group = Result::success;  ///< what a call inside of a group returns: NCCL may say in_progress, too
  std::map<Kind, int> launched;       ///< how often each function was called
  int unaligned = 0;  ///< how often with addresses that are no multiples of 16, at which NCCL copies byte by byte
  /// The functions that fail on a rank. "asynchronous": an operation does; "stuck": none runs there; "absent": the rank
  /// does not come to where NCCL connects the members.
  std::map<std::string, int> failing;
  std::uint32_t ids = 0;
};
inline World world;
struct Group {
  int depth = 0;
  std::vector<std::tuple<ncclComm*, SimulatedStream*, std::shared_ptr<Call>>> calls;
};
inline thread_local Group group;

template <class F>
Result locked(const F& f) {
  Result result = Result::success;
  SimulatedStream::stopped([&] { result = f(); });
  return result;
}
inline Result fault(const std::string& text) {
  world.faults.push_back(text);
  return invalid_usage;
}
inline bool fails(const std::string& function, int rank) {
  const auto it = world.failing.find(function);
  return it != world.failing.end() && it->second == rank;
}

inline void break_clique(Clique& clique, const std::string& text) {
  clique.is_broken = true;
  fault(text);
}

/// Whether rank `other` has put the counterpart of `call` into its stream, but behind something that waits.
inline bool is_behind(const Clique& clique, const Call& call, int other) {
  const ncclComm* const comm = clique.members[static_cast<std::size_t>(other)];
  if (comm == nullptr) return false;
  const auto matches = [&](const Call& theirs) {
    if (theirs.done || theirs.is_collective() != call.is_collective()) return false;
    if (call.is_collective()) return theirs.number == call.number;
    return theirs.kind == (call.kind == Kind::send ? Kind::recv : Kind::send) && theirs.peer == call.rank;
  };
  for (std::size_t i = 0; i < comm->queue.size(); ++i)  // the first one is the counterpart: messages keep their order
    for (const auto& theirs : comm->queue[i]->calls)
      if (matches(*theirs)) return i > 0;
  return false;
}
/// The ranks that rank `from` waits for although they have made the call that it needs.
inline std::vector<int> waits_for(const Clique& clique, int from) {
  std::vector<int> result;
  const ncclComm* const comm = clique.members[static_cast<std::size_t>(from)];
  if (comm == nullptr || comm->queue.empty()) return result;
  for (const auto& call : comm->queue.front()->calls) {
    if (call->done) continue;
    for (int other = 0; other < static_cast<int>(clique.members.size()); ++other)
      if ((call->is_collective() || call->peer == other) && is_behind(clique, *call, other)) result.push_back(other);
  }
  return result;
}
inline bool reaches(const Clique& clique, int from, int to, std::vector<bool>& seen) {
  for (const int next : waits_for(clique, from)) {
    if (next == to) return true;
    if (seen[static_cast<std::size_t>(next)]) continue;
    seen[static_cast<std::size_t>(next)] = true;
    if (reaches(clique, next, to, seen)) return true;
  }
  return false;
}

template <class T>
void add_in_rank_order(const std::vector<std::vector<std::byte>>& in, std::vector<std::byte>& out) {
  for (std::size_t at = 0; at < in[0].size(); at += sizeof(T)) {
    T sum{};
    for (const auto& one : in) {
      T value;
      std::memcpy(&value, one.data() + at, sizeof value);
      sum = static_cast<T>(static_cast<accumulator_t<T>>(sum) + static_cast<accumulator_t<T>>(value));
    }
    std::memcpy(out.data() + at, &sum, sizeof sum);
  }
}

/// Does a collective of which all members have arrived.
inline void run(std::vector<std::shared_ptr<Call>>& all) {
  std::ranges::sort(all, {}, &Call::rank);
  std::vector<std::vector<std::byte>> in;
  for (const auto& call : all) {
    const std::size_t bytes = call->bytes() * (call->kind == Kind::reduce_scatter ? all.size() : 1);
    const MemoryAccess open(call->region);
    in.emplace_back(call->from, call->from + bytes);
  }
  std::vector<std::byte> result(in[0].size());
  if (all[0]->kind == Kind::all_gather) {
    result.clear();
    for (const auto& one : in) result.insert(result.end(), one.begin(), one.end());
  } else {
    switch (all[0]->type) {
      case Type::float32:
        add_in_rank_order<f32>(in, result);
        break;
      case Type::float64:
        add_in_rank_order<f64>(in, result);
        break;
      case Type::bfloat16:
        add_in_rank_order<bf16>(in, result);
        break;
      default:
        add_in_rank_order<u32>(in, result);
    }
  }
  for (const auto& call : all) {
    const MemoryAccess open(call->region);
    const bool scatters = call->kind == Kind::reduce_scatter;
    std::memcpy(call->to, result.data() + (scatters ? static_cast<std::size_t>(call->rank) * call->bytes() : 0),
                scatters ? call->bytes() : result.size());
    call->done = true;
  }
}

/// The launch has come to the head of its stream: its calls meet those of the others.
inline void arrive(ncclComm& comm, Launch& launch) {
  Clique& clique = *comm.clique;
  launch.has_arrived = true;
  for (const auto& call : launch.calls) {
    if (!call->is_collective()) {
      const bool sends = call->kind == Kind::send;
      const auto ends = sends ? std::pair(comm.rank, call->peer) : std::pair(call->peer, comm.rank);
      (sends ? clique.sends : clique.receives)[ends].push_back(call);
      continue;
    }
    auto& meeting = clique.meetings[call->number];
    if (!meeting.empty() && meeting[0]->text() != call->text())
      return break_clique(clique, "collective " + std::to_string(call->number) + " is " + meeting[0]->text() +
                                      " on rank " + std::to_string(meeting[0]->rank) + " and " + call->text() +
                                      " on rank " + std::to_string(call->rank));
    meeting.push_back(call);
    if (meeting.size() == clique.members.size()) {
      run(meeting);
      clique.meetings.erase(call->number);
    }
  }
  for (auto& [ends, sends] : clique.sends) {
    auto& receives = clique.receives[ends];
    for (; !sends.empty() && !receives.empty(); sends.pop_front(), receives.pop_front()) {
      const Call &send = *sends.front(), &receive = *receives.front();
      if (send.bytes() != receive.bytes()) return break_clique(clique, send.text() + " meets " + receive.text());
      const MemoryAccess open_send(send.region), open_receive(receive.region);
      std::memcpy(receive.to, send.from, send.bytes());
      sends.front()->done = receives.front()->done = true;
    }
  }
}

inline bool step(ncclComm& comm, Launch& launch) {
  Clique& clique = *comm.clique;
  if (fails("stuck", comm.rank)) return false;
  if (!launch.has_arrived && !clique.is_broken) arrive(comm, launch);
  if (clique.is_broken) return false;
  if (std::ranges::all_of(launch.calls, [](const auto& call) { return call->done; })) {
    comm.queue.pop_front();
    return true;
  }
  std::vector<bool> seen(clique.members.size());
  if (reaches(clique, comm.rank, comm.rank, seen))
    break_clique(clique, "deadlock: " + launch.calls[0]->text() + " on rank " + std::to_string(comm.rank) +
                             " waits for a call behind one that waits for this rank");
  return false;
}

inline Result start(ncclComm& comm, SimulatedStream& stream, std::vector<std::shared_ptr<Call>> calls) {
  for (const ncclComm* const other : comm.clique->members)
    if (other != nullptr && other != &comm && !other->has_ended && other->stream != nullptr &&
        &other->stream->region() == &stream.region())
      return fault("ranks " + std::to_string(std::min(comm.rank, other->rank)) + " and " +
                   std::to_string(std::max(comm.rank, other->rank)) + " have the same GPU");
  if (!stream.follows_device()) return fault(calls[0]->text() + " does not follow the kernels of its device");
  comm.stream = &stream;
  const auto all = std::make_shared<Launch>();
  all->calls = std::move(calls);
  SimulatedStream::Work work{.name = all->calls[0]->text(), .owner = &comm};
  for (const auto& call : all->calls) {
    if (call->is_collective()) call->number = comm.collectives++;
    const std::size_t n = comm.clique->members.size();
    const std::size_t reads = call->bytes() * (call->kind == Kind::reduce_scatter ? n : 1);
    const std::size_t writes = call->bytes() * (call->kind == Kind::all_gather ? n : 1);
    if (call->from != nullptr) work.uses.push_back({call->from, reads});
    if (call->to != nullptr) work.uses.push_back({call->to, writes});
  }
  for (const auto& used : work.uses)
    if (!stream.region().contains(used.begin, used.bytes))
      return fault(work.name + " gets memory that is not its GPU's");
  comm.queue.push_back(all);
  work.step = [&comm, all] { return step(comm, *all); };
  stream.put(std::move(work));
  return Result::success;
}

/// At the first message from one rank to another NCCL connects them, in the calls of both. So the first send is in
/// progress until the other rank has called its recv.
inline bool connects(const ncclComm& comm, const std::vector<std::shared_ptr<Call>>& calls) {
  Clique& clique = *comm.clique;
  std::vector<std::pair<int, int>> all;
  for (const auto& call : calls) {
    if (call->is_collective()) continue;
    const bool sends = call->kind == Kind::send;
    all.push_back(sends ? std::pair(comm.rank, call->peer) : std::pair(call->peer, comm.rank));
    (sends ? clique.senders : clique.receivers).insert(all.back());
  }
  return std::ranges::all_of(
      all, [&](const auto& ends) { return clique.senders.contains(ends) && clique.receivers.contains(ends); });
}

inline Result launch(ncclComm& comm, SimulatedStream& stream, std::vector<std::shared_ptr<Call>> calls) {
  if (comm.state == Result::in_progress)
    return fault(calls[0]->text() + " while the last call of its communicator is in progress");
  if (comm.blocks) return start(comm, stream, std::move(calls));
  comm.late = [&comm, &stream, calls = std::move(calls)] {
    return connects(comm, calls) ? start(comm, stream, calls) : Result::in_progress;
  };
  return comm.state = Result::in_progress;
}

inline Result enqueue(Kind kind, const void* from, void* to, std::size_t count, Type type, int peer, ncclComm* comm,
                      CUstream_st* handle) {
  return locked([&] {
    ++world.launched[kind];
    const auto is_aligned = [](const void* at) { return reinterpret_cast<std::uintptr_t>(at) % 16 == 0; };
    if (!is_aligned(from) || !is_aligned(to)) ++world.unaligned;
    if (comm == nullptr || comm->has_ended) return fault(name(kind) + " on a communicator that has ended");
    if (fails(name(kind), comm->rank)) return cuda_error;
    auto& stream = SimulatedStream::of(handle);
    auto call = std::make_shared<Call>(Call{.kind = kind,
                                            .from = static_cast<const std::byte*>(from),
                                            .to = static_cast<std::byte*>(to),
                                            .count = count,
                                            .type = type,
                                            .peer = peer,
                                            .rank = comm->rank,
                                            .region = &stream.region()});
    if (group.depth == 0) return launch(*comm, stream, {call});
    group.calls.emplace_back(comm, &stream, std::move(call));
    return world.in_group;
  });
}

inline const char* GetErrorString(Result result) {
  return result == cuda_error      ? "unhandled cuda error"
         : result == invalid_usage ? "invalid usage"
         : result == remote_error  ? "remote process exited or there was a network error"
                                   : "no error";
}
inline Result GetUniqueId(UniqueId* id) {
  return locked([&] {
    ++world.ids;
    std::memcpy(id->bytes.data(), &world.ids, sizeof world.ids);
    return Result::success;
  });
}
/// Starts to connect the rank to the others, and returns without waiting for them.
inline Result connect(ncclComm** comm, int ranks, UniqueId id, int rank) {
  return locked([&] {
    std::uint32_t number = 0;
    std::memcpy(&number, id.bytes.data(), sizeof number);
    auto& known = world.cliques[number];
    if (!known) {
      known = std::make_shared<Clique>();
      known->members.resize(static_cast<std::size_t>(ranks));
    }
    if (fails("ncclCommInitRank", rank)) return cuda_error;
    *comm = world.comms.emplace_back(std::make_unique<ncclComm>()).get();
    (*comm)->clique = known;
    (*comm)->rank = rank;
    (*comm)->state = Result::in_progress;
    (*comm)->late = [clique = known] {
      return std::ranges::count(clique->members, nullptr) == 0 ? Result::success : Result::in_progress;
    };
    auto& place = known->members.at(static_cast<std::size_t>(rank));
    if (place != nullptr) return fault("two communicators have rank " + std::to_string(rank));
    if (!fails("absent", rank)) place = *comm;
    return Result::in_progress;
  });
}
/// Waits for the other ranks.
inline Result CommInitRank(ncclComm** comm, int ranks, UniqueId id, int rank) {
  if (const Result result = connect(comm, ranks, id, rank); result != Result::in_progress) return result;
  while (locked([&] { return (*comm)->state = (*comm)->late(); }) == Result::in_progress) std::this_thread::yield();
  return Result::success;
}
inline Result CommInitRankConfig(ncclComm** comm, int ranks, UniqueId id, int rank, Config* config) {
  if (config->size != sizeof(Config) || config->magic != 0xcafebeef || config->version < 21400 || config->blocking != 0)
    return locked([] { return fault("a configuration that makes no communicator that does not block"); });
  const Result result = connect(comm, ranks, id, rank);
  if (result == Result::in_progress) (*comm)->blocks = false;
  return result;
}
inline Result end(ncclComm* comm, const char* function, bool aborts) {
  return locked([&] {
    if (comm->has_ended) return fault(std::string(function) + " on a communicator that has ended");
    comm->has_ended = true;
    if (!aborts && comm->state == Result::in_progress) fault(std::string(function) + " while a call is in progress");
    if (!aborts && !comm->blocks && !comm->is_finalized)
      fault(std::string(function) + " of a communicator that does not block, without ncclCommFinalize");
    comm->late = {};
    if (group.depth > 0) fault(std::string(function) + " inside of a group");
    if (!aborts && !comm->queue.empty())
      fault(std::string(function) + " while " + comm->queue.front()->calls[0]->text() + " is under way");
    if (aborts || !comm->queue.empty()) comm->clique->is_broken = true;
    comm->queue.clear();
    if (comm->stream != nullptr) comm->stream->remove(comm);
    return Result::success;
  });
}
/// Its end, for which the state is asked, is that of all ranks.
inline Result CommFinalize(ncclComm* comm) {
  return locked([&] {
    if (comm->has_ended || comm->is_finalized) return fault("ncclCommFinalize on a communicator that has ended");
    if (comm->state == Result::in_progress) return fault("ncclCommFinalize while a call is in progress");
    comm->is_finalized = true;
    comm->late = [comm] {
      const auto ends = [](const ncclComm* other) {
        return other == nullptr || other->is_finalized || other->has_ended;
      };
      if (comm->clique->is_broken) return remote_error;
      return std::ranges::all_of(comm->clique->members, ends) ? Result::success : Result::in_progress;
    };
    return comm->state = Result::in_progress;
  });
}
inline Result CommDestroy(ncclComm* comm) {
  return end(comm, "ncclCommDestroy", false);
}
/// Aborts one of the communicators of a thread, which makes the calls of all members.
inline Result abort_alone(ncclComm* comm) {
  return end(comm, "ncclCommAbort", true);
}
/// Returns when the members on this machine, which all are, have aborted too: a member's thread in NCCL serves the
/// others until then.
inline Result CommAbort(ncclComm* comm) {
  const Result result = abort_alone(comm);
  const auto still_there = [&] {
    int rank = -1;
    locked([&] {
      for (const ncclComm* const other : comm->clique->members)
        if (other != nullptr && !other->has_ended) rank = other->rank;
      return Result::success;
    });
    return rank;
  };
  constexpr int most_polls = 10'000;
  for (int poll = 0, other = still_there(); other >= 0; ++poll, other = still_there()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (poll == most_polls)
      return locked([&] {
        return fault("ncclCommAbort of rank " + std::to_string(comm->rank) + " waits for rank " +
                     std::to_string(other));
      });
  }
  return result;
}
inline Result CommGetAsyncError(ncclComm* comm, Result* error) {
  return locked([&] {
    if (comm->has_ended) return fault("ncclCommGetAsyncError on a communicator that has ended");
    if (comm->state == Result::in_progress) {
      *error = Result::in_progress;
      comm->state = comm->late();
      comm->has_begun = comm->state == Result::success;
      return Result::success;
    }
    const bool has_begun = std::exchange(comm->has_begun, false);  // an operation fails later
    *error = comm->state != Result::success                     ? comm->state
             : fails("asynchronous", comm->rank) && !has_begun  ? cuda_error
             : comm->clique->is_broken && !world.faults.empty() ? invalid_usage
                                                                : Result::success;
    return Result::success;
  });
}
inline Result GroupStart() {
  ++group.depth;
  return Result::success;
}
inline Result GroupEnd() {
  return locked([&] {
    if (group.depth == 0) return fault("ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return Result::success;
    const auto calls = std::exchange(group.calls, {});
    std::map<std::pair<ncclComm*, SimulatedStream*>, std::vector<std::shared_ptr<Call>>> launches;
    for (const auto& [comm, stream, call] : calls) {
      if (fails("ncclGroupEnd", comm->rank)) return cuda_error;
      launches[{comm, stream}].push_back(call);
    }
    Result result = Result::success;
    for (auto& [place, together] : launches) result = std::max(result, launch(*place.first, *place.second, together));
    return result;
  });
}
inline Result Send(const void* from, std::size_t count, Type type, int peer, ncclComm* comm, CUstream_st* stream) {
  return enqueue(Kind::send, from, nullptr, count, type, peer, comm, stream);
}
inline Result Recv(void* to, std::size_t count, Type type, int peer, ncclComm* comm, CUstream_st* stream) {
  return enqueue(Kind::recv, nullptr, to, count, type, peer, comm, stream);
}
inline Result AllGather(const void* from, void* to, std::size_t count, Type type, ncclComm* comm, CUstream_st* stream) {
  return enqueue(Kind::all_gather, from, to, count, type, -1, comm, stream);
}
inline Result AllReduce(const void* from, void* to, std::size_t count, Type type, Operation, ncclComm* comm,
                        CUstream_st* stream) {
  return enqueue(Kind::all_reduce, from, to, count, type, -1, comm, stream);
}
inline Result ReduceScatter(const void* from, void* to, std::size_t count, Type type, Operation, ncclComm* comm,
                            CUstream_st* stream) {
  return enqueue(Kind::reduce_scatter, from, to, count, type, -1, comm, stream);
}

inline constexpr detail::nccl::Functions functions{
    GetErrorString, GetUniqueId, CommInitRank, CommDestroy, CommAbort,     CommGetAsyncError,  GroupStart,  GroupEnd,
    Send,           Recv,        AllGather,    AllReduce,   ReduceScatter, CommInitRankConfig, CommFinalize};
/// The same before NCCL 2.14, when all communicators block.
inline constexpr detail::nccl::Functions blocking_functions = [] {
  detail::nccl::Functions older = functions;
  older.CommInitRankConfig = nullptr;
  older.CommFinalize = nullptr;
  return older;
}();

/// The faults so far, which are forgotten.
inline std::vector<std::string> take_faults() {
  std::vector<std::string> faults;
  locked([&] {
    faults = std::exchange(world.faults, {});
    return Result::success;
  });
  return faults;
}

}  // namespace shardlib::test::stand_in
