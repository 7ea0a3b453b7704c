// Work that may fail on some devices: either it succeeds on all, or all throw the same error.
#pragma once

#include <exception>
#include <string>
#include <vector>

#include "shardlib/device/device.hpp"
#include "shardlib/support/inline.hpp"
#include "shardlib/types/call_site.hpp"

namespace shardlib::io {

namespace detail {
/// Throws in a dry run, whose other devices do not exist. `what` begins the message.
void require_devices(const Device& device, const std::string& what);
}  // namespace detail

/// Every device's text, on every device, by device index. Collective over the whole mesh. `gather_texts(device,
/// host_name)`
[[nodiscard]] std::vector<std::string> gather_texts(Device& device, const std::string& mine,
                                                    Site site = Site::current());

/// Collective: throws the same error on all devices if any device has one (null: it has none). `what` begins the
/// message; where devices differ, the message says which one it comes from. `agree(device, "saving", error)`
void agree(Device& device, const std::string& what, const std::exception_ptr& error, Site site = Site::current());

/// Collective: calls f, which must not communicate, and agrees on the outcome. `together(device, "reading", [&] { text
/// = read_file(path); })`
template <class F>
void together(Device& device, const std::string& what, F&& f, Site site = Site::current()) {
  detail::require_devices(device, what);
  std::exception_ptr error;
  try {
    f();
  } catch (...) {
    error = std::current_exception();
  }
  agree(device, what, error, site);
}

}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/impl/agree.hpp"
#endif
