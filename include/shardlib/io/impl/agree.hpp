// Definitions of agree.hpp.
#pragma once

#include "shardlib/io/agree.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "shardlib/support/error.hpp"
#include "shardlib/support/error_text.hpp"

namespace shardlib::io {

SHARDLIB_INLINE void detail::require_devices(const Device& device, const std::string& what) {
  if (device.is_dry())
    throw Error(what + (what.empty() ? "" : ": ") +
                "a dry run has one device, which cannot know what the others hold; leave reshard, save, load and the "
                "like out of it: `if (!mesh.device()->is_dry())`");
}

SHARDLIB_INLINE std::vector<std::string> gather_texts(Device& device, const std::string& mine, Site site) {
  detail::require_devices(device, "");
  Communicator& all = device.everybody();
  const auto n = static_cast<std::size_t>(all.size());
  Pool& pool = *device.host_pool();

  const std::uint64_t length = mine.size();
  const Buffer my_length = pool.allocate(sizeof length), lengths = pool.allocate(n * sizeof length);
  std::memcpy(my_length.data(), &length, sizeof length);
  all.all_gather(my_length, lengths, 1, site).wait();
  const auto* sizes = lengths.as<std::uint64_t>();
  const std::uint64_t longest = *std::max_element(sizes, sizes + n);
  if (longest == 0) return std::vector<std::string>(n);

  const Buffer text = pool.allocate(longest), texts = pool.allocate(n * longest);
  std::memset(text.data(), 0, longest);
  std::memcpy(text.data(), mine.data(), mine.size());
  all.all_gather(text, texts, 1, site).wait();
  std::vector<std::string> result;
  for (std::size_t i = 0; i < n; ++i) result.emplace_back(texts.as<char>() + i * longest, sizes[i]);
  return result;
}

SHARDLIB_INLINE void agree(Device& device, const std::string& what, const std::exception_ptr& error, Site site) {
  // 'u', 's' or 'e' for the kind of the error, its message, and which device this is.
  std::string mine;
  if (error) {
    try {
      std::rethrow_exception(error);
    } catch (const UsageError&) {
      mine = "u";
    } catch (const StorageError&) {
      mine = "s";
    } catch (...) {
      mine = "e";
    }
    mine += shardlib::detail::error_text(error) + '\0' + device.describe();
  }
  const std::vector<std::string> all = gather_texts(device, mine, site);
  std::size_t failed = 0;
  bool alike = true;
  const std::string* first = nullptr;
  const auto message_of = [](const std::string& text) { return std::string_view(text).substr(0, text.find('\0')); };
  for (const std::string& text : all) {
    if (text.empty()) continue;
    if (first == nullptr) first = &text;
    alike = alike && message_of(text) == message_of(*first);
    ++failed;
  }
  if (first == nullptr) return;
  const std::string_view kind_and_message = message_of(*first);
  std::string message = what + (what.empty() ? "" : ": ") + std::string(kind_and_message.substr(1));
  if (!alike || failed < all.size())
    message += " (on " + first->substr(kind_and_message.size() + 1) +
               (failed > 1 ? ", and " + std::to_string(failed - 1) + " more failed" : "") + ")";
  if (kind_and_message[0] == 'u') throw UsageError(message);
  if (kind_and_message[0] == 's') throw StorageError(message);
  throw Error(message);
}

}  // namespace shardlib::io
