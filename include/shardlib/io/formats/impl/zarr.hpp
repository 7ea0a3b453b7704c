// Definitions of zarr.hpp.
#pragma once

#include "shardlib/io/formats/zarr.hpp"

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "shardlib/io/formats/impl/zarr_array.hpp"
#include "shardlib/io/formats/impl/zarr_codec.hpp"
#include "shardlib/io/formats/impl/zarr_json.hpp"
#include "shardlib/support/error.hpp"

namespace shardlib::io {

SHARDLIB_INLINE ZarrArray ZarrArray::open(const std::string& path, ZarrOpen options) {
  const std::string file = path + "/.zarray";
  if (!file_exists(file) && detail::is_v3(path, "array"))
    return ZarrArray(std::make_shared<Impl>(path, detail::read_v3_info(path + "/zarr.json"), options, false));
  if (!file_exists(file))
    throw UsageError("'" + path + "' is not a zarr array: " +
                     (file_exists(path + "/zarr.json") ? "its zarr.json is not that of an array"
                      : file_exists(path + "/.zgroup") ? "it is a group"
                      : file_exists(path)              ? "it has no .zarray"
                                                       : "there is no such folder"));
  return ZarrArray(std::make_shared<Impl>(path, detail::read_info(file), options, false));
}

SHARDLIB_INLINE ZarrArray ZarrArray::create(const std::string& path, const ZarrInfo& info) {
  auto impl = std::make_shared<Impl>(path, info, ZarrOpen{}, true);
  if (file_exists(path + "/.zarray"))
    throw UsageError("'" + path + "' already is a zarr array: remove it first, or write elsewhere");
  make_folders(path);
  detail::write_json(path + "/.zarray", detail::to_json(info));
  return ZarrArray(std::move(impl));
}

SHARDLIB_INLINE const std::string& ZarrArray::path() const {
  return impl_->path;
}
SHARDLIB_INLINE const ZarrInfo& ZarrArray::info() const {
  return impl_->info;
}
SHARDLIB_INLINE std::size_t ZarrArray::item_bytes() const {
  return impl_->type.bytes;
}
SHARDLIB_INLINE std::int64_t ZarrArray::size() const {
  return volume(impl_->info.shape);
}
SHARDLIB_INLINE std::int64_t ZarrArray::chunk_size() const {
  return volume(impl_->info.chunks);
}
SHARDLIB_INLINE Index ZarrArray::grid() const {
  Index grid;
  for (std::size_t i = 0; i < info().shape.size(); ++i)
    grid.push_back((info().shape[i] + info().chunks[i] - 1) / info().chunks[i]);
  return grid;
}
SHARDLIB_INLINE std::string ZarrArray::chunk_key(const Index& chunk) const {
  if (chunk.empty()) return info().prefixed ? "c" : "0";
  const std::string prefix = info().prefixed ? "c" + info().separator : "";
  if (!info().sharding) return prefix + detail::joined(chunk, info().separator);
  Index shard = chunk;
  const Index counts = detail::chunks_of_shard(info());
  for (std::size_t i = 0; i < std::min(shard.size(), counts.size()); ++i) shard[i] /= counts[i];
  return prefix + detail::joined(shard, info().separator);
}

SHARDLIB_INLINE void ZarrArray::check_type(const std::string& dtype) const {
  if (info().dtype.substr(1) != dtype.substr(1))
    throw Error("zarr array '" + path() + "' holds \"" + info().dtype + "\", but \"" + dtype + "\" is asked for");
}

/// The element that a chunk without a file consists of.
SHARDLIB_INLINE const Bytes& ZarrArray::fill_of(const Index& chunk) const {
  const std::string where = impl_->where(*this, chunk) + " is missing";
  if (impl_->options.missing_is_error) throw Error(where);
  if (impl_->fill.empty()) throw Error(where + ", and the array has no fill_value to stand for it");
  return impl_->fill;
}

/// Decoded elements of a chunk that begin with number `first`; null for a chunk without a file.
struct ZarrArray::Piece {
  std::shared_ptr<const Bytes> values;
  std::size_t first = 0;
};

/// The whole chunk, or where less will do and its blocks can be decoded alone, the block that has `element`.
SHARDLIB_INLINE ZarrArray::Piece ZarrArray::cached(const Index& chunk, bool whole, std::size_t element) const {
  Impl& s = *impl_;
  const auto all = static_cast<std::size_t>(chunk_size());
  if (!whole && s.block == Impl::unknown) {
    if (const auto stored = s.stored(*this, chunk)) {
      s.verify(*this, chunk[0], *stored);  // before its header is believed
      s.block = detail::block_elements(info(), *stored);
    }
  }
  const std::size_t block = s.block;
  whole = whole || block == 0 || block >= all;
  const std::size_t first = whole ? 0 : element / block * block;
  const detail::DecodedCache::Key place{chunk, whole ? all : first};  // no block begins at `all`
  if (auto values = s.cache.find(place)) return {values, first};
  const auto stored = s.stored(*this, chunk);
  if (!stored) return {};
  const auto part = [&] {
    s.verify(*this, chunk[0], *stored);
    return detail::decode_part(info(), *stored, all, first, std::min(block, all - first), s.where(*this, chunk));
  };
  auto values = std::make_shared<const Bytes>(
      whole ? detail::decode_chunk(info(), stored->read_all(), all, s.where(*this, chunk)) : part());
  s.cache.keep(place, values, s.options.cache_bytes);
  return {values, first};
}

SHARDLIB_INLINE void ZarrArray::read_bytes(const Index& offset, const Index& shape, std::span<std::byte> out) const {
  const std::size_t rank = info().shape.size();
  const auto fail = [&](const std::string& why) {
    throw Error("zarr array '" + path() + "': reading " + detail::show_shape(shape) + " at " +
                detail::show_shape(offset) + " of " + detail::show_shape(info().shape) + ": " + why);
  };
  if (offset.size() != rank || shape.size() != rank) fail("the number of dims differs");
  for (std::size_t i = 0; i < rank; ++i)
    if (offset[i] < 0 || shape[i] < 0 || shape[i] > info().shape[i] || offset[i] > info().shape[i] - shape[i])
      fail("it reaches outside");
  const auto item = item_bytes();
  if (out.size() != static_cast<std::size_t>(volume(shape)) * item)
    fail("the memory has " + std::to_string(out.size()) + " bytes instead of " +
         std::to_string(static_cast<std::size_t>(volume(shape)) * item));
  if (out.empty()) return;

  const Index chunk_strides = row_major_strides(info().chunks), out_strides = row_major_strides(shape);
  Index first(rank), count(rank), place(rank, 0);
  for (std::size_t i = 0; i < rank; ++i) {
    first[i] = offset[i] / info().chunks[i];
    count[i] = (offset[i] + shape[i] - 1) / info().chunks[i] - first[i] + 1;
  }
  do {
    Index chunk(rank), box(rank);
    std::int64_t from = 0, to = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      chunk[i] = first[i] + place[i];
      const std::int64_t begin = chunk[i] * info().chunks[i];
      const std::int64_t low = std::max(begin, offset[i]);
      box[i] = std::min(begin + info().chunks[i], offset[i] + shape[i]) - low;
      from += (low - begin) * chunk_strides[i];
      to += (low - offset[i]) * out_strides[i];
    }
    copy_from_chunk(chunk, box, chunk_strides, static_cast<std::size_t>(from) * item, out_strides,
                    out.data() + static_cast<std::size_t>(to) * item);
  } while (next_place(place, count));
}

