// zarr's JSON files: .zarray, .zattrs and .zgroup of v2, zarr.json of v3. Heavy (nlohmann/json): for impl/ headers
// only.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "shardlib/io/formats/impl/zarr_codec.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {
namespace detail {

using nlohmann::json;

/// The file's JSON, which must be an object.
inline json read_json(const std::string& path) {
  const Bytes bytes = read_file(path);
  json value;
  try {
    value = parse_json(as_text(bytes));
  } catch (const json::parse_error& e) {
    throw Error("'" + path + "' is not JSON (at byte " + std::to_string(e.byte) + "): it is damaged");
  } catch (const json::out_of_range&) {
    throw Error("'" + path + "' has a number that is too large: it is damaged");
  } catch (const DeepJson& e) {
    throw Error("'" + path + "': " + e.what() + ": it is damaged");
  }
  if (!value.is_object()) throw Error("'" + path + "' holds no JSON object: it is damaged");
  return value;
}
/// Writes a file of an array. One that replaces another is on the disk before it takes its place, so that after a crash
/// of the machine there is one of the two.
inline void put_file(const std::string& path, std::span<const std::byte> bytes) {
  replace_file(path, bytes, file_exists(path));
}
inline void write_json(const std::string& path, const json& value) {
  std::string text;
  try {
    text = value.dump(4) + "\n";
  } catch (const json::type_error&) {
    throw UsageError("cannot write '" + path + "': JSON texts are UTF-8, and one of these is not");
  }
  put_file(path, as_bytes(text));
}
inline json read_attributes(const std::string& folder) {
  const std::string path = folder + "/.zattrs";
  if (const std::string v3 = folder + "/zarr.json"; !file_exists(path) && file_exists(v3)) {
    json attributes = read_json(v3).value("attributes", json::object());
    if (!attributes.is_object()) throw Error("'" + v3 + "': key \"attributes\": must be an object");
    return attributes;
  }
  return file_exists(path) ? read_json(path) : json::object();
}

/// `.zarray` under reading: errors name the file and the key.
class Metadata {
 public:
  explicit Metadata(std::string path) : path_(std::move(path)), json_(read_json(path_)) {}

  [[noreturn]] void fail(const std::string& key, const std::string& why) const {
    throw Error("'" + path_ + "': key \"" + key + "\": " + shardlib::detail::excerpt(why, 400));
  }
  [[nodiscard]] const json& at(const std::string& key) const {
    const auto found = json_.find(key);
    if (found == json_.end()) fail(key, "is missing");
    return *found;
  }
  [[nodiscard]] const json& all() const { return json_; }
  [[nodiscard]] std::string text(const json& in, const std::string& key, const std::string& otherwise) const {
    const auto found = in.find(key);
    if (found == in.end()) return otherwise;
    if (!found->is_string()) fail(key, "must be a text, not " + found->dump());
    return found->get<std::string>();
  }
  [[nodiscard]] int number(const json& in, const std::string& key, int otherwise) const {
    const auto found = in.find(key);
    if (found == in.end()) return otherwise;
    if (!found->is_number_integer()) fail(key, "must be a whole number, not " + found->dump());
    return static_cast<int>(std::clamp<std::int64_t>(found->get<std::int64_t>(), -(1 << 30), 1 << 30));
  }
  [[nodiscard]] Index sizes(const std::string& key, std::int64_t least) const { return sizes(all(), key, least); }
  [[nodiscard]] Index sizes(const json& in, const std::string& key, std::int64_t least) const {
    const auto found = in.find(key);
    if (found == in.end()) fail(key, "is missing");
    const json& list = *found;
    if (!list.is_array()) fail(key, "must be a list of sizes, not " + list.dump());
    Index sizes;
    for (const json& size : list) {
      const bool whole = size.is_number_unsigned() && size.get<std::uint64_t>() < (std::uint64_t{1} << 61);
      if (!whole || size.get<std::int64_t>() < least)
        fail(key, "must be a list of sizes of at least " + std::to_string(least) + ", not " + list.dump());
      sizes.push_back(size.get<std::int64_t>());
    }
    return sizes;
  }

