// Definitions of checkpoint_writer.hpp.
#pragma once

#include "shardlib/io/checkpoint/writer.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <system_error>
#include <thread>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/checkpoint/impl/finite.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/runtime/padding.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io::detail {

using nlohmann::json;

/// Throws Error if a value of this device's shard of the leaf is not finite.
inline void require_finite(const std::string& leaf, DType dtype, const Buffer& buffer) {
  const std::size_t count = count_not_finite({buffer.data(), buffer.bytes()}, dtype);
  if (count != 0)
    throw Error(not_finite_message(leaf, count) +
                ", so the training has diverged; the checkpoints before this one stay");
}

/// What this device writes of the checkpoint under way.
struct CheckpointWriter::Job {
  struct Chunk {
    std::string path;
    Buffer buffer;
    DType dtype;
  };
  CheckpointMeta meta;
  std::string what;       ///< begins every error: "checkpoint 'runs/a/step-00000100' was not saved"
  std::string temporary;  ///< the folder until it is renamed
  std::vector<CheckpointArray> arrays;
  std::vector<Index> chunk_shapes;
  std::vector<Chunk> mine;
  std::vector<ManifestFile> written;  ///< by this device; device 0 begins with the metadata
  std::exception_ptr error;
  std::atomic<bool> done = false;
  std::thread thread;
  bool finite = false;  ///< SaveOptions::finite

  void write(int device) {
    try {
      for (const Chunk& chunk : mine)
        if (finite) require_finite(chunk.path.substr(0, chunk.path.rfind('/')), chunk.dtype, chunk.buffer);
      std::set<std::string> folders;
      for (Chunk& chunk : mine) {
        const std::string file = temporary + "/" + chunk.path;
        const std::span<const std::byte> bytes(chunk.buffer.data(), chunk.buffer.bytes());
        written.push_back({chunk.path, bytes.size(), crc32c(bytes)});
        write_file(file, bytes);
        chunk.buffer = {};
        folders.insert(file.substr(0, file.rfind('/')));
        pass("chunk", device);
      }
      // Only now: the disk takes many files at once faster than one by one.
      for (const ManifestFile& file : written) sync_path(temporary + "/" + file.path);
      for (const std::string& folder : folders) sync_path(folder);
      pass("chunks", device);
    } catch (...) {
      error = std::current_exception();
    }
    for (Chunk& chunk : mine) chunk.buffer = {};
    done = true;
  }
};

SHARDLIB_INLINE CheckpointWriter::CheckpointWriter(DevicePtr device, std::string directory, const Retention& keep,
                                                   bool finite)
    : device_(std::move(device)), directory_(std::move(directory)), keep_(keep), finite_(finite) {
  const auto not_negative = [](const char* name, std::int64_t number, const char* zero) {
    if (number < 0)
      throw UsageError(std::string("checkpoints: ") + name + " " + std::to_string(number) + " is negative; 0 keeps " +
                       zero);
  };
  not_negative("keep", keep_.newest, "all");
  not_negative("keep_every", keep_.every, "none for its step");
  not_negative("keep_best", keep_.best, "none for its loss");
}

SHARDLIB_INLINE CheckpointWriter::~CheckpointWriter() {
  if (!job_) return;
  if (job_->thread.joinable()) job_->thread.join();
  if (std::uncaught_exceptions() == 0 && device_->rank() == 0)
    std::fprintf(stderr, "warning: the checkpoint of step %lld in '%s' was never finished (AsyncSaver::flush)\n",
                 static_cast<long long>(job_->meta.step), directory_.c_str());
}

/// This device's shard as one chunk of a zarr array.
struct ShardChunk {
  CheckpointArray array;
  Index chunks;
  std::string key;  ///< "" if the shard is nothing but padding
};

