// zarr's JSON files: .zarray, .zattrs and .zgroup. Heavy (nlohmann/json): for impl/ headers only.
#pragma once

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <utility>

#include "shardlib/io/formats/zarr_codec.hpp"
#include "shardlib/io/formats/zarr_info.hpp"
#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/excerpt.hpp"

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
inline void write_json(const std::string& path, const json& value) {
  std::string text;
  try {
    text = value.dump(4) + "\n";
  } catch (const json::type_error&) {
    throw UsageError("cannot write '" + path + "': JSON texts are UTF-8, and one of these is not");
  }
  replace_file(path, as_bytes(text));
}
inline json read_attributes(const std::string& folder) {
  const std::string path = folder + "/.zattrs";
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
  [[nodiscard]] Index sizes(const std::string& key, std::int64_t least) const {
    const json& list = at(key);
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

inline std::string joined(const Index& values, const std::string& separator) {
  std::string text;
  for (const auto value : values) text += (text.empty() ? "" : separator) + std::to_string(value);
  return text;
}
inline std::string show(const Index& shape) {
  return "[" + joined(shape, ", ") + "]";
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
      if (info.checksum && &filter == &filters.back() && (id == "blosc" || id == "zlib" || id == "gzip")) {
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

}  // namespace detail

}  // namespace shardlib::io
