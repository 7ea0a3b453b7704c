// Streams of gzip and zstd, which `tokenize` detects by their first bytes.
#pragma once

#include <fmt/format.h>
#include <zlib.h>
#include <zstd.h>
#include <shardlib/io/data/token_source.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/support/error.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tokenize {

using namespace shardlib;

/// The contents of a compressed file from its beginning on.
class Decompressor {
 public:
  virtual ~Decompressor() = default;
  Decompressor(const Decompressor&) = delete;
  Decompressor& operator=(const Decompressor&) = delete;

  /// Appends the next bytes, at most `most`; false at the end.
  bool read(std::string& buffer, std::size_t most) {
    const std::size_t old = buffer.size();
    buffer.resize(old + most);
    buffer.resize(old + inflate(buffer.data() + old, most));
    return buffer.size() > old;
  }
  /// Bytes of the file that have been decompressed.
  [[nodiscard]] std::uint64_t place() const { return taken_ - input_.size(); }

 protected:
  Decompressor(const io::InputFile& file, std::string path, std::uint64_t size, std::string_view library)
      : file_(file), path_(std::move(path)), size_(size), library_(library) {}

  /// Writes at most `most` bytes there and returns how many. Fewer than that are the last.
  virtual std::size_t inflate(char* to, std::size_t most) = 0;

  /// The next bytes of the file, after the last ones are used; none at the end.
  std::span<char> input() {
    if (input_.empty() && taken_ < size_) {
      block_.resize(static_cast<std::size_t>(std::min<std::uint64_t>(size_ - taken_, 1U << 17)));
      file_.read(taken_, std::as_writable_bytes(std::span(block_)));
      taken_ += block_.size();
      input_ = block_;
    }
    return input_;
  }
  void use(std::size_t bytes) { input_ = input_.subspan(bytes); }

  [[noreturn]] void fail(const std::string& reason) const {
    throw Error(fmt::format("'{}' is damaged or was cut short, says {} ({}, at byte {}): get it again", path_, library_,
                            reason, place()));
  }

 private:
  const io::InputFile& file_;
  std::string path_;
  std::uint64_t size_;
  std::string_view library_;
  std::vector<char> block_;  // of the compressed file
  std::span<char> input_;    // what is left of it
  std::uint64_t taken_ = 0;  // bytes of the compressed file, to the end of block_
};

class Gzip final : public Decompressor {
 public:
  Gzip(const io::InputFile& file, const std::string& path, std::uint64_t size)
      : Decompressor(file, path, size, "zlib") {
    constexpr int gzip_only = 15 + 16;
    if (inflateInit2(&stream_, gzip_only) != Z_OK) throw Error("cannot read '" + path + "' by zlib: is there memory?");
  }
  ~Gzip() override { inflateEnd(&stream_); }

 private:
  // Members follow each other, and zeros may fill the end. Anything else there is damage: its content is lost.
  std::size_t inflate(char* to, std::size_t most) override {
    stream_.next_out = reinterpret_cast<Bytef*>(to);
    stream_.avail_out = static_cast<uInt>(most);
    while (stream_.avail_out > 0) {
      std::span<char> from = input();
      if (between_) {
        const auto zeros =
            static_cast<std::size_t>(std::ranges::find_if(from, [](char c) { return c != 0; }) - from.begin());
        use(zeros);
        if (zeros > 0) continue;  // the next block may begin with more
        if (from.empty()) break;
        inflateReset(&stream_);
        between_ = false;
      }
      if (from.empty()) fail("unexpected end of file");
      stream_.next_in = reinterpret_cast<Bytef*>(from.data());
      stream_.avail_in = static_cast<uInt>(from.size());
      const int code = ::inflate(&stream_, Z_NO_FLUSH);
      use(from.size() - stream_.avail_in);
      between_ = code == Z_STREAM_END;
      if (code != Z_OK && code != Z_STREAM_END && code != Z_BUF_ERROR)
        fail(stream_.msg != nullptr ? stream_.msg : "no reason");
    }
    return most - stream_.avail_out;
  }

  z_stream stream_{};
  bool between_ = false;  // members
};

class Zstd final : public Decompressor {
 public:
  Zstd(const io::InputFile& file, const std::string& path, std::uint64_t size)
      : Decompressor(file, path, size, "zstd"), context_(ZSTD_createDCtx()) {
    // Archives of texts are made with windows of up to 2 GB (zstd --long=31).
    constexpr int widest_window = 31;
    if (!context_ || ZSTD_isError(ZSTD_DCtx_setParameter(context_.get(), ZSTD_d_windowLogMax, widest_window)) != 0)
      throw Error("cannot read '" + path + "' by zstd: is there memory?");
  }

 private:
  // Frames follow each other.
  std::size_t inflate(char* to, std::size_t most) override {
    ZSTD_outBuffer out{to, most, 0};
    while (out.pos < most) {
      const std::span<char> from = input();
      if (from.empty() && between_) break;
      ZSTD_inBuffer in{from.data(), from.size(), 0};
      const std::size_t before = out.pos, left = ZSTD_decompressStream(context_.get(), &out, &in);
      use(in.pos);
      if (ZSTD_isError(left) != 0) fail(ZSTD_getErrorName(left));
      if (from.empty() && out.pos == before) fail("unexpected end of file");
      between_ = left == 0;
    }
    return out.pos;
  }

  struct Free {
    void operator()(ZSTD_DCtx* context) const { ZSTD_freeDCtx(context); }
  };
  std::unique_ptr<ZSTD_DCtx, Free> context_;
  bool between_ = true;  // frames
};

/// The decompressor of the file; null for a file that is not compressed. The file must outlive it.
inline std::unique_ptr<Decompressor> decompressor_of(const io::InputFile& file, const std::string& path,
                                                     std::uint64_t size) {
  const std::string_view by = io::detail::compression(file);
  if (by == "gzip") return std::make_unique<Gzip>(file, path, size);
  if (by.empty()) return nullptr;
  return std::make_unique<Zstd>(file, path, size);
}

}  // namespace tokenize
