# A Kokkos that was built for GPUs, as far as shardlib's configuration looks at it.
set(Kokkos_VERSION 5.2.2)
set(Kokkos_DEVICES CUDA SERIAL)