 private:
  std::string path_;
  json json_;
};

/// The bytes of a text "0x7fc00000", of which the first digits are the highest; nothing for others.
inline std::optional<Bytes> hex_bits(const json& value, std::size_t width) {
  const std::string text = value.is_string() ? value.get<std::string>() : "";
  std::uint64_t bits = 0;
  if (!text.starts_with("0x") || text.size() != 2 + 2 * width ||
      !shardlib::detail::parse_number(text.substr(2), bits, 16))
    return std::nullopt;
  Bytes bytes(width);
  std::memcpy(bytes.data(), &bits, width);
  return bytes;
}

/// The element that `.zarray`'s fill_value stands for, in this machine's byte order; empty for null.
inline Bytes fill_bytes(const std::string& text, const ZarrType& type, const std::string& where) {
  const json value = json::parse(text, nullptr, false);
  const auto fail = [&] { throw Error(where + ": key \"fill_value\": " + text + " is not a value of this dtype"); };
  const auto bytes_of = [](auto x) {
    Bytes bytes(sizeof x);
    std::memcpy(bytes.data(), &x, sizeof x);
    return bytes;
  };
  if (value.is_null()) return {};
  if (type.kind == 'f') {
    double x = 0;
    if (value == "NaN")
      x = std::numeric_limits<double>::quiet_NaN();
    else if (value == "Infinity" || value == "-Infinity")
      x = value == "Infinity" ? HUGE_VAL : -HUGE_VAL;
    else if (value.is_number())
      x = value.get<double>();
    else if (auto bits = hex_bits(value, type.bytes))  // v3's other way to say it
      return std::move(*bits);
    else
      fail();
    return type.bytes == 4 ? bytes_of(static_cast<float>(x)) : bytes_of(x);
  }
  if (value.is_boolean() && type.kind == 'b') return bytes_of(static_cast<std::uint8_t>(value.get<bool>() ? 1 : 0));
  std::uint64_t bits = 0;
  bool negative = false;
  if (value.is_number_integer()) {
    negative = !value.is_number_unsigned() && value.get<std::int64_t>() < 0;
    bits = negative ? static_cast<std::uint64_t>(value.get<std::int64_t>()) : value.get<std::uint64_t>();
  } else {
    fail();
  }
  const auto width = static_cast<unsigned>(8 * type.bytes);
  const std::uint64_t most = ~std::uint64_t{0} >> (64 - width + (type.kind == 'i' ? 1 : 0));
  if (negative ? type.kind != 'i' || ~bits > most : bits > (type.kind == 'b' ? 1 : most)) fail();
  Bytes bytes = bytes_of(bits);
  bytes.resize(type.bytes);
  return bytes;
}

inline json to_json(const ZarrInfo& info) {
  json compressor;
  const ZarrCompressor& c = info.compressor;
  if (c.id == "blosc")
    compressor = {
        {"id", c.id}, {"cname", c.codec}, {"clevel", c.level}, {"shuffle", c.shuffle}, {"blocksize", c.block}};
  else if (!c.id.empty())
    compressor = {{"id", c.id}, {"level", c.level}};
  json filters = json::array();
  if (info.delta) filters.push_back({{"id", "delta"}, {"dtype", info.delta->dtype}, {"astype", info.delta->stored}});
  // The checksum is of a file's bytes, so it is the last step: the compressor is the filter before it.
  if (info.checksum && !compressor.is_null()) filters.push_back(std::exchange(compressor, json()));
  if (info.checksum) compressor = {{"id", "crc32"}};
  if (filters.empty()) filters = json();
  json array = {
      {"zarr_format", 2},    {"shape", info.shape},      {"chunks", info.chunks},
      {"dtype", info.dtype}, {"compressor", compressor}, {"fill_value", json::parse(info.fill_value, nullptr, false)},
      {"order", "C"},        {"filters", filters}};
  if (info.separator != ".") array["dimension_separator"] = info.separator;
  return array;
}

inline ZarrInfo read_info(const std::string& path) {
  const Metadata meta(path);
  if (const json& format = meta.at("zarr_format"); format != 2)
    meta.fail("zarr_format", "is " + format.dump() + ", but only version 2 is supported");
  if (const json& order = meta.at("order"); order != "C")
    meta.fail("order", "is " + order.dump() + ", but only C order is supported: rewrite the array with order='C'");
  ZarrInfo info;
  info.shape = meta.sizes("shape", 0);
  info.chunks = meta.sizes("chunks", 1);
  if (!meta.at("dtype").is_string()) meta.fail("dtype", meta.at("dtype").dump() + " is not supported: no records");
  info.dtype = meta.at("dtype").get<std::string>();
  info.fill_value = meta.at("fill_value").dump();
  info.separator = meta.text(meta.all(), "dimension_separator", ".");
  const auto compressor_of = [&](const json& c) -> ZarrCompressor {
    return {meta.text(c, "id", "without a name"), meta.text(c, "cname", "lz4"),
            meta.number(c, "clevel", meta.number(c, "level", 5)), meta.number(c, "shuffle", 1),
            meta.number(c, "blocksize", 0)};
  };
  if (const json& c = meta.at("compressor"); c.is_object()) {
    info.checksum = meta.text(c, "id", "") == "crc32";
    if (!info.checksum) info.compressor = compressor_of(c);
    if (const std::string place = meta.text(c, "location", "start"); info.checksum && place != "start")
      meta.fail("compressor",
                "the location \"" + place + "\" of a crc32 is not supported: \"start\" is; rewrite the array");
  } else if (!c.is_null()) {
    meta.fail("compressor", "must be null or an object, not " + c.dump());
  }
  if (const json& filters = meta.at("filters"); filters.is_array()) {
    for (const json& filter : filters) {
      const std::string id = filter.is_object() ? meta.text(filter, "id", "") : filter.dump();
      if (info.checksum && &filter == &filters.back() &&
          (id == "blosc" || id == "zlib" || id == "gzip" || id == "zstd")) {
        info.compressor = compressor_of(filter);
        continue;
      }
      if (id != "delta" || info.delta)
        meta.fail("filters", "\"" + id + "\" is not supported: at most one \"delta\" is; rewrite the array");
      const std::string dtype = meta.text(filter, "dtype", info.dtype);
      info.delta = ZarrDelta{dtype, meta.text(filter, "astype", dtype)};
    }
  } else if (!filters.is_null()) {
    meta.fail("filters", "must be null or a list, not " + filters.dump());
  }
  return info;
}

// ---- zarr.json: v3 (zarr-specs.readthedocs.io/en/latest/v3/core) ---------------------------------------------------

/// Whether `zarr.json` of a folder, if there is one, is of this kind, "array" or "group".
inline bool is_v3(const std::string& folder, std::string_view kind) {
  const std::string path = folder + "/zarr.json";
  return file_exists(path) && read_json(path).value("node_type", json()) == kind;
}
/// Whether a folder is an array, or a group, of v2 or v3.
inline bool is_zarr_array(const std::string& folder) {
  return file_exists(folder + "/.zarray") || is_v3(folder, "array");
}
inline bool is_zarr_group(const std::string& folder) {
  return file_exists(folder + "/.zgroup") || is_v3(folder, "group");
}

/// An extension of v3 under reading, a codec or a grid: its name, and its configuration, which may be absent.
struct V3Extension {
  std::string name;
  json configuration = json::object();
};
inline V3Extension v3_extension(const Metadata& meta, const std::string& key, const json& value) {
  V3Extension extension;
  if (value.is_string()) {
    extension.name = value.get<std::string>();
    return extension;
  }
  if (!value.is_object()) meta.fail(key, "must be a name or an object, not " + value.dump());
  extension.name = meta.text(value, "name", "");
  if (const auto found = value.find("configuration"); found != value.end()) {
    if (!found->is_object()) meta.fail(key, "has a configuration that is not an object: " + found->dump());
    extension.configuration = *found;
  }
  return extension;
}

/// numpy's name of a v3 data type without its byte order: "f4". Throws UsageError for others.
inline std::string v3_dtype(const Metadata& meta) {
  const json& type = meta.at("data_type");
  static constexpr std::pair<const char*, const char*> names[] = {
      {"bool", "b1"},   {"int8", "i1"},   {"int16", "i2"},  {"int32", "i4"},   {"int64", "i8"},  {"uint8", "u1"},
      {"uint16", "u2"}, {"uint32", "u4"}, {"uint64", "u8"}, {"float32", "f4"}, {"float64", "f8"}};
  for (const auto& [name, code] : names)
    if (type == name) return code;
  meta.fail("data_type", type.dump() +
                             " is not supported: bool, int8 to int64, uint8 to uint64, float32 and float64 "
                             "are; rewrite the array");
}

/// The codecs between elements and bytes, of chunks in files of their own or of those within a shard: "bytes", at most
/// one compressor, and at the end "crc32c". `dtype` comes without its byte order.
inline void read_v3_codecs(const Metadata& meta, const json& codecs, const std::string& dtype, ZarrInfo& info) {
  const auto refuse = [&](const std::string& name, const std::string& why) {
    meta.fail("codecs", "\"" + name + "\" is not supported" + why +
                            ": \"bytes\", then at most one of \"blosc\", \"gzip\", \"zstd\" and "
                            "\"numcodecs.zlib\", then at most one \"crc32c\"; rewrite the array");
  };
  bool first = true;
  for (const json& codec : codecs) {
    const auto [name, configuration] = v3_extension(meta, "codecs", codec);
    if (first != (name == "bytes") || info.crc32c) refuse(name, " at this place");
    if (first) {
      const std::string endian = meta.text(configuration, "endian", dtype[1] == '1' ? "little" : "(missing)");
      if (endian != "little" && endian != "big")
        meta.fail("codecs", "\"bytes\" has the endian \"" + endian + "\", which is neither little nor big");
      info.dtype = (dtype[1] == '1' ? "|" : endian == "big" ? ">" : "<") + dtype;
      first = false;
    } else if (name == "crc32c") {
      info.crc32c = true;
    } else if (!info.compressor.id.empty()) {
      refuse(name, " at this place");
    } else if (name == "blosc" || name == "gzip" || name == "zstd" || name == "numcodecs.zlib") {
      info.compressor.id = name == "numcodecs.zlib" ? "zlib" : name;
    } else {
      refuse(name, "");
    }
  }
  if (first) meta.fail("codecs", "has no \"bytes\"");
}

/// The codec that puts chunks into one file. It contains the codecs of the chunks.
inline void read_v3_sharding(const Metadata& meta, const json& configuration, const std::string& dtype,
                             ZarrInfo& info) {
  ZarrSharding& sharding = info.sharding.emplace();
  sharding.shape = std::exchange(info.chunks, meta.sizes(configuration, "chunk_shape", 1));
  const std::string place = meta.text(configuration, "index_location", "end");
  if (place != "start" && place != "end")
    meta.fail("codecs",
              "\"sharding_indexed\" has the index_location \"" + place + "\", which is neither start nor end");
  sharding.at_start = place == "start";
  ZarrInfo index;
  if (const auto codecs = configuration.find("index_codecs"); codecs == configuration.end() || !codecs->is_array())
    meta.fail("codecs", "\"sharding_indexed\" has no list of index_codecs");
  else
    read_v3_codecs(meta, *codecs, "u8", index);
  if (!index.compressor.id.empty() || index.dtype != "<u8")
    meta.fail("codecs", "an index that is compressed or big-endian is not supported; rewrite the array");
  sharding.checksum = index.crc32c;
  if (const auto codecs = configuration.find("codecs"); codecs == configuration.end() || !codecs->is_array())
    meta.fail("codecs", "\"sharding_indexed\" has no list of codecs");
  else
    read_v3_codecs(meta, *codecs, dtype, info);
}

inline ZarrInfo read_v3_info(const std::string& path) {
  const Metadata meta(path);
  if (const json& format = meta.at("zarr_format"); format != 3)
    meta.fail("zarr_format", "is " + format.dump() + ", but a zarr.json has version 3");
  for (const auto& [key, value] : meta.all().items()) {
    static constexpr std::string_view known[] = {
        "zarr_format", "node_type", "shape",      "data_type",       "chunk_grid",          "chunk_key_encoding",
        "fill_value",  "codecs",    "attributes", "dimension_names", "storage_transformers"};
    const bool ignored = value.is_object() && value.value("must_understand", json()) == false;
    if (std::ranges::find(known, key) == std::end(known) && !ignored)
      meta.fail(key, "is not known, and must be understood: rewrite the array without it");
  }
  if (const auto& all = meta.all();
      all.contains("storage_transformers") && all["storage_transformers"] != json::array())
    meta.fail("storage_transformers", "are not supported; rewrite the array without them");
  ZarrInfo info;
  info.v3 = true;
  info.shape = meta.sizes("shape", 0);
  const V3Extension grid = v3_extension(meta, "chunk_grid", meta.at("chunk_grid"));
  if (grid.name != "regular") meta.fail("chunk_grid", "\"" + grid.name + "\" is not supported: \"regular\" is");
  info.chunks = meta.sizes(grid.configuration, "chunk_shape", 1);
  const V3Extension keys = v3_extension(meta, "chunk_key_encoding", meta.at("chunk_key_encoding"));
  if (keys.name != "default" && keys.name != "v2")
    meta.fail("chunk_key_encoding", "\"" + keys.name + "\" is not supported: \"default\" and \"v2\" are");
  info.prefixed = keys.name == "default";
  info.separator = meta.text(keys.configuration, "separator", info.prefixed ? "/" : ".");
  info.fill_value = meta.at("fill_value").dump();
  const json& codecs = meta.at("codecs");
  if (!codecs.is_array() || codecs.empty()) meta.fail("codecs", "must be a list of codecs, not " + codecs.dump());
  const std::string dtype = v3_dtype(meta);
  const V3Extension outer = v3_extension(meta, "codecs", codecs[0]);
  if (outer.name != "sharding_indexed") {
    read_v3_codecs(meta, codecs, dtype, info);
    return info;
  }
  if (codecs.size() > 1) meta.fail("codecs", "codecs behind \"sharding_indexed\" are not supported; rewrite the array");
  read_v3_sharding(meta, outer.configuration, dtype, info);
  return info;
}

}  // namespace detail

}  // namespace shardlib::io