inline ShardChunk shard_chunk(const std::string& name, const shardlib::detail::Value& x) {
  ShardChunk shard;
  shard.array = {name, x.dtype, {}, {}};
  Index place;
  for (int i = 0; i < x.spec->rank(); ++i) {
    const std::int64_t index = shardlib::detail::shard_index(*x.device, x.spec->dims[i].axes);
    shard.array.shape.push_back(x.global.logical[i]);
    shard.array.dims.emplace_back(x.spec->dims[i].name);
    shard.chunks.push_back(std::max<std::int64_t>(x.local[i], 1));
    place.push_back(index);
  }
  if (shardlib::detail::product(shardlib::detail::true_shape(x)) == 0) return shard;
  for (const auto index : place) shard.key += (shard.key.empty() ? "" : ".") + std::to_string(index);
  if (place.empty()) shard.key = "0";
  return shard;
}

/// Finds out which arrays there are and which device writes each shard. Devices may hold different leaves (pipeline
/// stages); a shard that several hold, because it is replicated, has one writer.
SHARDLIB_INLINE void CheckpointWriter::plan(Job& job, const NamedValues& leaves) const {
  std::vector<ShardChunk> shards;
  json mine = json::array();
  together(*device_, job.what, [&] {
    std::set<std::string> names;
    for (const auto& [name, value] : leaves) {
      if (name.empty() || name[0] == '.' || name.find("..") != std::string::npos ||  // as readers see it
          name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") !=
              std::string::npos)
        throw Error("'" + name + "' is not a name for an array: use letters, digits, _, - and single dots");
      if (!names.insert(name).second) throw Error("two leaves have the name '" + name + "'");
      if (!value) throw Error("the leaf '" + name + "' is empty");
      // Pipeline stages have leaves on a submesh.
      if (value->device != device_ && value->device->whole() != device_)
        throw Error("the leaf '" + name + "' is on another mesh");
      const ShardChunk& b = shards.emplace_back(shard_chunk(name, *value));
      mine.push_back({name, static_cast<int>(b.array.dtype), b.array.shape, b.array.dims, b.chunks, b.key});
    }
  });
  std::map<std::string, json> arrays;                                      // the description without the key
  std::map<std::string, std::map<std::string, std::vector<int>>> holders;  // by name and key
  const std::vector<std::string> all = gather_texts(*device_, mine.dump());
  together(*device_, job.what, [&] {
    for (std::size_t d = 0; d < all.size(); ++d)
      for (json entry : json::parse(all[d])) {
        const std::string name = entry[0], key = entry[5];
        entry.erase(5);
        if (!key.empty()) holders[name][key].push_back(static_cast<int>(d));
        if (const auto [it, fresh] = arrays.try_emplace(name, entry); !fresh && it->second != entry)
          throw Error("the leaf '" + name + "' has another shape, dtype or layout on device " + std::to_string(d));
      }
    for (const auto& [name, entry] : arrays) {
      job.arrays.push_back({name, static_cast<DType>(entry[1].get<int>()), entry[2].get<Index>(),
                            entry[3].get<std::vector<std::string>>()});
      job.chunk_shapes.push_back(entry[4].get<Index>());
      std::size_t count = 1;
      for (std::size_t i = 0; i < job.arrays.back().shape.size(); ++i) {
        const auto size = job.arrays.back().shape[i], chunk = job.chunk_shapes.back()[i];
        count *= static_cast<std::size_t>((size + chunk - 1) / chunk);
      }
      if (holders[name].size() != count)
        throw Error("the devices hold " + std::to_string(holders[name].size()) + " of the " + std::to_string(count) +
                    " shards of '" + name + "'");
    }
  });
  std::map<std::string, std::size_t> ordinal;
  for (const auto& [name, entry] : arrays) ordinal.emplace(name, ordinal.size());
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const auto& [name, value] = leaves[i];
    if (shards[i].key.empty()) continue;
    // Replicas take turns over the leaves.
    const std::vector<int>& who = holders[name][shards[i].key];
    if (who[ordinal[name] % who.size()] == device_->rank())
      job.mine.push_back({name + "/" + shards[i].key, value->on_host(), value->dtype});
  }
}

SHARDLIB_INLINE void CheckpointWriter::write_metadata_files(Job& job) const {
  job.temporary = temporary_name(directory_ + "/" + checkpoint_name(job.meta.step));
  make_folders(directory_);
  make_new_folder(job.temporary);
  sync_path(std::filesystem::path(directory_).parent_path().string());
  for (const std::string& path : write_metadata(job.temporary, job.meta, job.arrays, job.chunk_shapes))
    job.written.push_back(describe_file(job.temporary, path));
}

