// Memory that all ranks of a node can reach. Each rank's pools allocate from its arena, and its peers map the arena.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "shardlib/comm/process_file.hpp"
#include "shardlib/memory/region.hpp"
#include "shardlib/memory/system.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::detail::shm {

[[noreturn]] inline void fail_system(const std::string& what) {
  throw Error(what + ": " + std::strerror(errno));
}

/// How a peer finds an arena. Plain data, which the ranks exchange.
struct Address {
  std::uint64_t process = 0;
  std::int64_t file = -1;
  std::uint64_t bytes = 0;
  std::uint64_t key = 0;   ///< also written into the arena: tells it from another file with this number
  std::uint64_t ring = 0;  ///< offset of the rank's flight recorder
};

/// A rank's arena and those of its peers. A memfd has no name, so nothing can stay behind in /dev/shm. Its size is
/// limited by memory, not by /dev/shm. The system provides pages when they are first written.
class Arena final : public Region {
 public:
  /// Creates this rank's arena, for `ranks` ranks on the node. Throws Error if the system does not allow it.
  explicit Arena(int ranks) : peers_(static_cast<std::size_t>(ranks)), files_(peers_.size()) {
    // Every rank maps all arenas, and an address has 47 bits.
    const std::size_t bytes =
        std::min(machine_bytes(), (std::size_t{1} << 45) / peers_.size() / page_bytes() * page_bytes());
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur < bytes) {
      throw Error("files are limited to " + std::to_string(limit.rlim_cur) + " bytes (ulimit -f)");
    }
    file_ = OwnedFile(memfd_create("shardlib", MFD_CLOEXEC));
    if (file_.number() == -1) fail_system("memfd_create");
    if (ftruncate(file_.number(), static_cast<off_t>(bytes)) != 0) fail_system("ftruncate");
    own_ = map(file_, bytes);
    if (getrandom(&key_, sizeof key_, 0) != static_cast<ssize_t>(sizeof key_)) fail_system("getrandom");
    std::memcpy(own_.data(), &key_, sizeof key_);
  }
  ~Arena() override { leave(); }

  [[nodiscard]] Address address() const {
    return {
        .process = static_cast<std::uint64_t>(getpid()), .file = file_.number(), .bytes = own_.bytes(), .key = key_};
  }
  /// Maps the arena of rank `peer` of the node. That process must still exist.
  void attach(int peer, const Address& address) {
    const auto i = static_cast<std::size_t>(peer);
    const auto process = static_cast<pid_t>(address.process);
    const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(address.file);
    // In another PID namespace the number may belong to another process, so do not open it.
    std::array<char, 64> target{};
    if (readlink(path.c_str(), target.data(), target.size() - 1) == -1) fail_system(path);
    if (!std::string_view(target.data()).starts_with("/memfd:shardlib")) throw Error(path + ": not the rank's memory");
    OwnedFile file(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (file.number() == -1) fail_system(path);
    struct stat info {};
    if (fstat(file.number(), &info) != 0) fail_system(path);
    if (static_cast<std::uint64_t>(info.st_size) != address.bytes) throw Error(path + ": not the rank's memory");
    peers_[i] = map(file, address.bytes);
    if (std::memcmp(peers_[i].data(), &address.key, sizeof address.key) != 0) {
      throw Error(path + ": not the rank's memory");
    }
    madvise(peers_[i].data(), peers_[i].bytes(), MADV_DONTDUMP);
    files_[i] = std::move(file);
  }
  [[nodiscard]] bool contains(const std::byte* data, std::size_t bytes) const {
    return std::less_equal<>()(own_.data(), data) && std::less_equal<>()(data + bytes, own_.data() + own_.bytes());
  }
  [[nodiscard]] std::size_t offset(const std::byte* data) const { return static_cast<std::size_t>(data - own_.data()); }
  /// The address of an offset in the arena of rank `rank` of the node. This rank has not attached its own arena, so it
  /// uses `own_`.
  [[nodiscard]] std::byte* at(int rank, std::size_t offset) const {
    const Mapping& peer = peers_[static_cast<std::size_t>(rank)];
    return (peer.data() != nullptr ? peer : own_).data() + offset;
  }
  /// Maps whole pages of an arena read-only at `to`. Returns false if the system refuses.
  [[nodiscard]] bool map_at(std::byte* to, int rank, std::size_t offset, std::size_t bytes) const {
    const OwnedFile& peer = files_[static_cast<std::size_t>(rank)];
    return mmap(to, bytes, PROT_READ, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
                (peer.number() != -1 ? peer : file_).number(), static_cast<off_t>(offset)) != MAP_FAILED;
  }
  [[nodiscard]] std::size_t alignment() const override { return page_bytes(); }

 private:
  static Mapping map(const OwnedFile& file, std::size_t bytes) {
    Mapping result(file.number(), bytes);
    if (result.data() == nullptr) fail_system("mapping " + std::to_string(bytes) + " bytes");
    return result;
  }
  bool grant(std::size_t bytes) override { return bytes <= small_grant || bytes <= left_bytes(); }
  /// Returns the whole arena except the first page, which holds the key.
  Addresses grow(std::size_t) override {
    if (std::exchange(is_grown_, true)) return {};
    return {reinterpret_cast<std::uintptr_t>(own_.data()) + page_bytes(), own_.bytes() - page_bytes()};
  }
  void discard(std::uintptr_t begin, std::size_t bytes) override {
    fallocate(file_.number(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
              static_cast<off_t>(offset(reinterpret_cast<std::byte*>(begin))), static_cast<off_t>(bytes));
  }

  OwnedFile file_;
  std::uint64_t key_ = 0;
  Mapping own_;
  std::vector<Mapping> peers_;
  std::vector<OwnedFile> files_;
  bool is_grown_ = false;
};

}  // namespace shardlib::detail::shm
