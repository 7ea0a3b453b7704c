// MPI requests under way, and the loop that advances all of them while one is waited for.
#pragma once

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_call.hpp"
#include "shardlib/comm/communicator.hpp"
#include "shardlib/comm/mpi/process.hpp"
#include "shardlib/comm/mpi/watch.hpp"
#include "shardlib/comm/shm/group.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail::mpi {

inline int to_count(std::size_t bytes) {
  return static_cast<int>(bytes);
}

/// Compares the members' calls. Each member sends a fingerprint to all others; the message has a fixed size.
struct CallComparison {
  /// A call's fingerprint, and the sums of what the member was given.
  struct Message {
    std::uint64_t call = 0;
    GivenSums given = {};
  };
  MPI_Comm comm = MPI_COMM_NULL;
  MPI_Request request = MPI_REQUEST_NULL;
  Message mine;
  std::vector<Message> all;
  int rank = 0;
  CollectiveCall call;
  OpInfo op;
  GivenWindow given;

  /// Returns true when all calls are known to be equal. Throws Error if they differ.
  bool advance(const GroupLog& group) {
    int done = 0;
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "comparing calls", sizeof mine);
    if (done == 0) return false;
    if (const std::size_t other = first_other(mine); other != all.size()) fail(group, static_cast<int>(other));
    return true;
  }

 private:
  using Text = std::array<char, 960>;
  /// The first member whose call, or what it was given, differs; the number of members if there is none.
  [[nodiscard]] std::size_t first_other(const Message& one) const {
    const auto differs = [&](const Message& two) {
      return one.call != two.call || contradiction(one.given, two.given);
    };
    return static_cast<std::size_t>(std::ranges::find_if(all, differs) - all.begin());
  }
  /// Where member r was given other values in the same call.
  [[nodiscard]] std::optional<GivenPart> part_of(std::size_t r) const {
    return all[r].call == mine.call ? contradiction(mine.given, all[r].given) : std::nullopt;
  }
  /// This member's side of the difference from member r.
  [[nodiscard]] std::string text_for(std::size_t r) const {
    const auto part = part_of(r);
    return part ? given.describe(*part) : describe(call, op);
  }
  /// All members know all fingerprints, so members that differ exchange their full calls.
  [[noreturn]] void fail(const GroupLog& group, int other) const {
    struct Exchange {  // MPI may still use it after the wait, so it must stay alive
      Text theirs{};
      std::list<Text> mine;
      std::vector<MPI_Request> requests;
    };
    auto* const exchange = new Exchange;
    const int bytes = static_cast<int>(sizeof(Text));
    const auto place = [&](int r) { return group.members[static_cast<std::size_t>(r)]; };
    MPI_Irecv(exchange->theirs.data(), bytes, MPI_BYTE, place(other), Watch::call_tag, process.control,
              &exchange->requests.emplace_back(MPI_REQUEST_NULL));
    for (std::size_t r = 0; r < all.size(); ++r) {
      // Member r waits for the first member that differs from it.
      if (first_other(all[r]) != static_cast<std::size_t>(rank)) continue;
      const std::string text = text_for(r);
      Text& mine_for_r = exchange->mine.emplace_back();
      std::copy_n(text.data(), std::min(text.size(), mine_for_r.size() - 1), mine_for_r.begin());
      MPI_Request sent = MPI_REQUEST_NULL;
      MPI_Isend(mine_for_r.data(), bytes, MPI_BYTE, place(static_cast<int>(r)), Watch::call_tag, process.control,
                &sent);
      exchange->requests.push_back(sent);
    }
    int done = 0;
    const auto end = std::chrono::steady_clock::now() + group.tuning.patience;
    while (done == 0 && std::chrono::steady_clock::now() < end) {
      MPI_Testall(static_cast<int>(exchange->requests.size()), exchange->requests.data(), &done, MPI_STATUSES_IGNORE);
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    const std::string theirs(exchange->theirs.begin(), std::ranges::find(exchange->theirs, '\0'));
    const auto r = static_cast<std::size_t>(other);
    if (const auto part = part_of(r)) fail_given(rank, all.size(), given, *part, other, theirs);
    fail_call(rank, all.size(), text_for(r), other, theirs.empty() ? "something else" : theirs);
  }
};

/// A communication under way: its MPI requests, their buffers, and what to do when they are complete.
struct MpiOp {
  std::string_view name;
  std::size_t bytes = 0;
  std::vector<MPI_Request> requests = {};
  std::vector<Buffer> buffers = {};
  std::vector<std::size_t> expected = {};         ///< per request: bytes of a user's recv, `anything` otherwise
  std::function<void(MpiOp&)> next = {};          ///< the next phase; may add requests, or set `shared`
  std::shared_ptr<shm::SharedRound> shared = {};  ///< what this phase does in shared memory, instead of requests
  std::vector<MPI_Status> statuses = {};
  bool done = false;
  std::shared_ptr<const GroupLog> group = {};
  LeaveQuery question = {};
  int peer = -1;  ///< the other end, a rank of the group; -1 if all members take part
  std::shared_ptr<CallComparison> comparison = {};

