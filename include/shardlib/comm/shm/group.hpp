// Collectives of ranks on one node, in shared memory. In the slots of a ring, members post where their buffers are.
// When all have posted, they do the work together.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shardlib/comm/collective_work.hpp"
#include "shardlib/comm/shm/arena.hpp"
#include "shardlib/comm/shm/view.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/tuning.hpp"

namespace shardlib::detail::shm {

/// A collective under way. Fields that several members write have cache lines of their own.
struct CollectiveSlot {
  alignas(64) Counter round;  ///< the collective, counted from 0, that may use the slot
  Counter released;           ///< members that no longer need it
  alignas(64) Counter posted;
  alignas(64) Counter done;  ///< chunks
};

/// A send of at most this many bytes is copied into the slot, so its owner need not wait until the others have read it.
inline constexpr std::size_t eager_bytes = 8192;

/// A member's entry for its part of the slot's collective.
struct Post {
  alignas(64) Counter next;  ///< the first unclaimed chunk of its part
  alignas(64) CollectiveCall call;
  GivenSums given;
  std::uint64_t send;  ///< offset in the member's arena
  std::uint64_t recv;
  std::uint64_t loan;  ///< Loans::lend of a view's block
  /// The member's full call, or what it was given. Written only if these differ: then `described` is the round's number
  /// + 1.
  alignas(64) Counter described;
  std::array<char, 960> description;
  alignas(64) std::array<std::byte, eager_bytes> copy;  ///< the data of a short send
};

/// The beginning of a group's shared state.
struct Header {
  alignas(64) Counter attached;  ///< members that may still read it
};

/// A group's members on this node, seen from one of them. Their shared state is in the first member's arena.
class Group {
 public:
  static constexpr std::size_t slots = 16;

  /// Creates the group's state. The first member calls it.
  static std::byte* make_state(Arena& arena, std::size_t members) {
    std::byte* const state = arena.allocate(state_bytes(members));
    if (state == nullptr) throw Error("out of memory: no room for a group of " + std::to_string(members) + " ranks");
    (new (state) Header)->attached = members;
    for (std::size_t s = 0; s < slots; ++s) {
      std::byte* const at = state + sizeof(Header) + s * slot_bytes(members);
      (new (at) CollectiveSlot{})->round = s;
      for (std::size_t i = 0; i < members; ++i) (new (at + sizeof(CollectiveSlot) + i * sizeof(Post)) Post)->next = 0;
    }
    return state;
  }
  static std::size_t state_bytes(std::size_t members) { return sizeof(Header) + slots * slot_bytes(members); }
  static bool is_abandoned(const std::byte* state) {
    return reinterpret_cast<const Header*>(state)->attached.load(std::memory_order_acquire) == 0;
  }

  /// `devices` are the group's ranks in MPI_COMM_WORLD. places.size() of them, from index `first` on, are on this node.
  /// `places` has their places on the node, and `member` is the index of this process among them. `pool` is the
  /// device's pool, in the arena.
  Group(std::shared_ptr<Arena> arena, std::shared_ptr<Pool> pool, std::vector<int> places, std::size_t member,
        std::byte* state, std::vector<int> devices, std::size_t first, const Tuning& tuning)
      : arena_(std::move(arena)),
        pool_(std::move(pool)),
        places_(std::move(places)),
        member_(member),
        state_(state),
        devices_(std::move(devices)),
        first_(first),
        tuning_(tuning) {}

  [[nodiscard]] std::size_t member() const { return member_; }
  [[nodiscard]] std::size_t size() const { return places_.size(); }
  /// The number of nodes of the group. Each has the same number of members.
  [[nodiscard]] std::size_t nodes() const { return devices_.size() / size(); }
  [[nodiscard]] const Arena& arena() const { return *arena_; }
  [[nodiscard]] Pool& pool() const { return *pool_; }
  /// Lends each member a view of a block of this one (Loans::lend).
  [[nodiscard]] std::uint64_t lend(const Buffer& block) const { return loans.lend(arena_, block, size()); }
  /// A view of the blocks that the members have posted in a round.
  [[nodiscard]] std::shared_ptr<View> view(std::uint64_t round, std::size_t bytes) const {
    std::vector<ArenaPlace> places;
    std::vector<std::uint64_t> loans;
    for (std::size_t i = 0; i < size(); ++i) {
      const Post& theirs = post(round, i);
      places.push_back({places_[i], theirs.send});
      loans.push_back(theirs.loan);
    }
    return std::make_shared<View>(arena_, std::move(places), std::move(loans), bytes, tuning_.mapped_shards);
  }
  std::uint64_t next_round() { return rounds_++; }
  [[nodiscard]] const Tuning& tuning() const { return tuning_; }

