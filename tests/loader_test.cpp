// The loader against a brute-force reading of its rules; epochs, resume, meshes; prefetching.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <set>
#include <shardlib/io/data/loader.hpp>
#include <shardlib/io/data/read_ahead.hpp>
#include <shardlib/io/data/token_source.hpp>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "scratch.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;
using io::EncodedToken;
using io::Loader;
using io::LoaderOptions;
using io::MemoryTokens;
using io::Rows;
using io::TokenBatch;
using Documents = std::vector<std::vector<std::uint32_t>>;

namespace {

/// Documents of the given lengths; token i of all has the id 100 + i, so that ids tell places.
Documents numbered(const std::vector<int>& lengths) {
  Documents documents;
  std::uint32_t id = 100;
  for (const int length : lengths) {
    documents.emplace_back();
    for (int i = 0; i < length; ++i) documents.back().push_back(id++);
  }
  return documents;
}

std::shared_ptr<const io::TokenSource> source(const Documents& documents) {
  return std::make_shared<MemoryTokens>("memory", documents);
}

/// Bytes with an end of text of their own.
class MarkedBytes final : public io::Tokenizer {
 public:
  MarkedBytes() : Tokenizer("marked", "marked", 257, 256) {}

 private:
  void append_ids(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    io::ByteTokenizer().encode(text, ids);
  }
  void append_text(std::uint32_t id, std::string& text) const override { text += static_cast<char>(id); }
};

bool alike(const TokenBatch& a, const TokenBatch& b) {
  return a.inputs == b.inputs && a.targets == b.targets && a.segments == b.segments && a.weights == b.weights;
}

void append(TokenBatch& all, const TokenBatch& part) {
  const auto join = [](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); };
  join(all.inputs, part.inputs);
  join(all.targets, part.targets);
  join(all.segments, part.segments);
  join(all.weights, part.weights);
}

TokenBatch row_of(const TokenBatch& batch, std::int64_t row, std::int64_t length) {
  const auto cut = [&](const auto& x) {
    return std::remove_cvref_t<decltype(x)>(x.begin() + row * length, x.begin() + (row + 1) * length);
  };
  return {cut(batch.inputs), cut(batch.targets), cut(batch.segments), cut(batch.weights)};
}

/// The rules of docs/data.md once more, with all tokens in a list and no cleverness.
struct Reference {
  std::vector<std::uint32_t> ids;
  std::vector<bool> starts;
  Documents documents;

  explicit Reference(const Documents& all) {
    for (const auto& document : all) {
      for (std::size_t i = 0; i < document.size(); ++i) {
        ids.push_back(document[i]);
        starts.push_back(i == 0);
      }
      if (!document.empty()) documents.push_back(document);
    }
  }

  /// Tokens from a place on, and whether they begin a document, as a row; -1 is filling.
  [[nodiscard]] static TokenBatch as_row(const std::vector<std::pair<int, bool>>& tokens) {
    TokenBatch row;
    int segment = -1;
    bool filling = false;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
      const auto& [id, starts] = tokens[i];
      if (i == 0 || starts || (id < 0 && !filling)) ++segment;
      filling = id < 0;
      row.inputs.push_back(i == 0 || starts || filling ? 0 : tokens[i - 1].first);
      row.targets.push_back(filling ? 0 : id);
      row.segments.push_back(segment);
      row.weights.push_back(filling ? 0.0F : 1.0F);
    }
    return row;
  }
  /// An unshuffled row; the number of the epoch it belongs to.
  [[nodiscard]] std::pair<TokenBatch, std::int64_t> packed(std::int64_t number, std::int64_t length,
                                                           bool repeat) const {
    const auto n = static_cast<std::int64_t>(ids.size());
    std::vector<std::pair<int, bool>> tokens;
    for (std::int64_t i = number * length; i < (number + 1) * length; ++i) {
      const auto at = static_cast<std::size_t>(i % n);
      tokens.emplace_back(i >= n && !repeat ? -1 : static_cast<int>(ids[at]), starts[at] && (i < n || repeat));
    }
    return {as_row(tokens), number * length / n};
  }
  [[nodiscard]] TokenBatch padded(std::size_t document, std::int64_t length) const {
    std::vector<std::pair<int, bool>> tokens;
    for (std::size_t i = 0; i < static_cast<std::size_t>(length); ++i) {
      const bool inside = document < documents.size() && i < documents[document].size();
      tokens.emplace_back(inside ? static_cast<int>(documents[document][i]) : -1, inside && i == 0);
    }
    return as_row(tokens);
  }
  [[nodiscard]] TokenBatch story(std::size_t document, std::int64_t length) const {
    auto x = documents[document];
    x.resize(static_cast<std::size_t>(length), 0);
    TokenBatch row{{x.begin(), x.end()}, {x.begin() + 1, x.end()}, {}, {}};
    row.targets.push_back(0);
    row.segments.assign(x.size(), 0);
    row.weights.assign(x.size(), 1.0F);
    return row;
  }
};

