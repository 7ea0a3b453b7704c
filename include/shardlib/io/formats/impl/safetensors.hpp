// Definitions of safetensors.hpp.
#pragma once

#include "shardlib/io/formats/safetensors.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <bit>
#include <cstring>
#include <exception>
#include <filesystem>
#include <system_error>
#include <tuple>

#include "shardlib/io/impl/json.hpp"
#include "shardlib/support/error.hpp"
#include "shardlib/support/text.hpp"

namespace shardlib::io {
namespace detail {

using shardlib::detail::excerpt;

using nlohmann::json;

inline constexpr std::uint64_t largest_safetensors_header = 100'000'000;  // the reference implementation's

SHARDLIB_INLINE std::size_t safetensors_item(const std::string& dtype) {
  static const std::map<std::string, std::size_t> bytes{{"F64", 8}, {"F32", 4}, {"F16", 2}, {"BF16", 2}, {"I64", 8},
                                                        {"I32", 4}, {"I16", 2}, {"I8", 1},  {"U64", 8},  {"U32", 4},
                                                        {"U16", 2}, {"U8", 1},  {"BOOL", 1}};
  const auto found = bytes.find(dtype);
  return found == bytes.end() ? 0 : found->second;
}

/// Parses the header's JSON. It refuses duplicate names, of which a parser would keep one.
inline json parse_header(const Bytes& text, const std::string& path) {
  std::string twice;
  json header;
  try {
    header = parse_json(as_text(text), twice);
  } catch (const std::exception&) {
    throw Error("'" + path + "': its header is not JSON: it is not a safetensors file, or it is damaged");
  }
  if (!twice.empty()) throw Error("'" + path + "': the header has '" + excerpt(twice) + "' twice");
  if (!header.is_object() || text.front() != std::byte{'{'})
    throw Error("'" + path + "': its header is not a JSON object: it is not a safetensors file, or it is damaged");
  return header;
}

inline SafetensorsEntry parse_entry(const std::string& name, const json& value, const std::string& path) {
  const auto fail = [&](const std::string& why) {
    throw Error("'" + path + "': tensor '" + excerpt(name) + "': " + excerpt(why, 400));
  };
  if (!value.is_object() || value.size() != 3 || !value.contains("dtype") || !value.contains("shape") ||
      !value.contains("data_offsets"))
    fail("its entry must have dtype, shape and data_offsets, and nothing else");
  const auto is_size = [](const json& x) {
    return x.is_number_unsigned() && x.get<std::uint64_t>() < (std::uint64_t{1} << 62);
  };
  SafetensorsEntry entry;
  entry.name = name;
  if (!value["dtype"].is_string()) fail("its dtype must be a text");
  entry.dtype = value["dtype"].get<std::string>();
  const std::size_t item = safetensors_item(entry.dtype);
  if (item == 0) fail("the dtype " + entry.dtype + " is not supported");
  const json &shape = value["shape"], &offsets = value["data_offsets"];
  if (!shape.is_array() || !std::all_of(shape.begin(), shape.end(), is_size)) fail("its shape must be a list of sizes");
  if (!offsets.is_array() || offsets.size() != 2 || !std::all_of(offsets.begin(), offsets.end(), is_size))
    fail("its data_offsets must be two sizes");
  auto strides = static_cast<std::int64_t>(item);  // an empty tensor has some too
  for (const json& size : shape) {
    entry.shape.push_back(size.get<std::int64_t>());
    if (__builtin_mul_overflow(strides, std::max<std::int64_t>(entry.shape.back(), 1), &strides))
      fail("its shape is too large");
  }
  const std::uint64_t bytes = item * static_cast<std::uint64_t>(volume(entry.shape));
  entry.begin = offsets[0].get<std::uint64_t>();
  entry.end = offsets[1].get<std::uint64_t>();
  if (entry.end < entry.begin || entry.end - entry.begin != bytes)
    fail("its data_offsets " + offsets.dump() + " do not hold the " + std::to_string(bytes) + " bytes of " +
         entry.dtype + " " + shape.dump());
  return entry;
}

SHARDLIB_INLINE void to_f32(const std::string& dtype, std::span<const std::byte> in, std::span<float> out,
                            const std::string& where) {
  if (dtype == "F32") {
    if (!in.empty()) std::memcpy(out.data(), in.data(), in.size());
    return;
  }
  if (dtype != "F16" && dtype != "BF16")
    throw UsageError(where + " is of dtype " + dtype + ", but F32, F16 or BF16 is needed");
  const bool half = dtype == "F16";
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::uint16_t bits = 0;
    std::memcpy(&bits, in.data() + 2 * i, 2);
    out[i] = half ? half_to_float(bits) : std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  }
}

SHARDLIB_INLINE Bytes read_strided(const SafetensorsFile& file, const SafetensorsEntry& entry, std::int64_t first,
                                   const Index& strides, const Index& box) {
  const std::size_t item = safetensors_item(entry.dtype);
  Bytes out(static_cast<std::size_t>(volume(box)) * item);
  const std::size_t begin = static_cast<std::size_t>(first) * item;
  const auto read = [&](std::size_t place, std::span<std::byte> bytes) {
    file.read_bytes(entry, begin + place, bytes);
  };
  read_box(box, item, strides, read, out.data(), row_major_strides(box));
  return out;
}

}  // namespace detail

