// tokenizer TOKENIZER FILE...: megabytes of text a second that one core encodes (the best of five runs), and how many
// bytes a token has. For instance: tokenizer build/data/r50k_base.tiktoken build/data/kjv.txt
#include <fmt/format.h>
#include <shardlib/support/error.hpp>
#include <shardlib/io/file.hpp>
#include <shardlib/io/tokenizer/tokenizer.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <vector>

using namespace shardlib;
using Clock = std::chrono::steady_clock;

int main(int argc, char** argv) try {
  if (argc < 3) throw UsageError("usage: tokenizer TOKENIZER FILE...");
  auto begin = Clock::now();
  const auto seconds = [&] { return std::chrono::duration<double>(Clock::now() - begin).count(); };
  const auto tokenizer = io::load_tokenizer(argv[1]);
  fmt::print("{}: loaded in {:.0f} ms\n", tokenizer->name(), 1e3 * seconds());
  for (int i = 2; i < argc; ++i) {
    const io::Bytes text = io::read_file(argv[i]);
    std::vector<std::uint32_t> ids;
    double best = 1e9;
    for (int run = 0; run < 5; ++run) {
      ids.clear();
      begin = Clock::now();
      tokenizer->encode(io::as_text(text), ids);
      best = std::min(best, seconds());
    }
    const auto bytes = static_cast<double>(text.size());
    fmt::print("{}: {:.1f} MB/s, {:.2f} bytes a token\n", argv[i], bytes / 1e6 / best,
               bytes / static_cast<double>(ids.size()));
  }
  return 0;
} catch (const Error& error) {
  fmt::print(stderr, "error: {}\n", error.what());
  return 2;
}