/// Removes the folder when an exception passes that all devices have agreed on: no device writes into it any more.
class Cleanup {
 public:
  Cleanup(bool mine, const std::string& folder) : mine_(mine), folder_(folder) {}
  Cleanup(const Cleanup&) = delete;
  Cleanup& operator=(const Cleanup&) = delete;
  ~Cleanup() {
    if (!mine_ || folder_.empty() || std::uncaught_exceptions() <= exceptions_) return;
    std::error_code ignored;  // the next save tries again; the first error is the one that counts
    std::filesystem::remove_all(folder_, ignored);
  }

 private:
  bool mine_;
  const std::string& folder_;
  int exceptions_ = std::uncaught_exceptions();
};

SHARDLIB_INLINE void CheckpointWriter::start(const CheckpointMeta& meta, const NamedValues& leaves, bool background) {
  finish();
  auto job = std::make_unique<Job>();
  job->meta = meta;
  job->finite = finite_;
  job->what = "checkpoint '" + directory_ + "/" + checkpoint_name(meta.step) + "' was not saved";
  const int device = device_->rank();
  together(*device_, job->what, [&] {
    if (meta.step < 0) throw UsageError("the step " + std::to_string(meta.step) + " is negative");
    pass("planned", device);
  });
  plan(*job, leaves);
  const Cleanup cleanup(device == 0, job->temporary);
  together(*device_, job->what, [&] {
    if (device == 0) write_metadata_files(*job);
    pass("metadata", device);
  });
  job->temporary = gather_texts(*device_, job->temporary)[0];
  if (background) {
    try {
      job->thread = std::thread([&job = *job, device] { job.write(device); });
    } catch (const std::system_error&) {
      job->write(device);  // no thread to be had: then now
    }
  } else {
    job->write(device);
  }
  job_ = std::move(job);
}

SHARDLIB_INLINE void CheckpointWriter::poll() {
  if (!job_) return;
  const auto busy = gather_texts(*device_, job_->done ? "" : "busy");
  if (std::ranges::all_of(busy, [](const std::string& text) { return text.empty(); })) finish();
}

SHARDLIB_INLINE void CheckpointWriter::finish() {
  if (!job_) return;
  const std::unique_ptr<Job> job = std::move(job_);
  if (job->thread.joinable()) job->thread.join();
  const Cleanup cleanup(device_->rank() == 0, job->temporary);
  agree(*device_, job->what, job->error);
  commit(*job);
}

SHARDLIB_INLINE void CheckpointWriter::commit(Job& job) const {
  json mine = json::array();
  for (const ManifestFile& file : job.written) mine.push_back({file.path, file.bytes, file.crc32c});
  const std::vector<std::string> all = gather_texts(*device_, mine.dump());
  const bool first = device_->rank() == 0;
  together(*device_, job.what, [&] {
    if (!first) return;
    std::vector<ManifestFile> files;
    for (const std::string& text : all)
      for (const json& file : json::parse(text))
        files.push_back({file[0].get<std::string>(), file[1].get<std::uint64_t>(), file[2].get<std::uint32_t>()});
    for (const CheckpointArray& array : job.arrays) sync_path(job.temporary + "/" + array.name);
    write_manifest(job.temporary, std::move(files));
    sync_path(job.temporary);
    pass("manifest", 0);
    const std::string name = checkpoint_name(job.meta.step);
    replace_folder(job.temporary, directory_ + "/" + name);
    sync_path(directory_);
    pass("renamed", 0);
  });
  // The checkpoint stands; should LATEST fail, the error says so.
  together(*device_, "checkpoint '" + directory_ + "/" + checkpoint_name(job.meta.step) + "' is saved, but", [&] {
    if (first) {
      replace_file(directory_ + "/LATEST", as_bytes(checkpoint_name(job.meta.step) + "\n"), true);
      pass("latest", 0);
      prune_checkpoints(directory_, job.meta.step, keep_);
    }
    pass("pruned", device_->rank());
  });
}

}  // namespace shardlib::io::detail