/// Rows [0, count) of the endless sequence, one after another.
std::vector<TokenBatch> all_rows(const Loader& loader, std::int64_t count) {
  const auto [batch, length] = std::pair(loader.options().batch, loader.options().length);
  std::vector<TokenBatch> rows;
  for (std::int64_t i = 0; i < count; ++i) rows.push_back(row_of(loader.batch(i / batch), i % batch, length));
  return rows;
}

std::vector<Documents> small_data() {
  std::vector<Documents> all;
  for (const auto& lengths : std::vector<std::vector<int>>{{1},
                                                           {2},
                                                           {7},
                                                           {1, 1, 1},
                                                           {3, 5},
                                                           {0, 4, 0, 0, 1, 9, 0},
                                                           {8, 8},
                                                           {2, 1, 4, 1, 3},
                                                           {23},
                                                           {6, 1, 12, 2, 2, 3, 1}})
    all.push_back(numbered(lengths));
  return all;
}

}  // namespace

TEST_CASE("loader: rows in order equal a brute-force reading, over several epochs", "[loader]") {
  int compared = 0;
  for (const Documents& documents : small_data()) {
    const Reference reference(documents);
    const auto tokens = source(documents);
    const auto n = static_cast<std::int64_t>(reference.ids.size()), d = std::ssize(reference.documents);
    for (std::int64_t length = 1; length <= 10; ++length) {
      for (std::int64_t batch = 1; batch <= 4; ++batch) {
        LoaderOptions options{.batch = batch, .length = length, .shuffle = false};
        INFO(n << " tokens, " << d << " documents, rows of " << length << ", batches of " << batch);
        const auto packed = all_rows(Loader(tokens, options), 3 * n / length + 2);
        for (std::size_t i = 0; i < packed.size(); ++i, ++compared)
          REQUIRE(alike(packed[i], reference.packed(static_cast<std::int64_t>(i), length, true).first));

        options.repeat = false;
        const Loader once(tokens, options);
        REQUIRE(once.steps_per_epoch() == (n + batch * length - 1) / (batch * length));
        const auto pass = all_rows(once, once.steps_per_epoch() * batch);
        for (std::size_t i = 0; i < pass.size(); ++i, ++compared)
          REQUIRE(alike(pass[i], reference.packed(static_cast<std::int64_t>(i), length, false).first));

        options.rows = Rows::padded;
        const Loader padded_once(tokens, options);
        REQUIRE(padded_once.steps_per_epoch() == (d + batch - 1) / batch);
        const auto padded_pass = all_rows(padded_once, padded_once.steps_per_epoch() * batch);
        for (std::size_t i = 0; i < padded_pass.size(); ++i, ++compared)
          REQUIRE(alike(padded_pass[i], reference.padded(i, length)));

        options.repeat = true;
        const auto padded = all_rows(Loader(tokens, options), 3 * d + 1);
        options.rows = Rows::stories;
        const auto stories = all_rows(Loader(tokens, options), 3 * d + 1);
        for (std::size_t i = 0; i < padded.size(); ++i, ++compared) {
          REQUIRE(alike(padded[i], reference.padded(i % static_cast<std::size_t>(d), length)));
          REQUIRE(alike(stories[i], reference.story(i % static_cast<std::size_t>(d), length)));
        }
      }
    }
  }
  CHECK(compared > 10000);
}