  static constexpr std::size_t anything = std::numeric_limits<std::size_t>::max();

  /// A `recv` must notice if its size differs from that of the message, so these messages are not split.
  [[nodiscard]] std::size_t longest() const {
    return peer < 0 ? group->tuning.collective_piece : group->tuning.send_piece;
  }
  MPI_Request* add(std::size_t expect = anything) {
    expected.push_back(expect);
    return &requests.emplace_back(MPI_REQUEST_NULL);
  }
  /// A message to one rank ends when that takes it: what nobody takes must not reach a group of a later launch.
  void send(MPI_Comm comm, const std::byte* data, std::size_t size, int to, int tag) {
    const auto start = peer < 0 ? MPI_Isend : MPI_Issend;
    std::size_t sent = 0;
    do {
      const std::size_t piece = std::min(longest(), size - sent);
      check(start(data + sent, to_count(piece), MPI_BYTE, to, tag, comm, add()), name, bytes);
      sent += piece;
    } while (sent < size);
  }
  void recv(MPI_Comm comm, std::byte* data, std::size_t size, int from, int tag) {
    std::size_t received = 0;
    do {
      const std::size_t piece = std::min(longest(), size - received);
      check(MPI_Irecv(data + received, to_count(piece), MPI_BYTE, from, tag, comm, add(piece)), name, bytes);
      received += piece;
    } while (received < size);
  }
  /// Compares the call with those of the other members, in a group that does not share memory. It uses a communicator
  /// of its own, so its messages match after any calls of the members.
  void compare_calls(MPI_Comm comm, int rank, const CollectiveCall& call, const OpInfo& op, const GivenWindow& given) {
    comparison = std::make_shared<CallComparison>();
    CallComparison& c = *comparison;
    c.comm = comm;
    c.mine = {call.fingerprint(), given.sums()};
    c.all.resize(group->members.size());
    c.rank = rank;
    c.call = call;
    c.op = op;
    c.given = given;
    constexpr int numbers = sizeof(CallComparison::Message) / sizeof(std::uint64_t);
    check(MPI_Iallgather(&c.mine, numbers, MPI_UINT64_T, c.all.data(), numbers, MPI_UINT64_T, comm, &c.request), name,
          bytes);
  }
  /// Throws if a rank that this communication needs reports that it has left, or has died.
  void check_members() const {
    const auto& members = group->members;
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (process.has_died(members[i])) fail_died(name, members[i], i, members.size(), last_of(members[i]));
    }
    const auto rank = static_cast<std::size_t>(peer);
    const int absent = watch.ask(question, peer < 0 ? members : std::vector{members[rank]});
    if (absent < 0) return;
    const auto place = static_cast<int>(std::ranges::find(members, absent) - members.begin());
    fail_absent(name, absent, place, static_cast<int>(members.size()));
  }
  /// Returns true when complete.
  bool advance() {
    if (done) return true;
    if (comparison && comparison->advance(*group)) comparison.reset();
    try {
      return advance_phase();
    } catch (const Error&) {
      // Calls that differ make MPI fail as well; then the comparison says more.
      const auto end = std::chrono::steady_clock::now() + group->tuning.patience;
      while (comparison && std::chrono::steady_clock::now() < end)
        if (comparison->advance(*group)) comparison.reset();
      throw;
    }
  }

 private:
  bool advance_phase() {
    if (shared) {
      if (!shared->advance()) return false;
      shared.reset();
      return end_phase();
    }
    statuses.resize(requests.size());
    int all = 0;
    const int code = MPI_Testall(static_cast<int>(requests.size()), requests.data(), &all, statuses.data());
    if (code == MPI_ERR_IN_STATUS) {
      for (const MPI_Status& status : statuses) {
        if (status.MPI_ERROR != MPI_ERR_PENDING) check_code(status.MPI_ERROR);
      }
    }
    check_code(code);
    if (all == 0) return false;
    requests.clear();
    const auto sizes = std::exchange(expected, {});
    done = !sizes.empty();  // stays true if the message does not fit
    for (std::size_t i = 0; i < sizes.size(); ++i) check_size(statuses[i], sizes[i]);
    return end_phase();
  }
  void check_code(int code) {
    if (code == MPI_SUCCESS) return;
    int kind = MPI_SUCCESS;
    MPI_Error_class(code, &kind);
    if (kind == MPI_ERR_TRUNCATE && peer >= 0) {
      done = std::ranges::find(statuses, MPI_ERR_PENDING, &MPI_Status::MPI_ERROR) == statuses.end();
      fail_recv(peer, bytes, "more than " + std::to_string(bytes));  // MPI does not say how many
    }
    check(code, name, bytes);
  }
  bool end_phase() {
    if (next) std::exchange(next, nullptr)(*this);
    done = requests.empty() && !shared && !next && !comparison;
    if (done) {
      buffers.clear();
      shm::loans.collect();
    }
    return done;
  }
  static void check_size(const MPI_Status& status, std::size_t expect) {
    if (expect == anything) return;
    int count = 0;
    MPI_Get_count(&status, MPI_BYTE, &count);
    const auto received = static_cast<std::size_t>(count);
    if (received != expect) fail_recv(status.MPI_SOURCE, expect, received);
  }
};

