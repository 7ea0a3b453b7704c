// Blocks of a node's ranks as one range of memory, without a copy: pages of their arenas, mapped side by side.
#pragma once

#include <sys/mman.h>

#include <atomic>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

#include "shardlib/comm/shm/arena.hpp"
#include "shardlib/memory/buffer.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail::shm {

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free, "only then does an atomic work between processes");

/// The blocks that peers view. It holds a handle of a block's buffer until all views of it are released, so that no op
/// overwrites or frees the block.
class Loans {
 public:
  /// Registers a block with `views` views. Returns the arena offset of its counter of released views.
  std::uint64_t lend(const std::shared_ptr<Arena>& arena, Buffer block, std::size_t views) {
    std::byte* const at = arena->allocate(sizeof(Counter));
    if (at == nullptr) throw Error("out of memory: no room to count the views of a block");
    loans_.push_back({arena, new (at) Counter(0), views, std::move(block)});
    return arena->offset(at);
  }
  /// Releases blocks that have no views any more.
  void collect() {
    std::erase_if(loans_, [](const Loan& loan) {
      const bool is_back = loan.gone->load(std::memory_order_acquire) == loan.views;
      if (is_back) loan.arena->free(reinterpret_cast<std::byte*>(loan.gone), sizeof(Counter));
      return is_back;
    });
  }

 private:
  struct Loan {
    std::shared_ptr<Arena> arena;
    Counter* gone;  ///< in the arena
    std::size_t views;
    Buffer block;
  };
  std::vector<Loan> loans_;
};

/// This rank's loans in all groups. A wait in one group may depend on a loan of another one.
inline Loans loans;

/// Where a block of a view is stored.
struct ArenaPlace {
  int rank;  ///< rank of the node
  std::uint64_t offset;
  auto operator<=>(const ArenaPlace&) const = default;
};

/// Pages of several arenas, mapped side by side and read-only. Mapping takes as long as copying, so mappings are cached
/// by address, not by content.
class Maps {
 public:
  using Pages = std::shared_ptr<std::byte>;

  /// Finds or makes the mapping of `bytes` bytes at each place. At most `most` places may be mapped at a time. Returns
  /// null if no more can be mapped.
  Pages find(const Arena& arena, const std::vector<ArenaPlace>& places, std::size_t bytes, std::size_t most) {
    if (places.size() > most) return nullptr;
    const Key key(arena.address().key, bytes, places);
    const auto known = kept_.find(key);
    if (known != kept_.end()) {
      known->second.last_use = ++uses_;
      return known->second.pages;
    }
    if (!make_room(places.size(), most)) return nullptr;
    Pages pages = map(arena, places, bytes);
    if (pages == nullptr) return nullptr;
    mapped_ += places.size();
    kept_.emplace(key, MappedPages{pages, ++uses_});
    return pages;
  }

  [[nodiscard]] std::size_t mapped() const { return mapped_; }

 private:
  using Key = std::tuple<std::uint64_t, std::size_t, std::vector<ArenaPlace>>;
  struct MappedPages {
    Pages pages;
    std::uint64_t last_use = 0;
  };

  static Pages map(const Arena& arena, const std::vector<ArenaPlace>& places, std::size_t bytes) {
    const std::size_t all = places.size() * bytes;
    void* const at = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return nullptr;
    const Pages pages(static_cast<std::byte*>(at), [all](std::byte* data) { munmap(data, all); });
    for (std::size_t i = 0; i < places.size(); ++i) {
      if (!arena.map_at(pages.get() + i * bytes, places[i].rank, places[i].offset, bytes)) return nullptr;
    }
    madvise(pages.get(), all, MADV_DONTDUMP);  // a core dump has only its own rank's memory
    return pages;
  }
  /// Unmaps the least recently used mappings that are in no view, until there is room for these places. Returns false
  /// if views leave too little room.
  bool make_room(std::size_t places, std::size_t most) {
    while (mapped_ + places > most) {
      auto oldest = kept_.end();
      for (auto at = kept_.begin(); at != kept_.end(); ++at) {
        const bool is_free = at->second.pages.use_count() == 1;
        if (is_free && (oldest == kept_.end() || at->second.last_use < oldest->second.last_use)) oldest = at;
      }
      if (oldest == kept_.end()) return false;
      mapped_ -= std::get<2>(oldest->first).size();
      kept_.erase(oldest);
    }
    return true;
  }

  std::map<Key, MappedPages> kept_;
  std::uint64_t uses_ = 0;
  std::size_t mapped_ = 0;
};

inline Maps maps;

/// Blocks of several ranks side by side. All have the same number of bytes, and consist of whole pages.
class View {
 public:
  /// `loans` has the Loans::lend of each block. `most` is as in Maps::find.
  View(std::shared_ptr<Arena> arena, std::vector<ArenaPlace> places, std::vector<std::uint64_t> loans,
       std::size_t bytes, std::size_t most)
      : arena_(std::move(arena)),
        places_(std::move(places)),
        loans_(std::move(loans)),
        pages_(maps.find(*arena_, places_, bytes, most)) {}
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() {
    for (std::size_t i = 0; i < places_.size(); ++i) {
      reinterpret_cast<Counter*>(arena_->at(places_[i].rank, loans_[i]))->fetch_add(1, std::memory_order_release);
    }
  }

  /// Null if no more can be mapped.
  [[nodiscard]] std::byte* data() const { return pages_.get(); }
  [[nodiscard]] const std::byte* block(std::size_t i) const { return arena_->at(places_[i].rank, places_[i].offset); }

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<ArenaPlace> places_;
  std::vector<std::uint64_t> loans_;
  Maps::Pages pages_;
};

}  // namespace shardlib::detail::shm
