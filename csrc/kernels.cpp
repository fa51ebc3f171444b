#include "kernels.h"

namespace grpo {

namespace plain { extern const Kernels kernels; }
#ifdef __x86_64__
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> found;
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        found.push_back(&avx512::kernels);
    if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::kernels);
#endif
    found.push_back(&plain::kernels);
    return found;
}

const Kernels* find_kernels(const char* name) {
    const auto found = available_kernels();
    if (strcmp(name, "auto") == 0) return found.front();
    for (const Kernels* kernels : found)
        if (strcmp(kernels->name, name) == 0) return kernels;
    return nullptr;
}

}  // namespace grpo
