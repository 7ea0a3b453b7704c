// tokenizer_ids TOKENIZER: texts from standard input to ids on standard output, for tests/tokenizer_oracle.py.
// A text is its length (uint32) and its bytes; the ids are their number and themselves, uint32 each.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "shardlib/support/error.hpp"
#include "shardlib/io/tokenizer/tokenizer.hpp"

int main(int argc, char** argv) try {
  if (argc != 2) throw shardlib::UsageError("usage: tokenizer_ids TOKENIZER <texts >ids");
  const auto tokenizer = shardlib::io::load_tokenizer(argv[1]);
  std::uint32_t size = 0;
  while (std::fread(&size, sizeof(size), 1, stdin) == 1) {
    std::string text(size, '\0');
    if (std::fread(text.data(), 1, size, stdin) != size) throw shardlib::UsageError("a text is cut short");
    const std::vector<std::uint32_t> ids = tokenizer->encode(text);
    if (tokenizer->decode(ids) != text) throw shardlib::Error("decoding gives another text than was encoded");
    const auto count = static_cast<std::uint32_t>(ids.size());
    std::fwrite(&count, sizeof(count), 1, stdout);
    std::fwrite(ids.data(), sizeof(count), count, stdout);
  }
  return 0;
} catch (const shardlib::Error& error) {
  std::fprintf(stderr, "error: %s\n", error.what());
  return 1;
}
