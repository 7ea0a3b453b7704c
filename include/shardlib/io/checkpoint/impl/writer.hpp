// Definitions of writer.hpp.
#pragma once

#include "shardlib/io/checkpoint/writer.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <set>
#include <span>
#include <system_error>
#include <thread>

#include "shardlib/io/agree.hpp"
#include "shardlib/io/box.hpp"
#include "shardlib/io/checkpoint/impl/finite.hpp"
#include "shardlib/io/checkpoint/impl/holders.hpp"
#include "shardlib/io/checkpoint/layout.hpp"
#include "shardlib/io/impl/posix.hpp"
#include "shardlib/io/impl/temporary.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/crc32c.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/warning.hpp"

namespace shardlib::io::detail {

using nlohmann::json;

/// Throws Error if a value of this device's shard of the leaf is not finite.
inline void require_finite(const std::string& leaf, DType dtype, const Buffer& buffer) {
  const std::size_t count = count_not_finite({buffer.data(), buffer.bytes()}, dtype);
  if (count != 0)
    throw Error(not_finite_message(leaf, count) +
                ", so the training has diverged; the checkpoints before this one stay");
}

/// This device's share of the checkpoint that is being written.
struct CheckpointWriter::Job {
  /// The part of a file that one leaf has.
  struct Piece {
    std::string leaf;
    Buffer buffer;
    DType dtype;
  };
  struct File {
    std::string path;
    std::vector<Piece> pieces;
  };
  CheckpointMeta meta;
  std::string what;       ///< begins every error: "checkpoint 'runs/a/step-00000100' was not saved"
  std::string temporary;  ///< the folder until it is renamed
  Leaves leaves;          ///< of all devices
  std::vector<PlannedArray> arrays;
  std::vector<File> mine;
  std::vector<ManifestFile> written;  ///< by this device; device 0 begins with the metadata
  std::exception_ptr error;
  std::atomic<bool> done = false;
  std::thread thread;
  bool finite = false;  ///< SaveOptions::finite

  void write(const CheckpointWriter& writer) {
    try {
      for (const File& file : mine)
        for (const Piece& piece : file.pieces)
          if (finite) require_finite(piece.leaf, piece.dtype, piece.buffer);
      on_own_paths([&] { write_files(writer); });
    } catch (...) {
      error = std::current_exception();
    }
    mine.clear();
    done = true;
  }