/// Pause between two reads of memory that another rank writes. MPI itself yields if there are more ranks than cores.
class Pause {
 public:
  void turn() {
    // A yield is cheap on a core of its own; spinning is expensive on a shared core.
    static const unsigned spins = process.local_size <= sysconf(_SC_NPROCESSORS_ONLN) ? 20 : 0;
    if (turns_ < spins) {
      ++turns_;
    } else {
      std::this_thread::yield();
    }
  }

 private:
  unsigned turns_ = 0;
};

/// All communications under way of this rank. Open MPI makes no progress in the background, and an all_reduce has a
/// second phase. So waiting for one request advances all of them, and requests may be waited for in any order.
class ProgressEngine {
 public:
  /// For a launch on the ranks 0 to `ranks` - 1.
  ProgressEngine(int ranks, std::chrono::milliseconds timeout) : timeout_(timeout) {
    for (int i = 0; i < ranks; ++i) ranks_.push_back(i);
  }
  ProgressEngine(const ProgressEngine&) = delete;
  ProgressEngine& operator=(const ProgressEngine&) = delete;
  /// MPI still owns what never completed, so its buffers must outlive this object.
  ~ProgressEngine() {
    static auto* const leaked = new std::list<std::shared_ptr<MpiOp>>;
    leaked->splice(leaked->end(), pending_);
  }

  /// A new communication, before it has requests: if an error ends its start, MPI still owns their buffers.
  std::shared_ptr<MpiOp> add(MpiOp op) { return pending_.emplace_back(std::make_shared<MpiOp>(std::move(op))); }
  /// Call it when the communication that was added last has its requests.
  void start(const std::shared_ptr<MpiOp>& op) {
    if (op->advance()) pending_.pop_back();
  }
  void advance() {
    pending_.remove_if([](const std::shared_ptr<MpiOp>& op) { return op->advance(); });
  }
  void wait(const MpiOp& op) {
    Pause pause;
    for (Impatience impatience(op.group->tuning.patience); !op.done; advance()) {
      check_patience(impatience, op);
      if (op.shared) pause.turn();
    }
  }
  /// Completes ops that nobody waits for: sends, and collectives whose requests were dropped.
  void drain() {
    if (pending_.empty()) return;
    Pause pause;
    for (Impatience impatience(pending_.front()->group->tuning.patience); !pending_.empty(); advance()) {
      check_patience(impatience, *pending_.front());
      if (std::ranges::any_of(pending_, [](const auto& op) { return op->shared != nullptr; })) pause.turn();
    }
  }
  /// Answers other ranks, and throws if a member of the group has died, or another rank has waited too long. A wait for
  /// something else than MPI calls it now and then.
  void check_others(const GroupLog& group) const {
    watch.answer();
    for (std::size_t i = 0; i < group.members.size(); ++i)
      if (const int rank = group.members[i]; process.has_died(rank))
        fail_died("a collective", rank, i, group.members.size(), last_of(rank));
    if (watch.others_have_timed_out()) watch.fail_timeout(ranks_, group.tuning.patience);
  }
  /// After a failure the other members may never free their communicator, which is collective.
  void fail() { failed_ = true; }
  [[nodiscard]] bool may_free() const { return !failed_ && pending_.empty() && running(); }

 private:
  void check_patience(Impatience& impatience, const MpiOp& op) const {
    if (impatience.turn()) op.check_members();
    if (impatience.exceeds(timeout_) || watch.others_have_timed_out())
      watch.fail_timeout(ranks_, op.group->tuning.patience);
  }

  std::vector<int> ranks_;
  std::chrono::milliseconds timeout_;  ///< 0: never
  bool failed_ = false;
  std::list<std::shared_ptr<MpiOp>> pending_;
};

struct MpiOpRequest final : Request::Pending {
  std::shared_ptr<ProgressEngine> progress;
  std::shared_ptr<MpiOp> op;
  MpiOpRequest(std::shared_ptr<ProgressEngine> p, std::shared_ptr<MpiOp> o)
      : progress(std::move(p)), op(std::move(o)) {}
  bool test() override {
    progress->advance();
    return op->done;
  }
  void wait() override { progress->wait(*op); }
};

}  // namespace shardlib::detail::mpi