/// Copies a box that begins `from` bytes into the chunk to `to`.
SHARDLIB_INLINE void ZarrArray::copy_from_chunk(const Index& chunk, const Index& box, const Index& chunk_strides,
                                                std::size_t from, const Index& out_strides, std::byte* to) const {
  const std::size_t item = item_bytes();
  if (!detail::is_raw(info())) {
    // One block after the other, where the box is a part of a chunk of one dim: else all of the chunk.
    const auto all = static_cast<std::size_t>(chunk_size());
    const std::size_t begin = from / item, end = begin + static_cast<std::size_t>(volume(box));
    const bool whole = box.size() != 1 || 2 * (end - begin) >= all;
    Piece piece = cached(chunk, whole, begin);
    if (whole && piece.values) return copy_box(box, item, piece.values->data() + from, chunk_strides, to, out_strides);
    for (std::size_t done = begin; piece.values;) {
      const std::size_t last = std::min(end, piece.first + piece.values->size() / item);
      std::memcpy(to + (done - begin) * item, piece.values->data() + (done - piece.first) * item, (last - done) * item);
      if (last == end) return;
      piece = cached(chunk, false, done = last);
    }
  } else if (const auto input = impl_->stored(*this, chunk)) {
    // There is nothing to decode, so only the requested bytes are read.
    const auto expected = static_cast<std::uint64_t>(chunk_size()) * item;
    if (input->size() != expected)
      throw Error(impl_->where(*this, chunk) + ": it has " + std::to_string(input->size()) + " bytes instead of " +
                  std::to_string(expected) + ": it is damaged");
    const auto read = [&](std::size_t place, std::span<std::byte> bytes) { input->read(from + place, bytes); };
    return read_box(box, item, chunk_strides, read, to, out_strides);
  }
  const Bytes& fill = fill_of(chunk);
  for_each_run(box, chunk_strides, out_strides, [&](std::int64_t, std::int64_t b, std::int64_t n) {
    for (std::int64_t i = b; i < b + n; ++i) std::memcpy(to + static_cast<std::size_t>(i) * item, fill.data(), item);
  });
}

