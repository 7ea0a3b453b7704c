// Definitions of faults.hpp.
#pragma once

#include "shardlib/memory/faults.hpp"

#include <algorithm>
#include <utility>

#include "shardlib/memory/region.hpp"

namespace shardlib::detail {

SHARDLIB_INLINE FaultWord* Faults::next(Region& memory) {
  const std::lock_guard lock(mutex_);
  if (words_ == nullptr) words_ = reinterpret_cast<FaultWord*>(memory.allocate(most * check_bytes));
  if (words_ == nullptr)
    throw Error("out of memory: no " + std::to_string(most * check_bytes) + " bytes for checks are left");
  return checks_.size() == most ? nullptr : words_ + static_cast<std::int64_t>(checks_.size()) * teams;
}

SHARDLIB_INLINE void Faults::add(std::string text) {
  const std::lock_guard lock(mutex_);
  checks_.push_back({std::move(text)});
}

SHARDLIB_INLINE std::size_t Faults::count() const {
  const std::lock_guard lock(mutex_);
  return before_ + checks_.size();
}

SHARDLIB_INLINE void Faults::name(std::size_t since, const std::function<std::string(const std::string&)>& named) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = std::max(since, before_) - before_; i < checks_.size(); ++i) {
    if (!std::exchange(checks_[i].is_named, true)) checks_[i].text = named(checks_[i].text);
  }
}

SHARDLIB_INLINE void Faults::close(const std::function<void(void*, const void*, std::size_t)>& wait) {
  std::unique_lock lock(mutex_);
  const std::size_t begin = closed_, end = before_ + checks_.size();
  const FaultWord* const from = words_ + static_cast<std::int64_t>(begin - before_) * teams;
  lock.unlock();
  std::vector<FaultWord> words((end - begin) * static_cast<std::size_t>(teams));
  wait(words.data(), from, words.size() * sizeof(FaultWord));
  if (words.empty()) return;
  lock.lock();
  Check wrong;
  auto found = words.end();
  // Another thread may have closed some meanwhile.
  for (std::size_t i = std::max(begin, closed_); i < end && found == words.end(); ++i) {
    const auto first = words.begin() + static_cast<std::ptrdiff_t>(i - begin) * teams;
    const auto least = std::ranges::min_element(first, first + teams, {}, &FaultWord::place);
    if (least->place == FaultWord::none) continue;
    found = least;
    wrong = std::move(checks_[i - before_]);
  }
  closed_ = std::max(closed_, end);
  if (closed_ == before_ + checks_.size()) {
    checks_.clear();
    before_ = closed_;
  }
  if (found == words.end()) return;
  if (const std::size_t at = wrong.text.find('\0'); at != std::string::npos)
    wrong.text.replace(at, 1, std::to_string(found->value));
  if (wrong.is_named) throw LateError(wrong.text);
  throw Error(wrong.text);
}

}  // namespace shardlib::detail
