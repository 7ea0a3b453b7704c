// tokenizer_ids TOKENIZER: texts from standard input to ids on standard output, for tests/tokenizer_oracle.py.
// A text is its length (uint32) and its bytes; the ids are their number and themselves, uint32 each.
// tokenizer_ids TOKENIZER special: the spellings of special tokens are found. tokenizer_ids TOKENIZER decode: back.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

#include "shardlib/io/tokenizer/tokenizer.hpp"
#include "shardlib/support/error.hpp"

namespace {

template <class List>
bool read(List& list) {
  std::uint32_t size = 0;
  if (std::fread(&size, sizeof(size), 1, stdin) != 1) return false;
  list.resize(size);
  if (std::fread(list.data(), sizeof(list[0]), size, stdin) != size) throw shardlib::UsageError("a text is cut short");
  return true;
}

template <class List>
void write(const List& list) {
  const auto count = static_cast<std::uint32_t>(list.size());
  std::fwrite(&count, sizeof(count), 1, stdout);
  std::fwrite(list.data(), sizeof(list[0]), count, stdout);
}

}  // namespace

int main(int argc, char** argv) try {
  using namespace shardlib;
  const std::string_view mode = argc == 3 ? argv[2] : "";
  if (argc < 2 || argc > 3 || (argc == 3 && mode != "special" && mode != "decode"))
    throw UsageError("usage: tokenizer_ids TOKENIZER [special|decode] <in >out");
  const std::string path = argv[1];
  const auto tokenizer = io::load_tokenizer(path);
  std::string text;
  std::vector<std::uint32_t> ids;
  if (mode == "decode") {
    while (read(ids)) write(tokenizer->decode(ids));
    return 0;
  }
  while (read(text)) {
    ids = tokenizer->encode(text, mode == "special" ? io::Special::allowed : io::Special::as_text);
    // A tokenizer.json may change texts.
    if (!path.ends_with(".json") && tokenizer->decode(ids) != text)
      throw Error("decoding gives another text than was encoded");
    write(ids);
  }
  return 0;
} catch (const shardlib::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
