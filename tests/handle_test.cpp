// detail::Handle: what it counts, and when what it points to goes.
#include "catch.hpp"

#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardlib/support/handle.hpp"

using namespace shardlib::detail;

namespace {

struct Thing : Counted {
  int number;
  int* gone;
  Thing(int n, int* g) : number(n), gone(g) {
    if (n < 0) throw std::invalid_argument("a negative number");
  }
  ~Thing() override { ++*gone; }
};
struct Other : Counted {};

static_assert(std::is_convertible_v<Handle<Thing>, Handle<const Thing>>);
static_assert(!std::is_convertible_v<Handle<const Thing>, Handle<Thing>>);
static_assert(!std::is_convertible_v<Handle<Other>, Handle<Thing>>);
static_assert(std::is_nothrow_move_constructible_v<Handle<Thing>> &&
              std::is_nothrow_copy_constructible_v<Handle<Thing>>);

}  // namespace

TEST_CASE("handle: counts its copies, and the last one takes the thing along") {
  int gone = 0;
  auto a = Handle<Thing>::make(7, &gone);
  CHECK(a.use_count() == 1);
  {
    const Handle<const Thing> b = a;  // of another type, the same thing
    CHECK(b == a);
    CHECK(b->number == 7);
    CHECK(a.use_count() == 2);
  }
  CHECK(a.use_count() == 1);
  auto c = std::move(a);
  CHECK(a == nullptr);  // NOLINT(bugprone-use-after-move): that is what is tested
  CHECK(a.use_count() == 0);
  CHECK(c.use_count() == 1);
  auto& same = c;
  c = same;
  CHECK(c.use_count() == 1);
  c = std::move(same);
  CHECK(c);
  CHECK(c.use_count() == 1);
  CHECK(gone == 0);
  c = Handle<Thing>::make(8, &gone);
  CHECK(gone == 1);
  CHECK(c->number == 8);
  c = nullptr;
  CHECK(gone == 2);
  CHECK_FALSE(c);
}

TEST_CASE("handle: a copy of what is counted has a count of its own") {
  int gone = 0;
  {
    const auto a = Handle<Thing>::make(7, &gone);
    const auto more = a;  // NOLINT(performance-unnecessary-copy-initialization): to be counted
    const auto b = Handle<Thing>::make(*a);
    CHECK(b.use_count() == 1);
    CHECK_FALSE(b == a);
    Thing plain(1, &gone);
    plain = *a;
    CHECK(a.use_count() == 2);
    CHECK(plain.number == 7);
  }
  CHECK(gone == 3);
  CHECK_THROWS_AS(Handle<Thing>::make(-1, &gone), std::invalid_argument);
}

TEST_CASE("handle: threads may share the thing") {
  int gone = 0;
  {
    const auto thing = Handle<Thing>::make(0, &gone);
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t)
      threads.emplace_back([mine = thing] {
        for (int i = 0; i < 10000; ++i) {
          const Handle<const Thing> copy = mine;
          static_cast<void>(copy);
        }
      });
    for (auto& thread : threads) thread.join();
    CHECK(thing.use_count() == 1);
  }
  CHECK(gone == 1);
}
