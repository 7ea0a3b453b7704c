// Blocks of a node's ranks as one piece of memory, without a copy: pages of their arenas, mapped side by side.
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

/// The blocks of which peers have views. Until all views of a block are gone its buffer has a handle here, so that
/// nobody overwrites it and it is not freed.
class Loans {
 public:
  /// There will be so many views. Returns where in the arena those that are gone are counted.
  std::uint64_t lend(const std::shared_ptr<Arena>& arena, Buffer block, std::size_t views) {
    std::byte* const at = arena->allocate(sizeof(Counter));
    if (at == nullptr) throw Error("out of memory: no room to count the views of a block");
    loans_.push_back({arena, new (at) Counter(0), views, std::move(block)});
    return arena->offset(at);
  }
  /// Releases blocks without views.
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

/// This rank's, in all groups: what one has lent another may wait for.
inline Loans loans;

/// Where a block of a view lies.
struct ArenaPlace {
  int rank;  ///< of the node
  std::uint64_t offset;
  auto operator<=>(const ArenaPlace&) const = default;
};

/// Pages of several arenas side by side, to be read. To map them takes as long as to copy them, so they are kept for
/// the next view of the same places, whatever these hold by then.
class Maps {
 public:
  using Pages = std::shared_ptr<std::byte>;

  /// `bytes` of each place; `most` places may be mapped at a time. Null where no more can be mapped.
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
    madvise(pages.get(), all, MADV_DONTDUMP);  // a core has its own rank's memory
    return pages;
  }
  /// Unmaps what has not been used for longest, and is in no view, until there is room for so many places. False if
  /// what is in views leaves none.
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

/// Blocks of several ranks side by side, each of so many bytes, which are whole pages.
class View {
 public:
  /// `loans`: of each block, Loans::lend. `most`: as in Maps::find.
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

  /// Null where no more can be mapped.
  [[nodiscard]] std::byte* data() const { return pages_.get(); }
  [[nodiscard]] const std::byte* block(std::size_t i) const { return arena_->at(places_[i].rank, places_[i].offset); }

 private:
  std::shared_ptr<Arena> arena_;
  std::vector<ArenaPlace> places_;
  std::vector<std::uint64_t> loans_;
  Maps::Pages pages_;
};

}  // namespace shardlib::detail::shm