TEST_CASE("loader: shuffled epochs have the same rows as unshuffled ones, in an order of their own", "[loader]") {
  const auto sorted = [](std::vector<TokenBatch> rows) {
    std::sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) {
      return std::tie(a.targets, a.inputs, a.weights) < std::tie(b.targets, b.inputs, b.weights);
    });
    return rows;
  };
  const auto same = [](const auto& a, const auto& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), alike);
  };
  for (const Documents& documents : small_data()) {
    const Reference reference(documents);
    const auto tokens = source(documents);
    const auto n = static_cast<std::int64_t>(reference.ids.size()), d = std::ssize(reference.documents);
    for (std::int64_t length = 1; length <= 10; ++length) {
      for (const bool repeat : {true, false}) {
        for (const Rows rows : {Rows::packed, Rows::padded, Rows::stories}) {
          const LoaderOptions options{.batch = 1, .length = length, .seed = 5, .rows = rows, .repeat = repeat};
          LoaderOptions in_order = options;
          in_order.shuffle = false;
          const Loader shuffled(tokens, options), plain(tokens, in_order);
          std::int64_t number = 0;
          for (std::int64_t epoch = 0; epoch < (repeat ? 4 : 1); ++epoch) {
            const auto belongs = [&](std::int64_t row) {
              return repeat ? (rows == Rows::packed ? row * length / n : row / d) == epoch
                            : row < plain.steps_per_epoch();
            };
            std::vector<TokenBatch> a, b;
            for (; belongs(number); ++number) {
              a.push_back(shuffled.batch(number));
              b.push_back(plain.batch(number));
            }
            INFO(n << " tokens, rows of " << length << ", kind " << static_cast<int>(rows) << ", epoch " << epoch);
            REQUIRE(same(sorted(a), sorted(b)));
          }
        }
      }
    }
  }

  std::set<std::vector<std::int32_t>> orders;
  const auto thousand = source(numbered(std::vector<int>(1000, 1)));
  for (const std::uint64_t seed : std::vector<std::uint64_t>{0, 1, 2}) {
    const Loader loader(thousand, {.batch = 1000, .length = 1, .seed = seed});
    for (int epoch = 0; epoch < 4; ++epoch) {
      const auto order = loader.batch(epoch).targets;
      orders.insert(order);
      int fixed = 0, neighbors = 0;
      for (std::size_t i = 0; i < order.size(); ++i) {
        fixed += order[i] == static_cast<int>(i) + 100 ? 1 : 0;
        neighbors += i > 0 && std::abs(order[i] - order[i - 1]) == 1 ? 1 : 0;
      }
      // Both numbers are about Poisson: with mean 1 and with mean 2.
      CHECK(fixed < 8);
      CHECK(neighbors < 12);
    }
  }
  CHECK(orders.size() == 12);
}