SHARDLIB_INLINE float half_to_float(std::uint16_t half) {
  const auto sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t exponent = (half >> 10) & 0x1fU, fraction = half & 0x3ffU;
  if (exponent == 0x1f) return std::bit_cast<float>(sign | 0x7f800000U | (fraction << 13));
  if (exponent != 0) return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (fraction << 13));
  const float tiny = static_cast<float>(fraction) * 0x1p-24F;  // subnormal
  return sign != 0 ? -tiny : tiny;
}

SHARDLIB_INLINE std::string safetensors_dtype(DType dtype) {
  constexpr const char* names[] = {"F32", "BF16", "F64", "I32", "U32", "U8", "BOOL"};
  return names[static_cast<std::size_t>(dtype)];
}

SHARDLIB_INLINE SafetensorsFile::SafetensorsFile(const std::string& path) : file_(path) {
  const auto fail = [&](const std::string& why) { throw Error("'" + path + "': " + why); };
  std::uint64_t length = 0;
  if (file_.size() < sizeof length) fail("it has less than 8 bytes: it is not a safetensors file, or it is damaged");
  file_.read(0, std::as_writable_bytes(std::span(&length, 1)));
  if (length > detail::largest_safetensors_header || length > file_.size() - sizeof length || length < 2)
    fail("its header would have " + std::to_string(length) + " bytes, of " + std::to_string(file_.size()) +
         " in the file and at most 100 MB: it is not a safetensors file, or it is damaged");
  data_ = sizeof length + length;
  Bytes text(length);
  file_.read(sizeof length, text);
  const detail::json header = detail::parse_header(text, path);
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      entries_.push_back(detail::parse_entry(name, value, path));
      continue;
    }
    if (!value.is_object()) fail("its __metadata__ must be an object of strings");
    for (const auto& [key, about] : value.items()) {
      if (!about.is_string())
        fail("its __metadata__ must be an object of strings, but '" + detail::excerpt(key) + "' is not a string");
      metadata_[key] = about.get<std::string>();
    }
  }
  std::sort(entries_.begin(), entries_.end(), [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  std::uint64_t end = 0;
  for (const SafetensorsEntry& entry : entries_) {
    if (entry.begin != end)
      fail("tensor '" + detail::excerpt(entry.name) + "' begins at byte " + std::to_string(entry.begin) +
           " of the data, but the one " + "before it ends at " + std::to_string(end) + ": the file is damaged");
    end = entry.end;
  }
  if (end != file_.size() - data_)
    fail("its tensors have " + std::to_string(end) + " bytes, but " + std::to_string(file_.size() - data_) +
         " follow the header: the file is damaged");
}

SHARDLIB_INLINE const SafetensorsEntry* SafetensorsFile::find(const std::string& name) const {
  const auto found = std::ranges::find(entries_, name, &SafetensorsEntry::name);
  return found == entries_.end() ? nullptr : &*found;
}

SHARDLIB_INLINE void SafetensorsFile::read_bytes(const SafetensorsEntry& entry, std::uint64_t offset,
                                                 std::span<std::byte> out) const {
  if (offset > entry.end - entry.begin || out.size() > entry.end - entry.begin - offset)
    throw Error("'" + path() + "': tensor '" + entry.name + "': reading outside its bytes");
  file_.read(data_ + entry.begin + offset, out);
}

SHARDLIB_INLINE void SafetensorsFile::read_f32(const SafetensorsEntry& entry, const Index& offset, const Index& shape,
                                               std::span<float> out) const {
  const std::string where = "'" + path() + "': tensor '" + entry.name + "'";
  bool inside = offset.size() == entry.shape.size() && shape.size() == entry.shape.size();
  for (std::size_t i = 0; inside && i < shape.size(); ++i)
    inside = offset[i] >= 0 && shape[i] >= 0 && shape[i] <= entry.shape[i] && offset[i] <= entry.shape[i] - shape[i];
  if (!inside || out.size() != static_cast<std::size_t>(volume(shape)))
    throw Error(where + ": the box to be read lies outside, or does not fit the memory");
  const Index strides = row_major_strides(entry.shape);
  std::int64_t first = 0;
  for (std::size_t i = 0; i < offset.size(); ++i) first += offset[i] * strides[i];
  detail::to_f32(entry.dtype, detail::read_strided(*this, entry, first, strides, shape), out, where);
}

SHARDLIB_INLINE void require_no_other_format(const std::string& path) {
  std::error_code ignored;  // the write says why it fails
  if (!std::filesystem::is_regular_file(path, ignored)) return;
  const InputFile file(path);
  if (file.size() == 0) return;
  std::uint64_t header = 0;
  std::byte brace{};
  if (file.size() > sizeof header) {
    file.read(0, std::as_writable_bytes(std::span(&header, 1)));
    file.read(sizeof header, std::span(&brace, 1));
  }
  if (brace != std::byte{'{'} || header > detail::largest_safetensors_header)
    throw UsageError("cannot write '" + path +
                     "': the file is not a safetensors file, and its contents would be lost; choose another path, or "
                     "move it away");
}

SHARDLIB_INLINE void write_safetensors(const std::string& path, std::vector<SafetensorsTensor> tensors,
                                       const std::map<std::string, std::string>& metadata) {
  const auto fail = [&](const std::string& name, const std::string& why) {
    throw Error("cannot write '" + path + "': tensor '" + name + "' " + why);
  };
  // As the reference implementation does: wide elements first, so that all are at multiples of their size.
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    const std::size_t wide = detail::safetensors_item(a.dtype), other = detail::safetensors_item(b.dtype);
    return wide != other ? wide > other : a.name < b.name;
  });
  detail::json header = detail::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::uint64_t end = 0;
  std::vector<std::uint64_t> sizes;
  for (const SafetensorsTensor& tensor : tensors) {
    if (detail::safetensors_item(tensor.dtype) == 0) fail(tensor.name, "has the unknown dtype " + tensor.dtype);
    if (tensor.name == "__metadata__" || header.contains(tensor.name)) fail(tensor.name, "has a name that is taken");
    sizes.push_back(static_cast<std::uint64_t>(volume(tensor.shape)) * detail::safetensors_item(tensor.dtype));
    header[tensor.name] = {
        {"dtype", tensor.dtype}, {"shape", tensor.shape}, {"data_offsets", {end, end + sizes.back()}}};
    end += sizes.back();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const detail::json::type_error&) {
    throw UsageError("cannot write '" + path + "': names and metadata are UTF-8, and one of these is not");
  }
  text.append((8 - text.size() % 8) % 8, ' ');
  if (text.size() > detail::largest_safetensors_header) throw Error("cannot write '" + path + "': too many tensors");
  const std::uint64_t length = text.size();
  require_no_other_format(path);
  remove_stale_temporaries(std::filesystem::path(path).parent_path().string());
  OutputFile file(path);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(as_bytes(text));
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const Bytes bytes = tensors[i].bytes();
    if (bytes.size() != sizes[i])
      fail(tensors[i].name, "has " + std::to_string(bytes.size()) + " bytes instead of " + std::to_string(sizes[i]));
    file.write(bytes);
  }
  file.commit(true);
}

}  // namespace shardlib::io
