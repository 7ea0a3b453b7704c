// The shapes of the model, checked by the compiler. It needs the standard library only, and no data.
#include <type_traits>
#include <utility>

#include "model.hpp"

using namespace shardlib;

template <auto f, class... Args>
using result = decltype(f(std::declval<const Args&>()...));

static_assert(std::is_same_v<result<my::logits<f32>, my::Model<f32>, Tensor<i32, "B/d L">>, Tensor<f32, "B/d L V">>);
static_assert(std::is_same_v<result<my::loss<f32>, my::Model<f32>, my::Batch>, Tensor<f32, "+d">>);
static_assert(fully_sharded<Mesh<"d">, my::Model<f32>>);