TEST_CASE("loader: after each epoch every token has come equally often", "[loader]") {
  for (const int n : {1, 2, 3, 7, 16, 29, 64}) {
    for (const int length : {1, 2, 3, 4, 5, 8, 13, 31}) {
      for (const int batch : {1, 2, 3, 5}) {
        const Loader loader(source(numbered({n})), {.batch = batch, .length = length, .seed = 9});
        std::map<int, int> seen;
        std::int64_t number = 0;
        for (int epoch = 0; epoch < 3; ++epoch) {
          for (; number * length < (epoch + 1) * n; ++number)
            for (const int id : row_of(loader.batch(number / batch), number % batch, length).targets) ++seen[id];
          // The last row goes on into the next epoch, whose rows begin where this one ends.
          const auto ahead = static_cast<int>(number * length - (epoch + 1) * n);
          INFO(n << " tokens, rows of " << length << ", batches of " << batch << ", epoch " << epoch);
          REQUIRE(ahead < length);
          for (int i = 0; i < n; ++i) {
            const int again = ahead / n + (i < ahead % n ? 1 : 0);
            REQUIRE(seen[100 + i] == epoch + 1 + again);
          }
        }
      }
    }
  }
}

TEST_CASE("loader: resume in the middle of anything, readers of any number", "[loader]") {
  const Documents documents = numbered({5, 1, 17, 3, 3, 40, 2, 11});
  for (const Rows rows : {Rows::packed, Rows::padded, Rows::stories}) {
    const LoaderOptions options{.batch = 12, .length = 7, .seed = 3, .rows = rows};
    const Loader loader(source(documents), options);
    std::vector<TokenBatch> forward;
    for (int step = 0; step < 40; ++step) forward.push_back(loader.batch(step));
    CHECK(!alike(forward[0], forward[1]));
    const Loader resumed(source(documents), options);
    for (int step = 40; step-- > 0;) {
      for (const int readers : {1, 2, 3, 4, 6, 12}) {
        TokenBatch joined;
        for (int i = 0; i < readers; ++i) append(joined, resumed.rows(step, i * 12 / readers, 12 / readers));
        REQUIRE(alike(joined, forward[static_cast<std::size_t>(step)]));
      }
    }
    CHECK(resumed.identity() == loader.identity());
    CHECK(resumed.rows(3, 5, 0).targets.empty());
  }
  const Loader loader(source(documents), {.batch = 4, .length = 5});
  CHECK(loader.epochs(0) == 0);
  CHECK(loader.epochs(41) == 10);
  CHECK(loader.steps_per_epoch() == 5);
}

TEST_CASE("loader: the identity tells data configurations apart", "[loader]") {
  const Documents documents = numbered({5, 1, 17});
  const LoaderOptions base{.batch = 4, .length = 5, .seed = 1};
  std::vector<LoaderOptions> others(8, base);
  others[1].batch = 5;
  others[2].length = 4;
  others[3].seed = 2;
  others[4].rows = Rows::padded;
  others[5].shuffle = false;
  others[6].repeat = false;
  others[7].begin = 3;
  std::set<std::uint64_t> identities;
  for (const LoaderOptions& options : others) identities.insert(Loader(source(documents), options).identity());
  Documents changed = documents;
  changed[2][9] = 7;
  identities.insert(Loader(source(changed), base).identity());
  identities.insert(Loader(source(numbered({5, 2, 16})), base).identity());
  CHECK(identities.size() == 10);
  // A seed that nothing depends on makes no difference.
  others[3].shuffle = false;
  CHECK(Loader(source(documents), others[3]).identity() == Loader(source(documents), others[5]).identity());
}

