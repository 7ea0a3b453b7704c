// safetensors files (github.com/huggingface/safetensors): strict reading, and writing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "shardlib/io/box.hpp"
#include "shardlib/io/file.hpp"
#include "shardlib/spec/dtype.hpp"
#include "shardlib/support/inline.hpp"

namespace shardlib::io {

/// One tensor of a file: its name, dtype and shape, and where its bytes are. These are row-major and little-endian.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;  ///< F64 F32 F16 BF16 I64 I32 I16 I8 U64 U32 U16 U8 BOOL
  Index shape;
  std::uint64_t begin = 0, end = 0;  ///< its bytes, counted from the end of the header
};

/// A safetensors file open for reading, and its `path`; reads are thread-safe.
class SafetensorsFile {
 public:
  /// Reads and checks the header. Throws UsageError where there is no file, Error where the header is wrong: more than
  /// 100 MB, no JSON, a name twice, offsets that leave gaps or overlap, sizes that do not fit shape and dtype.
  explicit SafetensorsFile(const std::string& path);

  [[nodiscard]] const std::string& path() const { return file_.path(); }
  /// The tensors in the order of their bytes.
  [[nodiscard]] const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  /// The free texts of the header's "__metadata__".
  [[nodiscard]] const std::map<std::string, std::string>& metadata() const { return metadata_; }
  /// Null if there is no such tensor.
  [[nodiscard]] const SafetensorsEntry* find(const std::string& name) const;

  /// Fills `out` with a tensor's bytes from the `offset`th on.
  void read_bytes(const SafetensorsEntry& entry, std::uint64_t offset, std::span<std::byte> out) const;
  /// The hyper-rectangle of `shape` at `offset` of an F32, F16 or BF16 tensor, as f32, row-major.
  void read_f32(const SafetensorsEntry& entry, const Index& offset, const Index& shape, std::span<float> out) const;

 private:
  InputFile file_;
  std::uint64_t data_ = 0;  ///< where the header ends
  std::vector<SafetensorsEntry> entries_;
  std::map<std::string, std::string> metadata_;
};

/// A tensor to write: its name, dtype and shape, and a function that gives its bytes.
struct SafetensorsTensor {
  std::string name;
  std::string dtype;
  Index shape;
  std::function<Bytes()> bytes;  ///< called when it is its turn, so that one tensor at a time is in memory
};
/// Throws UsageError if the path has a file of another format, whose contents would be lost. An empty file has none.
/// `require_no_other_format("logits.safetensors")`
void require_no_other_format(const std::string& path);
/// Writes the file and flushes it to disk; an existing file of this format is replaced atomically. Names must differ,
/// and bytes must fit dtype and shape. Throws UsageError if the path has a folder, a device or a file of another
/// format. `write_safetensors("model.safetensors",
/// {{"w", "F32", {2, 3}, bytes_of_w}})`
void write_safetensors(const std::string& path, std::vector<SafetensorsTensor> tensors,
                       const std::map<std::string, std::string>& metadata = {});

/// The name of a dtype in safetensors files: "F32" for DType::f32.
[[nodiscard]] std::string safetensors_dtype(DType dtype);
/// IEEE half precision to single; exact.
[[nodiscard]] float half_to_float(std::uint16_t half);

namespace detail {

/// Bytes of one element; 0 for a dtype that is not known.
[[nodiscard]] std::size_t safetensors_item(const std::string& dtype);
/// F32, F16 or BF16 elements as f32; throws UsageError, beginning with `where`, for others.
void to_f32(const std::string& dtype, std::span<const std::byte> in, std::span<float> out, const std::string& where);
/// Reads a box whose elements are at `first` + place * strides of the stored tensor into `out`, row-major in the box's
/// own dims; in the stored dtype.
[[nodiscard]] Bytes read_strided(const SafetensorsFile& file, const SafetensorsEntry& entry, std::int64_t first,
                                 const Index& strides, const Index& box);

}  // namespace detail
}  // namespace shardlib::io

#ifndef SHARDLIB_COMPILED
#include "shardlib/io/formats/impl/safetensors.hpp"
#endif
