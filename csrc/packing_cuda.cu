// The packer's CUDA kernels behind a C interface, in an object of its own with a static runtime: it loads on a machine
// without a driver, where device_count answers 0. One launch packs, casts and hashes a bucket.
#include <cuda_runtime.h>

#include "device.h"

namespace grpo::device {

constexpr int kThreads = 256, kWarp = 32;

// One thread block per leaf; a warp per 1 KiB block, two vectors per thread. `to` null: hash only. `leaves` null: no hash.
__global__ void __launch_bounds__(kThreads) pack_kernel(const Piece* pieces, int count, int64_t bytes, uint8_t* to, uint64_t* leaves) {
    __shared__ uint64_t sums[kLeafBlocks * xxh3::kLanes];
    __shared__ uint64_t lanes[xxh3::kLanes];
    __shared__ uint64_t last[xxh3::kLanes];
    __shared__ int low, high;
    const Leaf leaf(blockIdx.x, bytes);
    const int warp = threadIdx.x / kWarp, thread = threadIdx.x % kWarp;
    if (threadIdx.x == 0) {
        low = find(pieces, 0, count, leaf.begin);
        high = find(pieces, low, count, leaf.end - 1);
        high = high < count ? high + 1 : count;
    }
    if (threadIdx.x < xxh3::kLanes) last[threadIdx.x] = 0;
    __syncthreads();
    const int64_t last_stripe = leaf.begin + leaf.length() - static_cast<int64_t>(xxh3::kStripe);
    for (int block = warp; block < kLeafBlocks; block += kThreads / kWarp) {
        uint64_t even = 0, odd = 0;
        for (int half = 0; half < 2; ++half) {
            const int index = half * kWarp + thread;
            const int64_t at = leaf.begin + block * static_cast<int64_t>(xxh3::kBlock) + index * kVector;
            if (at >= leaf.begin + leaf.length()) continue;
            const Vector vector = assemble(pieces, find(pieces, low, high, at), count, at, leaf.end);
            if (to && at + kVector <= leaf.end) {
                *reinterpret_cast<Vector*>(to + at) = vector;
            } else if (to) {
                for (int i = 0; at + i < leaf.end; ++i) to[at + i] = reinterpret_cast<const uint8_t*>(&vector)[i];
            }
            if (!leaves) continue;
            if (index / 4 < leaf.stripes(block)) fold(vector, index, even, odd);
            // The last 64 bytes may begin anywhere: each byte finds its place.
            for (int i = 0; i < kVector; ++i) {
                const int64_t place = at + i - last_stripe;
                if (place >= 0 && place < static_cast<int64_t>(xxh3::kStripe)) reinterpret_cast<uint8_t*>(last)[place] = reinterpret_cast<const uint8_t*>(&vector)[i];
            }
        }
        for (int step = 4; step < kWarp; step *= 2) {
            even += __shfl_xor_sync(0xffffffffu, even, step);
            odd += __shfl_xor_sync(0xffffffffu, odd, step);
        }
        if (thread < 4) {
            sums[8 * block + 2 * thread] = even;
            sums[8 * block + 2 * thread + 1] = odd;
        }
    }
    if (!leaves) return;
    __syncthreads();
    if (threadIdx.x < xxh3::kLanes) lanes[threadIdx.x] = finish_lane(leaf, threadIdx.x, sums, [&](int i) { return last[i]; });
    __syncthreads();
    if (threadIdx.x == 0) leaves[blockIdx.x] = xxh3::merge(lanes, static_cast<uint64_t>(leaf.length()));
}

__global__ void __launch_bounds__(kThreads) unpack_kernel(const Piece* pieces, int count, int64_t bytes, const uint8_t* from) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * kVector;
    for (int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVector; at < bytes; at += step) {
        Vector vector{0, 0};
        if (at + kVector <= bytes) vector = *reinterpret_cast<const Vector*>(from + at);
        else for (int i = 0; at + i < bytes; ++i) reinterpret_cast<uint8_t*>(&vector)[i] = from[at + i];
        deliver(pieces, find(pieces, 0, count, at), count, at, bytes, vector);
    }
}

}  // namespace grpo::device

using grpo::device::Piece;

// All addresses but none of the sizes are of the device; each call only enqueues. The answer is a cudaError_t.
extern "C" {

__attribute__((visibility("default"))) int grpo_cuda_device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

__attribute__((visibility("default"))) const char* grpo_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }

__attribute__((visibility("default"))) int grpo_cuda_pack(const Piece* pieces, int count, int64_t bytes, uint8_t* to, uint64_t* leaves, void* stream) {
    if (bytes <= 0) return 0;
    const auto blocks = static_cast<unsigned>((bytes + static_cast<int64_t>(grpo::xxh3::kLeaf) - 1) / static_cast<int64_t>(grpo::xxh3::kLeaf));
    grpo::device::pack_kernel<<<blocks, grpo::device::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pieces, count, bytes, to, leaves);
    return cudaGetLastError();
}

__attribute__((visibility("default"))) int grpo_cuda_unpack(const Piece* pieces, int count, int64_t bytes, const uint8_t* from, void* stream) {
    if (bytes <= 0) return 0;
    const int64_t wanted = (bytes + grpo::device::kThreads * grpo::device::kVector - 1) / (grpo::device::kThreads * grpo::device::kVector);
    const auto blocks = static_cast<unsigned>(wanted < 65535 ? wanted : 65535);
    grpo::device::unpack_kernel<<<blocks, grpo::device::kThreads, 0, static_cast<cudaStream_t>(stream)>>>(pieces, count, bytes, from);
    return cudaGetLastError();
}

}  // extern "C"
