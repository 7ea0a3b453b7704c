// Our declarations of NCCL against nccl.h, where the CUDA toolkit has it: scripts/test-cuda.sh compiles this file, and
// nothing runs it.
#include "shardlib/comm/nccl.hpp"

#if __has_include(<nccl.h>)
#include <nccl.h>

#include <cstddef>
#include <type_traits>

namespace shardlib::detail::nccl {

static_assert(sizeof(UniqueId) == sizeof(ncclUniqueId) && alignof(UniqueId) == alignof(ncclUniqueId));
static_assert(static_cast<int>(Result::success) == ncclSuccess && static_cast<int>(Result::in_progress) == ncclInProgress);
static_assert(static_cast<int>(Type::uint8) == ncclUint8 && static_cast<int>(Type::int32) == ncclInt32 &&
              static_cast<int>(Type::uint32) == ncclUint32 && static_cast<int>(Type::float32) == ncclFloat32 &&
              static_cast<int>(Type::float64) == ncclFloat64 && static_cast<int>(Type::bfloat16) == ncclBfloat16);
static_assert(static_cast<int>(Operation::sum) == ncclSum);

static_assert(offsetof(Config, size) == offsetof(ncclConfig_t, size) && offsetof(Config, magic) == offsetof(ncclConfig_t, magic) &&
              offsetof(Config, version) == offsetof(ncclConfig_t, version) &&
              offsetof(Config, blocking) == offsetof(ncclConfig_t, blocking));
constexpr ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
static_assert(Config{}.magic == theirs.magic && Config{}.version == NCCL_VERSION(2, 14, 0));

/// The same type in ours and in nccl.h: itself, one of ours for one of NCCL's, or a pointer to such.
template <class Ours, class Theirs>
inline constexpr bool is_same = std::is_same_v<Ours, Theirs>;
template <>
inline constexpr bool is_same<UniqueId, ncclUniqueId> = true;
template <>
inline constexpr bool is_same<Config, ncclConfig_t> = true;
template <class Ours, class Theirs>
  requires std::is_enum_v<Ours> && std::is_enum_v<Theirs>
inline constexpr bool is_same<Ours, Theirs> =
    (std::is_same_v<Ours, Result> ? std::is_same_v<Theirs, ncclResult_t>
     : std::is_same_v<Ours, Type> ? std::is_same_v<Theirs, ncclDataType_t>
                                  : std::is_same_v<Ours, Operation> && std::is_same_v<Theirs, ncclRedOp_t>) &&
    sizeof(Ours) == sizeof(Theirs);
template <class Ours, class Theirs>
  requires(!std::is_same_v<Ours, Theirs>)
inline constexpr bool is_same<Ours*, Theirs*> = is_same<Ours, Theirs>;
template <class R, class... A, class S, class... B>
  requires(sizeof...(A) == sizeof...(B) && !std::is_same_v<R (*)(A...), S (*)(B...)>)
inline constexpr bool is_same<R (*)(A...), S (*)(B...)> = is_same<R, S> && (... && is_same<A, B>);

#define SAME(name) static_assert(is_same<decltype(Functions::name), decltype(&nccl##name)>)
SAME(GetErrorString);
SAME(GetUniqueId);
SAME(CommInitRank);
SAME(CommDestroy);
SAME(CommAbort);
SAME(CommGetAsyncError);
SAME(GroupStart);
SAME(GroupEnd);
SAME(Send);
SAME(Recv);
SAME(AllGather);
SAME(AllReduce);
SAME(ReduceScatter);
SAME(CommInitRankConfig);
SAME(CommFinalize);
#undef SAME
// Which tells others apart.
static_assert(!is_same<decltype(Functions::Send), decltype(&ncclRecv)>);
static_assert(!is_same<decltype(Functions::AllGather), decltype(&ncclAllReduce)>);

}  // namespace shardlib::detail::nccl

#endif