  [[nodiscard]] CollectiveSlot& slot(std::uint64_t round) const {
    return *reinterpret_cast<CollectiveSlot*>(slot_at(round));
  }
  [[nodiscard]] Post& post(std::uint64_t round, std::size_t member) const {
    return *reinterpret_cast<Post*>(slot_at(round) + sizeof(CollectiveSlot) + member * sizeof(Post));
  }
  [[nodiscard]] std::byte* at(std::size_t member, std::uint64_t offset) const {
    return arena_->at(places_[member], offset);
  }
  /// Throws the error for member `other`, from which this member's call, or what it was given, differs.
  [[noreturn]] void fail_call(std::uint64_t round, const CollectiveCall& call, const OpInfo& op,
                              const GivenWindow& given, std::size_t other) const {
    Post& own = post(round, member_);
    Post& theirs = post(round, other);
    const auto part = call == theirs.call ? contradiction(given.sums(), theirs.given) : std::nullopt;
    const std::string mine = part ? given.describe(*part) : describe(call, op);
    const std::size_t n = std::min(mine.size(), own.description.size() - 1);
    std::copy_n(mine.data(), n, own.description.begin());
    own.description[n] = '\0';
    own.described.store(round + 1, std::memory_order_release);
    // The other member describes its call when it reaches this round. It may be late, or dead.
    std::string text = part ? "" : to_string(theirs.call);
    const auto end = std::chrono::steady_clock::now() + tuning_.patience;
    while (theirs.described.load(std::memory_order_acquire) != round + 1 && std::chrono::steady_clock::now() < end)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (theirs.described.load(std::memory_order_acquire) == round + 1)
      text.assign(theirs.description.begin(), std::ranges::find(theirs.description, '\0'));
    const auto rank = [this](std::size_t member) { return static_cast<int>(first_ + member); };
    if (part) fail_given(rank(member_), devices_.size(), given, *part, rank(other), text);
    detail::fail_call(rank(member_), devices_.size(), mine, rank(other), text);
  }
  /// Releases the group. It is not called after a failure, because others may still use the state.
  void leave() { reinterpret_cast<Header*>(state_)->attached.fetch_sub(1, std::memory_order_acq_rel); }

 private:
  static std::size_t slot_bytes(std::size_t members) { return sizeof(CollectiveSlot) + members * sizeof(Post); }
  [[nodiscard]] std::byte* slot_at(std::uint64_t round) const {
    return state_ + sizeof(Header) + round % slots * slot_bytes(size());
  }

  std::shared_ptr<Arena> arena_;
  std::shared_ptr<Pool> pool_;  ///< for copies of buffers outside the arena
  std::vector<int> places_;
  std::size_t member_;
  std::byte* state_;
  std::vector<int> devices_;
  std::size_t first_;
  Tuning tuning_;
  std::uint64_t rounds_ = 0;
};

/// One member's side of a collective. Nothing here blocks: `advance` does what can be done now.
class SharedRound {
 public:
  /// `given` is what this member was given; members of several nodes have compared that already.
  SharedRound(std::shared_ptr<Group> group, const CollectiveCall& call, const OpInfo& op, const Buffer& send,
              const Buffer& recv, const GivenWindow& given = {})
      : group_(std::move(group)),
        number_(group_->next_round()),
        op_(op),
        given_(given),
        work_(call, group_->size(), group_->tuning()),
        send_(send),
        recv_(recv) {
    if (is_short()) return;
    if (!reaches(send_)) {
      send_ = group_->pool().allocate(send.bytes());
      copy_bytes(send_.data(), send.data(), send.bytes());
    }
    if (!reaches(recv_)) {
      outside_ = recv;
      recv_ = group_->pool().allocate(recv.bytes());
    }
  }

  /// For gather_view: `*whole` receives the view.
  SharedRound(std::shared_ptr<Group> group, const CollectiveCall& call, const OpInfo& op, const Buffer& send,
              std::shared_ptr<Buffer> whole, const GivenWindow& given)
      : SharedRound(std::move(group), call, op, send, Buffer(), given) {
    whole_ = std::move(whole);
  }

