// Folders for tests: of this process's own, removed at the end.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <system_error>
#include <vector>

namespace shardlib::test {

class Scratch {
 public:
  Scratch() : Scratch("/tmp/shardlib_test_" + std::to_string(getpid())) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    std::error_code ignored;
    if (mine_) std::filesystem::remove_all(path_, ignored);
  }
  /// One folder for all ranks that mpirun started here, the parent's; `on_mesh` must be the last that is done with it.
  static Scratch shared(bool mpi, int rank) {
    return mpi ? Scratch("/tmp/shardlib_test_mpi_" + std::to_string(getppid()), rank == 0) : Scratch();
  }
  [[nodiscard]] const std::string& path() const { return path_; }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  /// Writes a file, with its folders; returns its path.
  std::string put(const std::string& name, const std::string& bytes) const {
    const std::filesystem::path file = *this / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << bytes;
    return file.string();
  }

 private:
  explicit Scratch(const std::string& name, bool mine = true) : mine_(mine) {
    static std::map<std::string, int> folders;  // by name: those of one rank alone must not count among the shared
    path_ = name + "_" + std::to_string(folders[name]++);
    std::filesystem::create_directories(path_);
  }
  bool mine_;
  std::string path_;
};

inline std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
inline void put(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

/// All files below the folder, relative to it, sorted.
inline std::vector<std::string> files_below(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(folder))
    if (entry.is_regular_file()) names.push_back(std::filesystem::relative(entry.path(), folder).string());
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace shardlib::test