TEST_CASE("loader: inputs, targets and segments of a byte text", "[loader]") {
  // Empty documents vanish: at the start, in a row, at the end.
  const Scratch folder;
  const std::string end = "<|endoftext|>";
  const auto text =
      io::read_text_tokens(folder.put("text", end + "abcde" + end + "fg" + end + end + "hijklmno\xff" + end));
  CHECK(text->tokens() == 16);
  CHECK(text->documents() == 3);
  const TokenBatch batch = Loader(text, {.batch = 2, .length = 8, .shuffle = false}).batch(0);
  CHECK(batch.targets == std::vector<std::int32_t>{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h',  //
                                                   'i', 'j', 'k', 'l', 'm', 'n', 'o', 255});
  CHECK(batch.inputs == std::vector<std::int32_t>{0, 'a', 'b', 'c', 'd', 0, 'f', 0,  //
                                                  0, 'i', 'j', 'k', 'l', 'm', 'n', 'o'});
  CHECK(batch.segments == std::vector<std::int32_t>{0, 0, 0, 0, 0, 1, 1, 2, 0, 0, 0, 0, 0, 0, 0, 0});
  CHECK(batch.weights == std::vector<float>(16, 1));
  const TokenBatch begun = Loader(text, {.batch = 2, .length = 8, .shuffle = false, .begin = 7}).batch(0);
  CHECK(begun.inputs == std::vector<std::int32_t>{7, 'a', 'b', 'c', 'd', 7, 'f', 7,  //
                                                  7, 'i', 'j', 'k', 'l', 'm', 'n', 'o'});
  CHECK(begun.targets == batch.targets);
  // A document that starts where a row does is the row's first.
  const auto even = io::read_text_tokens(folder.put("even", "abcd" + end + "efgh"));
  const TokenBatch rows = Loader(even, {.batch = 2, .length = 4, .shuffle = false}).batch(0);
  CHECK(rows.segments == std::vector<std::int32_t>(8, 0));
  CHECK(rows.inputs == std::vector<std::int32_t>{0, 'a', 'b', 'c', 0, 'e', 'f', 'g'});
}

TEST_CASE("loader: seed 000's rows", "[loader]") {
  const Scratch folder;
  const auto stories = io::read_text_tokens(folder.put("text", "ab<|endoftext|>\n\n<|endoftext|>cdefgh<|endoftext|>\n"),
                                            {std::make_shared<MarkedBytes>(), true});
  CHECK(stories->documents() == 2);
  const Loader loader(stories, {.batch = 2, .length = 5, .rows = Rows::stories, .shuffle = false});
  const TokenBatch batch = loader.batch(0);
  CHECK(batch.inputs == std::vector<std::int32_t>{'a', 'b', 256, 0, 0, 'c', 'd', 'e', 'f', 'g'});
  CHECK(batch.targets == std::vector<std::int32_t>{'b', 256, 0, 0, 0, 'd', 'e', 'f', 'g', 0});
  CHECK(batch.segments == std::vector<std::int32_t>(10, 0));
  CHECK(batch.weights == std::vector<float>(10, 1));
}

TEST_CASE("loader: errors", "[loader]") {
  const auto tokens = source(numbered({10}));
  for (const auto& [batch, length] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {0, 1}, {1, 0}, {-1, 4}, {std::int64_t{1} << 31, 2}, {INT64_MAX, INT64_MAX}})
    expect_error<UsageError>([&, b = batch, l = length] { Loader(tokens, {.batch = b, .length = l}); },
                             "a batch of " + std::to_string(batch) + " rows of " + std::to_string(length) +
                                 " tokens: both are at least 1, and their product at most 2^31; check --batch and "
                                 "--seq");
  const Loader loader(tokens, {.batch = 3, .length = 3});
  const auto rows = [&](std::int64_t step, std::int64_t first, std::int64_t count) {
    return [&loader, step, first, count] { static_cast<void>(loader.rows(step, first, count)); };
  };
  expect_error(rows(5, 2, 2), "rows 2 to 4 of step 5 are asked for, but a batch has 3");
  expect_error(rows(5, -1, 2), "rows -1 to 1 of step 5 are asked for, but a batch has 3");
  expect_error(rows(5, 0, -1), "rows 0 to -1 of step 5 are asked for, but a batch has 3");
  expect_error(rows(-1, 0, 1),
               "step -1 is asked for, but 'memory' lasts for steps 0 to " + std::to_string(INT64_MAX / 4 / 9 - 1));
  CHECK(loader.rows(INT64_MAX / 4 / 9 - 1, 0, 3).targets.size() == 9);
  const Loader once(tokens, {.batch = 3, .length = 3, .repeat = false});
  expect_error([&] { static_cast<void>(once.batch(2)); }, "step 2 is asked for, but 'memory' lasts for steps 0 to 1");
  expect_error<UsageError>([&] { Loader(tokens, {.vocabulary = 109}); },
                           "'memory' has token ids up to 109, but the vocabulary has 109 tokens: choose a larger "
                           "vocabulary (--vocabulary of the trainers; that of a loaded model is fixed), or data made "
                           "with the model's tokenizer");
  CHECK(Loader(tokens, {.batch = 2, .length = 5, .vocabulary = 110}).batch(0).targets.size() == 10);
}

