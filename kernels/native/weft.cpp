// The functions that Python calls, by `ctypes`. They return 0, or 1 if memory is short.
#include "layers.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Is changed together with the arguments of the functions below.
EXPORT int weft_abi() { return 2; }

EXPORT void weft_use_team(void *parallel) { gomp_parallel = (GompParallel)parallel; }

// y [T, rows] float32 = x times the matrix, plus bias.
EXPORT int weft_multiply(
    const Packed *w, const Input *x, int64_t tokens, const float *norm, const float *factor, const float *bias,
    float *y, int threads) {
    const int64_t rows = w->rows;
    for (int64_t first = 0; first < tokens; first += TOKENS) {
        const int64_t n = tokens - first < TOKENS ? tokens - first : TOKENS;
        Activations a;
        if (!quantize(*x, first, n, w->columns, norm, factor, a, threads)) return 1;
        product(*w, a, n, threads, [&](int64_t token, int64_t row_tile, Floats sum) {
            const int64_t row = row_tile * LANES;
            const int64_t count = rows - row < LANES ? rows - row : LANES;
            float *to = y + (first + token) * rows + row;
            if (count == LANES) {
                store(to, bias ? sum + load<Floats>(bias + row) : sum);
                return;
            }
            for (int64_t i = 0; i < count; i++) to[i] = bias ? sum[i] + bias[row + i] : sum[i];
        });
    }
    return 0;
}

// Attention of requests with one query. Returns 1 if a size is not supported.
EXPORT int weft_decode(
    const Pages *kv, int64_t layer, const Decodes *requests, const Scores *how, int64_t heads, const void *q, void *out,
    int threads) {
    return !decode(*kv, layer, *requests, *how, heads, q, out, threads);
}

EXPORT int weft_run(const Step *steps, int64_t count, const Iteration *iteration) {
    for (int64_t i = 0; i < count; i++)
        if (!run(steps[i], *iteration)) return 1;
    return 0;
}

// sums [T] = the sums of squares of the rows of x [T, width]; width is a multiple of 16.
EXPORT void weft_row_squares(const void *x, int64_t tokens, int64_t width, int brain, float *sums) {
    for (int64_t t = 0; t < tokens; t++) {
        Floats sum = splat(0);
        for (int64_t i = 0; i < width; i += LANES) {
            const Floats part = load_as(x, t * width + i, brain);
            sum = multiply_add(part, part, sum);
        }
        sums[t] = total(sum);
    }
}