  /// Where this member receives: the caller's recv, or a copy of it.
  [[nodiscard]] const Buffer& recv() const { return recv_; }
  /// Returns true when complete. Throws Error if another member's call differs.
  bool advance() {
    CollectiveSlot& slot = group_->slot(number_);
    if (stage_ == Stage::waiting) {
      if (slot.round.load(std::memory_order_acquire) != number_) return false;
      Post& mine = group_->post(number_, me());
      mine.call = work_.call();
      mine.given = given_.sums();
      if (is_short()) {
        copy_bytes(mine.copy.data(), send_.data(), send_.bytes());
      } else {
        mine.send = offset(send_);
        mine.recv = offset(recv_);
        if (whole_) mine.loan = group_->lend(send_);
      }
      slot.posted.fetch_add(1, std::memory_order_acq_rel);
      stage_ = Stage::posted;
    }
    if (stage_ == Stage::posted) {
      if (slot.posted.load(std::memory_order_acquire) != group_->size()) return false;
      for (std::size_t i = 0; i < group_->size(); ++i) {
        const Post& theirs = group_->post(number_, i);
        if (theirs.call != work_.call() || contradiction(theirs.given, given_.sums()))
          group_->fail_call(number_, work_.call(), op_, given_, i);
      }
      if (is_short()) {
        work_.run_alone(
            me(), [&](std::size_t i) { return group_->post(number_, i).copy.data(); }, recv_.data());
        release();
        return true;
      }
      if (whole_) make_view();
      work(me());
      stage_ = Stage::working;
    } else if (!is_done()) {
      // Takes chunks of the other members' parts, because one of them may be late or busy elsewhere.
      for (std::size_t k = 1; k < group_->size() && !is_done(); ++k) work((me() + k) % group_->size());
    }
    if (!is_done()) return false;
    if (outside_) copy_bytes(outside_.data(), recv_.data(), recv_.bytes());
    release();
    return true;
  }

 private:
  enum class Stage : std::uint8_t { waiting, posted, working };

  [[nodiscard]] std::size_t me() const { return group_->member(); }
  [[nodiscard]] bool is_short() const { return send_.bytes() <= eager_bytes && work_.call().nodes == 1; }
  [[nodiscard]] bool reaches(const Buffer& buffer) const {
    if (buffer.bytes() == 0) return true;
    // A view consists of whole pages, so a block for it must begin on a page boundary.
    return group_->arena().contains(buffer.data(), buffer.bytes()) &&
           (work_.call().kind != Collective::gather_view || group_->arena().offset(buffer.data()) % page_bytes() == 0);
  }
  [[nodiscard]] std::uint64_t offset(const Buffer& buffer) const {
    return buffer.bytes() == 0 ? 0 : group_->arena().offset(buffer.data());
  }
  void make_view() {
    const std::size_t block = send_.bytes(), bytes = group_->size() * block;
    const auto view = group_->view(number_, block);
    if (view->data() != nullptr) {
      *whole_ = Buffer(view->data(), bytes, view, true);
      return;
    }
    *whole_ = group_->pool().allocate(bytes);
    for (std::size_t i = 0; i < group_->size(); ++i) copy_bytes(whole_->data() + i * block, view->block(i), block);
  }
  [[nodiscard]] bool is_done() const {
    return group_->slot(number_).done.load(std::memory_order_acquire) == work_.chunks() * group_->size();
  }
  /// Does the unclaimed chunks of a member's part.
  void work(std::size_t part) {
    Counter& next = group_->post(number_, part).next;
    std::uint64_t done = 0;
    // Read before the atomic add: a cache line that is only read stays in the caches of all readers.
    while (next.load(std::memory_order_relaxed) < work_.chunks()) {
      const std::uint64_t c = next.fetch_add(1, std::memory_order_relaxed);
      if (c >= work_.chunks()) break;
      work_.run(
          part, c, [&](std::size_t i) { return group_->at(i, group_->post(number_, i).send); },
          [&](std::size_t i) { return group_->at(i, group_->post(number_, i).recv); });
      ++done;
    }
    if (done != 0) group_->slot(number_).done.fetch_add(done, std::memory_order_acq_rel);
  }
  /// The last member to release it prepares the slot for a later collective.
  void release() {
    CollectiveSlot& slot = group_->slot(number_);
    if (slot.released.fetch_add(1, std::memory_order_acq_rel) + 1 != group_->size()) return;
    slot.posted.store(0, std::memory_order_relaxed);
    slot.done.store(0, std::memory_order_relaxed);
    slot.released.store(0, std::memory_order_relaxed);
    for (std::size_t i = 0; i < group_->size(); ++i) group_->post(number_, i).next.store(0, std::memory_order_relaxed);
    slot.round.store(number_ + Group::slots, std::memory_order_release);
  }

  std::shared_ptr<Group> group_;
  std::uint64_t number_;
  OpInfo op_;
  GivenWindow given_;
  CollectiveWork work_;
  Buffer send_;
  Buffer recv_;
  Buffer outside_;                 ///< the caller's recv if it is outside the arena
  std::shared_ptr<Buffer> whole_;  ///< the result of a view
  Stage stage_ = Stage::waiting;
};

}  // namespace shardlib::detail::shm
