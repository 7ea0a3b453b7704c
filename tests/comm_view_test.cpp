// all_gather as a view: peers' pages side by side, which nobody writes while somebody reads them.
#if defined(SHARDLIB_WITH_MPI)
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "shardlib/comm/shm/view.hpp"
#include "shardlib/shardlib.hpp"
#include "shm_nodes.hpp"
#include "support.hpp"

using namespace shardlib;
using namespace shardlib::test;

TEST_CASE("a long block is gathered as a view, and is nobody's to write until all views are gone", "[shm]") {
  if (!under_mpi() || !detail::shm::node) return;
  const std::size_t count = Pool::long_block / sizeof(float);
  for (const bool may_map : {true, false}) {
    const Temporarily mapping(tuning.mapped_shards, may_map ? tuning.mapped_shards : std::size_t{0});
    for (const int n : {2, 4}) {
      on_mesh("d=" + show(n), [&](const DevicePtr& device) {
        Communicator& comm = device->group({"d"});
        expect(comm.has_views(Pool::long_block) && !comm.has_views(Pool::long_block / 2) &&
               !comm.has_views(Pool::long_block + 64));
        std::vector<float> expected;
        for (int r = 0; r < n; ++r) {
          const auto block = rough_values(r, count);
          expected.insert(expected.end(), block.begin(), block.end());
        }
        const std::vector<float> mine = rough_values(comm.rank(), count);
        const Buffer block = make_buffer(*device, mine);
        const auto first = std::make_shared<Buffer>(), second = std::make_shared<Buffer>(),
                   outside = std::make_shared<Buffer>(), inside = std::make_shared<Buffer>();
        comm.gather_view(block, first).wait();
        comm.gather_view(block, second).wait();
        expect_equal(values_of<float>(*first), expected);
        expect(first->unique() == !may_map, "a view is unique, or a copy is not");
        // Memory that peers do not reach, and that begins on no page.
        const Buffer foreign(const_cast<float*>(mine.data()), Pool::long_block, nullptr);
        comm.gather_view(foreign, outside).wait();
        expect_equal(values_of<float>(*outside), expected);
        const Buffer room = device->pool()->allocate(2 * Pool::long_block);
        std::memcpy(room.data() + 64, mine.data(), Pool::long_block);
        comm.gather_view(Buffer(room.data() + 64, Pool::long_block, nullptr), inside).wait();
        expect_equal(values_of<float>(*inside), expected);
        // A view lies in no rank's arena.
        const auto of_views = std::make_shared<Buffer>();
        comm.gather_view(*first, of_views).wait();
        for (int r = 0; r < n; ++r)
          expect(std::memcmp(of_views->data() + static_cast<std::size_t>(r) * first->bytes(), first->data(),
                             first->bytes()) == 0);

        comm.barrier();
        expect(block.unique() == !may_map, "a block of which there are views is unique, or one of copies is not");
        *first = {};
        comm.barrier();
        expect(block.unique() == !may_map);
        // One rank is late: its view remains, and so does what all others have lent it.
        if (comm.rank() != 0) *second = {};
        comm.barrier();
        expect(block.unique() == !may_map);
        comm.barrier();
        expect_equal(values_of<float>(*outside), expected);
        if (comm.rank() == 0) {
          expect_equal(values_of<float>(*second), expected);
          *second = {};
        }
        *outside = {};
        comm.barrier();
        expect(block.unique());
        comm.barrier();
        std::memset(block.data(), 0, block.bytes());
      });
    }
  }
}

TEST_CASE("views of the same places share their pages, and those of old ones make room", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  // Room for three views.
  const Temporarily room(tuning.mapped_shards, std::size_t{6});
  on_mesh("d=2", [](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    const std::size_t count = Pool::long_block / sizeof(i32);
    std::vector<Buffer> blocks;
    for (i32 i = 0; i < 6; ++i) blocks.push_back(make_buffer(*device, std::vector<i32>(count, 10 * i + comm.rank())));
    const auto view = [&](std::size_t i) {
      const auto whole = std::make_shared<Buffer>();
      comm.gather_view(blocks[i], whole).wait();
      for (std::size_t k : {std::size_t{0}, 2 * count - 1})
        expect(whole->as<i32>()[k] == static_cast<i32>(10 * i + k / count));
      return whole;
    };
    const auto first = view(0);
    expect(view(0)->data() == first->data());
    const void* const second = view(1)->data();
    const std::size_t before = detail::shm::maps.mapped();
    expect(view(1)->data() == second && detail::shm::maps.mapped() == before, "pages were mapped anew");
    // What was used last stays, and what somebody holds.
    view(2);
    view(1);
    view(3);
    expect(detail::shm::maps.mapped() == 6);
    expect(view(1)->data() == second && view(0)->data() == first->data());
    comm.barrier();
  });
  const Temporarily none(tuning.mapped_shards, std::size_t{1});
  on_mesh("d=2", [](const DevicePtr& device) {
    const Buffer block = make_buffer(*device, std::vector<i32>(Pool::long_block / sizeof(i32), 1));
    const auto whole = std::make_shared<Buffer>();
    device->group({"d"}).gather_view(block, whole).wait();
    expect(whole->unique(), "a view beyond the most that may be mapped");
    device->group({"d"}).barrier();
  });
}