TEST_CASE("read-ahead: the same batches in the same order, never too far ahead", "[loader]") {
  const Loader loader(source(numbered({5, 1, 17, 3})), {.batch = 2, .length = 7, .seed = 3});
  for (const std::size_t depth : std::vector<std::size_t>{1, 2, 5}) {
    std::atomic<std::int64_t> made = 0;
    io::ReadAhead ahead(
        [&](std::int64_t step) {
          made = step + 1;
          return loader.batch(step);
        },
        10, depth);
    for (std::int64_t step = 10; step < 60; ++step) {
      CHECK(made <= step + static_cast<std::int64_t>(depth) + 1);
      REQUIRE(alike(ahead.get(step), loader.batch(step)));
    }
    expect_error([&] { static_cast<void>(ahead.get(59)); },
                 "ReadAhead: step 59 is asked for, but step 60 comes next: make a ReadAhead for each step "
                 "that one starts from");
  }
  expect_error<UsageError>([&] { io::ReadAhead([&](std::int64_t s) { return loader.batch(s); }, 0, 0); },
                           "ReadAhead: the depth is at least 1");
}

TEST_CASE("read-ahead: errors come out at their step, and again", "[loader]") {
  const Loader once(source(numbered({20})), {.batch = 2, .length = 4, .repeat = false});
  io::ReadAhead ahead([&](std::int64_t step) { return once.batch(step); }, 0, 8);
  for (int step = 0; step < 3; ++step) CHECK(alike(ahead.get(step), once.batch(step)));
  for (int i = 0; i < 3; ++i)
    expect_error([&] { static_cast<void>(ahead.get(3)); }, "step 3 is asked for, but 'memory' lasts for steps 0 to 2");
}

TEST_CASE("read-ahead: ends in every state", "[loader]") {
  const Loader loader(source(numbered({20})), {.batch = 2, .length = 4});
  for (int i = 0; i < 200; ++i) {
    io::ReadAhead ahead(
        [&](std::int64_t step) {
          if (i % 3 == 2 && step > 1) throw Error("enough");
          return loader.batch(step);
        },
        0, 1 + static_cast<std::size_t>(i % 2));
    for (int step = 0; step < i % 3; ++step) static_cast<void>(ahead.get(step));
  }
  // In the middle of a batch: the destructor waits for it.
  std::atomic<bool> begun = false, ended = false;
  {
    const io::ReadAhead ahead(
        [&](std::int64_t step) {
          begun = true;
          std::this_thread::sleep_for(std::chrono::milliseconds(20));
          ended = true;
          return loader.batch(step);
        },
        0, 1);
    while (!begun) std::this_thread::yield();
  }
  CHECK(ended);
}

TEST_CASE("permutation: a bijection for every size", "[loader]") {
  for (std::int64_t count = 1; count < 300; ++count) {
    for (const std::uint64_t key : std::vector<std::uint64_t>{0, 7}) {
      const io::Permutation order(count, 1, key);
      std::set<std::int64_t> images;
      for (std::int64_t i = 0; i < count; ++i) images.insert(order(i));
      REQUIRE(std::ssize(images) == count);
      REQUIRE(*images.begin() == 0);
      REQUIRE(*images.rbegin() == count - 1);
    }
  }
}