SHARDLIB_INLINE void ZarrArray::write_chunk_bytes(const Index& chunk, std::span<const std::byte> values) const {
  impl_->must_be_v2();
  const std::string key = chunk_key(chunk);
  const std::size_t item = item_bytes(), rank = info().shape.size();
  const std::size_t whole = static_cast<std::size_t>(chunk_size()) * item;
  Index inside(rank);
  const Index last = grid();
  for (std::size_t i = 0; i < rank; ++i) {
    if (chunk.size() != rank || chunk[i] < 0 || chunk[i] >= last[i])
      throw Error(impl_->where(key) + " is outside the grid " + detail::show_shape(last));
    inside[i] = std::min(info().chunks[i], info().shape[i] - chunk[i] * info().chunks[i]);
  }
  Bytes padded;
  if (values.size() != whole) {
    if (values.size() != static_cast<std::size_t>(volume(inside)) * item)
      throw Error(impl_->where(key) + ": it has " + std::to_string(whole) + " bytes, but " +
                  std::to_string(values.size()) + " were given");
    padded.resize(whole);
    for (std::size_t i = 0; !impl_->fill.empty() && i < whole; ++i) padded[i] = impl_->fill[i % item];
    copy_box(inside, item, values.data(), row_major_strides(inside), padded.data(), row_major_strides(info().chunks));
    values = padded;
  }
  const std::string file = path() + "/" + key;
  if (info().separator == "/") make_folders(std::filesystem::path(file).parent_path().string());
  if (detail::is_raw(info())) return detail::put_file(file, values);
  detail::put_file(file, detail::encode_chunk(info(), values, impl_->where(key)));
}

SHARDLIB_INLINE void ZarrArray::write_all_bytes(std::span<const std::byte> values) const {
  const std::size_t item = item_bytes(), rank = info().shape.size();
  if (values.size() != static_cast<std::size_t>(size()) * item)
    throw Error("zarr array '" + path() + "' has " + std::to_string(static_cast<std::size_t>(size()) * item) +
                " bytes, but " + std::to_string(values.size()) + " were given");
  if (values.empty()) return;
  const Index strides = row_major_strides(info().shape), last = grid();
  Index chunk(rank, 0);
  do {
    Index box(rank);
    std::int64_t from = 0;
    for (std::size_t i = 0; i < rank; ++i) {
      box[i] = std::min(info().chunks[i], info().shape[i] - chunk[i] * info().chunks[i]);
      from += chunk[i] * info().chunks[i] * strides[i];
    }
    Bytes piece(static_cast<std::size_t>(volume(box)) * item);
    copy_box(box, item, values.data() + static_cast<std::size_t>(from) * item, strides, piece.data(),
             row_major_strides(box));
    write_chunk_bytes(chunk, piece);
  } while (next_place(chunk, last));
}