 private:
  void write_files(const CheckpointWriter& writer) {
    std::set<std::string> folders;
    for (File& file : mine) {
      const std::string path = temporary + "/" + file.path;
      ManifestFile& entry = written.emplace_back(ManifestFile{file.path, 0, 0});
      OutputFile out(path);
      for (Piece& piece : file.pieces) {
        const std::span<const std::byte> bytes(piece.buffer.data(), piece.buffer.bytes());
        entry.crc32c = crc32c(bytes, entry.crc32c);
        entry.bytes += bytes.size();
        out.write(bytes);
        piece.buffer = {};
      }
      out.commit(false);
      folders.insert(path.substr(0, path.rfind('/')));
      writer.pass("chunk");
    }
    // All files together: a disk writes many files at once faster than one by one.
    for (const ManifestFile& file : written) sync_path(temporary + "/" + file.path);
    for (const std::string& folder : folders) sync_path(folder);
    writer.pass("chunks");
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
    shardlib::detail::warn("the checkpoint of step " + std::to_string(job_->meta.step) + " in '" + directory_ +
                           "' was never finished (AsyncSaver::flush)");
}

/// Finds out which arrays there are, and which device writes each file.
SHARDLIB_INLINE void CheckpointWriter::plan(Job& job, const NamedValues& leaves) const {
  json list = json::array();
  std::map<std::string, shardlib::detail::ValuePtr> mine;
  together(*device_, job.what, [&] {
    for (const auto& [name, value] : leaves)
      if (name.empty() || name[0] == '.' || name.find("..") != std::string::npos ||  // as readers see it
          name.find_first_not_of("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-") !=
              std::string::npos)
        throw Error("'" + name + "' is not a name for a leaf: use letters, digits, _, - and single dots");
    mine = leaves_of(*device_, leaves, list);
  });
  const std::vector<std::string> all = gather_texts(*device_, list.dump());
  together(*device_, job.what, [&] {
    job.leaves = leaves_together(all);
    job.arrays = plan_arrays(job.leaves, device_->size(), device_->tuning().merged_array);
  });
  require_equal_holders(*device_, job.what, job.leaves, mine,
                        "with `rename`, or save each submesh with its own mesh into a folder of its own");
  for (const auto& [name, value] : mine) static_cast<void>(value->data());  // a deferred value may communicate
  together(*device_, job.what, [&] {
    for (const PlannedArray& array : job.arrays)
      for (const PlannedFile& file : array.files) {
        if (file.writer != device_->rank() || array.merged) continue;
        auto& pieces = job.mine.emplace_back(Job::File{file.path, {}}).pieces;
        for (std::size_t i = file.first; i < file.first + file.count; ++i) {
          const auto& value = *mine.at(array.leaves[i]->array.name);
          pieces.push_back({array.leaves[i]->array.name, value.on_host(), value.dtype});
        }
      }
  });
  merge(job, mine);
}

/// Sends the shards of merged arrays to the devices that write them.
SHARDLIB_INLINE void CheckpointWriter::merge(Job& job,
                                             const std::map<std::string, shardlib::detail::ValuePtr>& mine) const {
  const int me = device_->rank();
  const auto devices = static_cast<std::size_t>(device_->size());
  // Calls f(array, leaf, place, from, to, bytes) for each shard, on all devices in the same order.
  const auto each = [&](const auto& f) {
    for (const PlannedArray& array : job.arrays)
      for (std::size_t i = 0; array.merged && i < array.leaves.size(); ++i)
        for (const auto& [place, who] : array.leaves[i]->holders)
          f(array, *array.leaves[i], place, static_cast<std::size_t>(who[array.ordinal % who.size()]),
            static_cast<std::size_t>(array.files[0].writer),
            static_cast<std::size_t>(volume(array.leaves[i]->box(place).second)) * size_of(array.stored.array.dtype));
  };
  std::vector<std::size_t> sizes(devices * devices);
  each([&](const auto&, const auto&, const auto&, std::size_t from, std::size_t to, std::size_t bytes) {
    sizes[from * devices + to] += bytes;
  });
  const std::size_t block = *std::ranges::max_element(sizes);
  if (block == 0) return;
  Pool& pool = *device_->host_pool();
  Buffer send, received;
  together(*device_, job.what, [&] {
    send = pool.allocate(devices * block);
    received = pool.allocate(devices * block);
    std::vector<std::size_t> used(devices);
    each([&](const PlannedArray& array, const LeafShards& leaf, const Index& place, std::size_t from, std::size_t to,
             std::size_t bytes) {
      if (static_cast<int>(from) != me) return;
      const Index box = leaf.box(place).second;
      const Buffer shard = mine.at(leaf.array.name)->on_host();
      copy_box(box, size_of(array.stored.array.dtype), shard.data(), row_major_strides(leaf.shard),
               send.data() + to * block + used[to], row_major_strides(box));
      used[to] += bytes;
    });
    for (std::size_t to = 0; to < devices; ++to) std::memset(send.data() + to * block + used[to], 0, block - used[to]);
  });
  device_->everybody().all_to_all(send, received).wait();
  together(*device_, job.what, [&] {
    std::map<const LeafShards*, Buffer> whole;
    std::vector<std::size_t> used(devices);
    each([&](const PlannedArray& array, const LeafShards& leaf, const Index& place, std::size_t from, std::size_t to,
             std::size_t bytes) {
      if (static_cast<int>(to) != me) return;
      const std::size_t item = size_of(array.stored.array.dtype);
      const auto [it, fresh] = whole.try_emplace(&leaf);
      if (fresh) it->second = pool.allocate(static_cast<std::size_t>(leaf.array.bytes()));
      const auto [offset, box] = leaf.box(place);
      const Index strides = row_major_strides(leaf.array.shape);
      std::size_t at = 0;
      for (std::size_t i = 0; i < offset.size(); ++i) at += static_cast<std::size_t>(offset[i] * strides[i]);
      copy_box(box, item, received.data() + from * block + used[from], row_major_strides(box),
               it->second.data() + at * item, strides);
      used[from] += bytes;
    });
    for (const PlannedArray& array : job.arrays) {
      if (!array.merged || array.files[0].writer != me) continue;
      auto& pieces = job.mine.emplace_back(Job::File{array.files[0].path, {}}).pieces;
      for (const LeafShards* leaf : array.leaves)
        pieces.push_back({leaf->array.name, whole.at(leaf), leaf->array.dtype});
    }
  });
}

SHARDLIB_INLINE void CheckpointWriter::write_metadata_files(Job& job) const {
  job.temporary = temporary_name(directory_ + "/" + checkpoint_name(job.meta.step));
  make_folders(directory_);  // the caller's path may be wrong; what is below it is the writer's own
  on_own_paths([&] {
    make_new_folder(job.temporary);
    sync_path(std::filesystem::path(directory_).parent_path().string());
    std::vector<StoredArray> arrays;
    for (const PlannedArray& array : job.arrays) arrays.push_back(array.stored);
    for (const std::string& path : write_metadata(job.temporary, job.meta, arrays))
      job.written.push_back(describe_file(job.temporary, path));
  });
}

SHARDLIB_INLINE void CheckpointWriter::start(const CheckpointMeta& meta, const NamedValues& leaves, bool background) {
  finish();
  auto job = std::make_unique<Job>();
  job->meta = meta;
  job->finite = finite_;
  job->what = "checkpoint '" + directory_ + "/" + checkpoint_name(meta.step) + "' was not saved";
  const bool first = device_->rank() == 0;
  together(*device_, job->what, [&] {
    if (meta.step < 0) throw UsageError("the step " + std::to_string(meta.step) + " is negative");
    pass("planned");
  });
  plan(*job, leaves);
  // An error removes the folder. All devices agree on the error first, so none writes into the folder any more.
  TemporaryFolder folder(job->temporary);
  if (!first) folder.keep();
  together(*device_, job->what, [&] {
    if (first) write_metadata_files(*job);
    pass("metadata");
  });
  job->temporary = gather_texts(*device_, job->temporary)[0];
  folder.keep();
  if (background) {
    try {
      job->thread = std::thread([this, &job = *job] { job.write(*this); });
    } catch (const std::system_error&) {
      job->write(*this);  // no thread to be had: then now
    }
  } else {
    job->write(*this);
  }
  job_ = std::move(job);
}

SHARDLIB_INLINE void CheckpointWriter::pass(std::string_view phase) const {
  const auto& told = device_->tuning().checkpoint_phase;
  if (told) told(phase, device_->rank());
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
  TemporaryFolder folder(job->temporary);
  if (device_->rank() != 0) folder.keep();
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
    on_own_paths([&] {
      for (const PlannedArray& array : job.arrays) sync_path(job.temporary + "/" + array.stored.array.name);
      write_manifest(job.temporary, std::move(files));
      pass("manifest");
      replace_folder(job.temporary, directory_ + "/" + checkpoint_name(job.meta.step));
      sync_path(directory_);
    });
    pass("renamed");
  });
  // The checkpoint is complete. If LATEST fails, the error says that.
  together(*device_, "checkpoint '" + directory_ + "/" + checkpoint_name(job.meta.step) + "' is saved, but", [&] {
    if (first)
      on_own_paths([&] {
        replace_file(directory_ + "/LATEST", as_bytes(checkpoint_name(job.meta.step) + "\n"), true);
        pass("latest");
        prune_checkpoints(directory_, job.meta.step, keep_);
      });
    pass("pruned");
  });
}

}  // namespace shardlib::io::detail
