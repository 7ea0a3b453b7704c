// Checksums of the chunks of a token file, in a file next to it: a `.bin` has no place for them, and other programs
// read it. docs/data.md specifies the file.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "shardlib/io/file.hpp"
#include "shardlib/io/formats/impl/zarr_json.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io::detail {

/// "train.bin.crc32c" for "train.bin".
inline std::string bin_checksums_path(const std::string& bin) {
  return bin + ".crc32c";
}

/// Receives the bytes of a `.bin` after its header, in order, and makes the file of their checksums.
class BinChecksumWriter {
 public:
  static constexpr std::size_t chunk_bytes = 65536;

  void add(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const auto piece = bytes.first(std::min(bytes.size(), chunk_bytes - filled_));
      sum_ = crc32c(piece, sum_);
      filled_ += piece.size();
      bytes = bytes.subspan(piece.size());
      if (filled_ == chunk_bytes) next();
    }
  }
  /// Ends the last chunk.
  [[nodiscard]] std::string finish(std::uint64_t begin) {
    if (filled_ > 0) next();
    const json all = {{"format", "shardlib-bin-checksums"},
                      {"version", 1},
                      {"begin", begin},
                      {"chunk_bytes", chunk_bytes},
                      {"crc32c", sums_}};
    return all.dump(1) + "\n";
  }

 private:
  void next() {
    sums_.push_back(hex(sum_));
    sum_ = 0;
    filled_ = 0;
  }
  std::vector<std::string> sums_;
  std::uint32_t sum_ = 0;
  std::size_t filled_ = 0;
};

/// The checksums of a `.bin`. Each chunk is compared when its first token is read, and not again.
class BinChecksums {
 public:
  /// Null where the file has none; `begin` is where its tokens begin.
  static std::shared_ptr<BinChecksums> open(const InputFile& file, std::uint64_t begin) {
    const std::string path = bin_checksums_path(file.path());
    if (!file_exists(path)) return nullptr;
    auto result = std::make_shared<BinChecksums>();
    const auto fail = [&](const std::string& why) {
      throw Error("'" + path + "' " + why + ": one of the two files is damaged or was replaced; copy both again, or " +
                  "remove '" + path + "' to read without checksums");
    };
    const json all = read_json(path);
    if (all.value("format", json()) != "shardlib-bin-checksums" || all.value("version", json()) != 1)
      fail("holds no checksums of version 1");
    const json sums = all.value("crc32c", json()), size = all.value("chunk_bytes", json());
    if (!sums.is_array() || !size.is_number_unsigned() || size.get<std::uint64_t>() == 0) fail("has no list of them");
    if (all.value("begin", json()) != begin)
      fail("says that the tokens of '" + file.path() + "' begin at byte " + all.value("begin", json()).dump() +
           ", but they begin at byte " + std::to_string(begin));
    result->begin_ = begin;
    result->chunk_ = size.get<std::uint64_t>();
    for (const json& sum : sums) {
      const std::string text = sum.is_string() ? sum.get<std::string>() : "";
      std::uint32_t value = 0;
      if (text.size() != 8 || !shardlib::detail::parse_number(text, value, 16))
        fail("has " + sum.dump().substr(0, 60) + " in place of a checksum");
      result->sums_.push_back(value);
    }
    const std::uint64_t bytes = file.size() - begin, chunks = bytes / result->chunk_ + (bytes % result->chunk_ != 0);
    if (chunks != result->sums_.size())
      fail("has " + std::to_string(result->sums_.size()) + " checksums, but '" + file.path() + "' has " +
           std::to_string(chunks) + " chunks");
    result->verified_.resize(result->sums_.size());
    return result;
  }

  /// Compares the chunks with bytes in [from, to) that have not been compared yet. Thread-safe.
  void verify(const InputFile& file, std::uint64_t from, std::uint64_t to) {
    // A chunk larger than the file is the only one; the place of the next would overflow.
    for (std::uint64_t i = (from - begin_) / chunk_; i < sums_.size() && begin_ + i * chunk_ < to; ++i) {
      const auto place = static_cast<std::size_t>(i);
      {
        const std::lock_guard lock(mutex_);
        if (verified_[place]) continue;
      }
      const std::uint64_t first = begin_ + i * chunk_;
      Bytes bytes(static_cast<std::size_t>(std::min(chunk_, file.size() - first)));
      file.read(first, bytes);
      if (const std::uint32_t found = crc32c(bytes); found != sums_[place]) {
        const std::string path = bin_checksums_path(file.path());
        throw Error("'" + file.path() + "': chunk " + std::to_string(i) + ", bytes " + std::to_string(first) + " to " +
                    std::to_string(first + bytes.size() - 1) + ", has the checksum " + hex(found) + ", but '" + path +
                    "' says " + hex(sums_[place]) +
                    ": it is damaged; copy the file again, or make the data again; if " +
                    "it was changed on purpose, remove '" + path + "'");
      }
      const std::lock_guard lock(mutex_);
      verified_[place] = true;
    }
  }

 private:
  std::uint64_t begin_ = 0, chunk_ = 1;
  std::vector<std::uint32_t> sums_;
  std::mutex mutex_;
  std::vector<bool> verified_;
};

}  // namespace shardlib::io::detail