SHARDLIB_INLINE void ZarrArray::resize(const Index& shape) {
  ZarrInfo changed = info();
  changed.shape = shape;
  auto impl = std::make_shared<Impl>(path(), changed, impl_->options, true);
  detail::write_json(path() + "/.zarray", detail::to_json(changed));
  impl_ = std::move(impl);
}

SHARDLIB_INLINE nlohmann::json ZarrArray::attributes() const {
  return detail::read_attributes(path());
}
SHARDLIB_INLINE void ZarrArray::set_attributes(const nlohmann::json& attributes) const {
  impl_->must_be_v2();
  detail::write_json(path() + "/.zattrs", attributes);
}

SHARDLIB_INLINE ZarrGroup ZarrGroup::open(const std::string& path) {
  const std::string file = path + "/.zgroup";
  if (!file_exists(file) && detail::is_v3(path, "group")) return ZarrGroup(path);
  if (!file_exists(file))
    throw UsageError("'" + path + "' is not a zarr group: " +
                     (file_exists(path + "/zarr.json") ? "its zarr.json is not that of a group"
                      : file_exists(path + "/.zarray") ? "it is an array"
                      : file_exists(path)              ? "it has no .zgroup"
                                                       : "there is no such folder"));
  const detail::Metadata meta(file);
  if (const auto& format = meta.at("zarr_format"); format != 2)
    meta.fail("zarr_format", "is " + format.dump() + ", but only version 2 is supported");
  return ZarrGroup(path);
}
SHARDLIB_INLINE ZarrGroup ZarrGroup::create(const std::string& path) {
  if (file_exists(path + "/.zgroup")) return open(path);
  if (file_exists(path + "/.zarray")) throw UsageError("'" + path + "' is a zarr array: no group can be created there");
  if (file_exists(path + "/zarr.json"))
    throw UsageError("'" + path + "' is of zarr version 3, which is read only: write elsewhere");
  make_folders(path);
  detail::write_json(path + "/.zgroup", {{"zarr_format", 2}});
  return ZarrGroup(path);
}

SHARDLIB_INLINE std::vector<std::string> ZarrGroup::arrays() const {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator it(path_, error), end; !error && it != end; it.increment(error))
    if (detail::is_zarr_array(it->path().string())) names.push_back(it->path().filename().string());
  if (error) throw Error("cannot list the folder '" + path_ + "': " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}
SHARDLIB_INLINE bool ZarrGroup::has_array(const std::string& name) const {
  return detail::is_zarr_array(path_ + "/" + name);
}
SHARDLIB_INLINE ZarrArray ZarrGroup::array(const std::string& name, ZarrOpen options) const {
  return ZarrArray::open(path_ + "/" + name, options);
}
SHARDLIB_INLINE nlohmann::json ZarrGroup::attributes() const {
  return detail::read_attributes(path_);
}
SHARDLIB_INLINE void ZarrGroup::set_attributes(const nlohmann::json& attributes) const {
  if (!file_exists(path_ + "/.zgroup"))
    throw UsageError("zarr group '" + path_ + "' is of version 3, which is read only: write version 2");
  detail::write_json(path_ + "/.zattrs", attributes);
}
SHARDLIB_INLINE std::int64_t ZarrGroup::integer_attribute(const std::string& name) const {
  const nlohmann::json all = attributes();
  const auto found = all.find(name);
  if (found == all.end()) throw Error("zarr group '" + path_ + "': its .zattrs has no \"" + name + "\"");
  if (!found->is_number_integer())
    throw Error("zarr group '" + path_ + "': .zattrs: \"" + name + "\" must be a whole number, not " + found->dump());
  return found->get<std::int64_t>();
}

}  // namespace shardlib::io