TEST_CASE("a view outlives the group that it was made in, and the peers' handles", "[shm]") {
  if (!under_mpi() || !detail::shm::node || world_size() < 2) return;
  const std::size_t count = Pool::long_block / sizeof(i32);
  const auto view = std::make_shared<Buffer>();
  on_mesh("d=2", [&](const DevicePtr& device) {
    Communicator& comm = device->group({"d"});
    comm.gather_view(make_buffer(*device, std::vector<i32>(count, 7 + comm.rank())), view).wait();
  });
  on_mesh("d=2", [&](const DevicePtr& device) {
    // Whatever is allocated now lies elsewhere.
    std::vector<Buffer> others;
    for (int i = 0; i < 8; ++i) others.push_back(make_buffer(*device, std::vector<i32>(count, -1)));
    device->group({"d"}).barrier();
    for (std::size_t i = 0; i < 2 * count; ++i) expect(view->as<i32>()[i] == (i < count ? 7 : 8));
    *view = {};
    device->group({"d"}).barrier();
  });
}

TEST_CASE("weights that are gathered as views are trained to the bits that MPI gives, in place", "[shm]") {
  if (!under_mpi() || !detail::shm::node) return;
  using Weights = Array<"layers", Tensor<f32, "M/d F/t">>;
  const auto train = []<dtype C>(const DevicePtr& device, C /*computes*/) {
    const Mesh<"d t"> mesh(device);
    const Sizes sizes{{"M", 512}, {"F", 1024}, {"B", 8}};
    Weights weights, mu, nu;
    Array<"layers", Tensor<C, "M/d F/t">> copies;  // which peers view
    for (std::uint64_t i = 0; i < 3; ++i) {
      weights.push_back(random_normal<f32, "M/d F/t">(mesh, sizes, {1, i}) * 0.05);
      mu.push_back(zeros_like(weights.back()));
      nu.push_back(zeros_like(weights.back()));
      copies.push_back(cast<C>(weights.back()));
    }
    const auto x = cast<C>(random_normal<f32, "B/d M">(mesh, sizes, {2, 0}));
    std::vector<std::uint32_t> bits;
    std::vector<const void*> places;
    for (std::int64_t step = 0; step < 3; ++step) {
      const auto [loss, grads] = value_and_grad(
          mesh,
          [&](const auto& w) {
            auto y = x;
            for (const auto& layer : w) {
              const auto whole = all_gather<"M/d F/t -> M F/t", backward_sum<f32>>(layer);
              const auto up = relu(einsum_unreduced<"B/d M, M F/t -> B/d F/t">(y, whole));
              const auto down = einsum_unreduced<"B/d F/t, M F/t -> B/d M +t">(up, whole);
              y = all_reduce<"B/d M +t -> B/d M", f32>(down);
            }
            const auto mine = cast<f32>(shard<"B/d M -> B/d M/t">(y));
            return sum<"B/d M/t -> +d +t">(mine * mine);
          },
          copies);
      const double norm = global_norm(mesh, grads);
      AdamW().update(
          weights, mu, nu, grads, 1e-3, 1 / norm, step, [](auto) { return true; }, copies);
      bits.push_back(std::bit_cast<std::uint32_t>(static_cast<float>(item(all_reduce<"+d +t -> ">(loss)))));
      for (const auto& w : copies) places.push_back(w.span().data());
    }
    for (std::size_t i = 3; i < places.size(); ++i)
      expect(places[i] == places[i - 3], "the optimizer has left a block to views that are gone");
    return bits;
  };
  const auto compare = [&](const std::string& mesh, auto computes) {
    std::vector<std::uint32_t> views, over_mpi;
    on_mesh(mesh, [&](const DevicePtr& device) { views = train(device, computes); });
    const Nodes apart(std::vector<int>(static_cast<std::size_t>(world_size()), -1));
    on_mesh(mesh, [&](const DevicePtr& device) { over_mpi = train(device, computes); });
    CHECK(views == over_mpi);
  };
  for (const std::string mesh : {"d=2,t=1", "d=2,t=2", "d=4,t=1"}) {
    compare(mesh, f32());
    compare(mesh, bf16());
  }
}
#endif
