// The operations of layers, run one after the other without returning to Python. Each repeats the function of the same
// name in `kernels/reference/layer.py`. A token's results do not depend on the other tokens.
#pragma once
#include "attention.h"

enum Kind : int32_t { QKV, DECODE, RESIDUAL, GATE_UP };
enum Activation : int32_t { SILU, GELU_TANH };

struct Step {
    int32_t kind, activation;
    int32_t rotary; // index of the table
    int32_t normed; // whether the preceding norm divides by the root mean square of the row
    Packed w;
    const float *norm, *bias, *q_norm, *k_norm, *post_norm;
    int64_t layer, heads, input, output; // input and output: indices of buffers
    Scores scores;
    float eps;
};

struct Iteration {
    void *buffers[4];  // x, q, a, h: [T, columns] in the dtype of the stream
    float *sumsq;      // [T], of x
    const float *const *rotary; // tables [T, head_dim / 2, 2]
    const int64_t *slots;       // [T]
    Pages kv;
    Decodes decodes;
    int64_t tokens;
    int32_t brain, threads;
};

static thread_local Buffer result_buffer, factor_buffer;

// y = x times the step's matrix for up to TOKENS tokens, in float32. Returns null if memory is short.
static float *project(const Step &step, const Iteration &it, int64_t first, int64_t tokens) {
    const Packed &w = step.w;
    const int64_t tiles = (w.rows + LANES - 1) / LANES, stride = tiles * LANES;
    float *y = (float *)result_buffer.get(tokens * stride * 4);
    float *factor = (float *)factor_buffer.get((first + tokens) * 4);
    Activations a;
    if (!y || !factor) return nullptr;
    if (step.normed)
        for (int64_t t = first; t < first + tokens; t++)
            factor[t] = 1.0f / __builtin_sqrtf(it.sumsq[t] / (float)w.columns + step.eps);
    const Input x{it.buffers[step.input], w.columns, it.brain};
    if (!quantize(x, first, tokens, w.columns, step.norm, step.normed ? factor : nullptr, a, it.threads))
        return nullptr;
    product(w, a, tokens, it.threads, [&](int64_t token, int64_t row_tile, Floats sum) {
        store(y + token * stride + row_tile * LANES, sum);
    });
    if (step.bias)
        for (int64_t t = 0; t < tokens; t++)
            for (int64_t i = 0; i < w.rows; i++) y[t * stride + i] += step.bias[i];
    return y;
}

INLINE float squares(const float *v, int64_t count) {
    Floats sum = splat(0);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Floats part = load<Floats>(v + i);
        sum = multiply_add(part, part, sum);
    }
    float rest = 0;
    for (; i < count; i++) rest += v[i] * v[i];
    return total(sum) + rest;
}

INLINE void norm_head(float *v, const float *weight, int64_t width, float eps) {
    const float factor = 1.0f / __builtin_sqrtf(squares(v, width) / (float)width + eps);
    for (int64_t i = 0; i < width; i++) v[i] = v[i] * factor * weight[i];
}

INLINE void rotate_head(float *v, const float *cos_sin, int64_t width) {
    for (int64_t i = 0; i < width; i += 2) {
        const float a = v[i], b = v[i + 1], cos = cos_sin[i], sin = cos_sin[i + 1];
        v[i] = a * cos - b * sin;
        v[i + 1] = b * cos + a * sin;
    }
}

INLINE void write(void *to, int64_t at, bool brain, const float *v, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) store_as(to, at + i, brain, load<Floats>(v + i));
}

static bool qkv(const Step &step, const Iteration &it, int64_t first, int64_t tokens) {
    float *y = project(step, it, first, tokens);
    if (!y) return false;
    const Pages &kv = it.kv;
    const int64_t width = kv.head_dim, stride = (step.w.rows + LANES - 1) / LANES * LANES;
    const int64_t token_values = kv.kv_heads * width, plane = kv.page_size * token_values;
    parallel(tokens, 4, it.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            float *row = y + t * stride;
            const float *cos_sin = it.rotary[step.rotary] + (first + t) * width;
            for (int64_t head = 0; head < step.heads + kv.kv_heads; head++) {
                const float *weight = head < step.heads ? step.q_norm : step.k_norm;
                if (weight) norm_head(row + head * width, weight, width, step.eps);
                rotate_head(row + head * width, cos_sin, width);
            }
            write(it.buffers[step.output], (first + t) * step.heads * width, it.brain, row, step.heads * width);
            const int64_t slot = it.slots[first + t];
            int64_t at = (slot / kv.page_size * kv.layers + step.layer) * 2 * plane;
            at += slot % kv.page_size * token_values;
            void *pages = (void *)kv.data;
            write(pages, at, kv.brain, row + step.heads * width, token_values);
            write(pages, at + plane, kv.brain, row + step.heads * width + token_values, token_values);
        }
    });
    return true;
}

static bool residual(const Step &step, const Iteration &it, int64_t first, int64_t tokens) {
    float *y = project(step, it, first, tokens);
    if (!y) return false;
    const int64_t width = step.w.rows, stride = (width + LANES - 1) / LANES * LANES;
    parallel(tokens, 4, it.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            float *row = y + t * stride;
            void *x = it.buffers[step.output];
            const int64_t at = (first + t) * width;
            float factor = 1;
            if (step.post_norm) factor = 1.0f / __builtin_sqrtf(squares(row, width) / (float)width + step.eps);
            for (int64_t i = 0; i < width; i += LANES) {
                Floats v = load<Floats>(row + i);
                if (step.post_norm) v = v * factor * load<Floats>(step.post_norm + i);
                store_as(x, at + i, it.brain, load_as(x, at + i, it.brain) + v);
                store(row + i, load_as(x, at + i, it.brain)); // as rounded
            }
            it.sumsq[first + t] = squares(row, width);
        }
    });
    return true;
}

INLINE Floats activate(int32_t kind, Floats v) {
    if (kind == SILU) return v / (exponential(-v) + 1);
    return v * 0.5f * (hyperbolic_tangent((v + v * v * v * 0.044715f) * 0.79788456f) + 1);
}

static bool gate_up(const Step &step, const Iteration &it, int64_t first, int64_t tokens) {
    float *y = project(step, it, first, tokens);
    if (!y) return false;
    const int64_t width = step.w.rows / 2, stride = (step.w.rows + LANES - 1) / LANES * LANES;
    parallel(tokens, 2, it.threads, [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; t++) {
            const float *gate = y + t * stride, *up = gate + width;
            for (int64_t i = 0; i < width; i += LANES) {
                const Floats v = activate(step.activation, load<Floats>(gate + i)) * load<Floats>(up + i);
                store_as(it.buffers[step.output], (first + t) * width + i, it.brain, v);
            }
        }
    });
    return true;
}

static bool run(const Step &step, const Iteration &it) {
    if (step.kind < 0) return true; // is left to Python
    if (step.kind == DECODE)
        return decode(
            it.kv, step.layer, it.decodes, step.scores, step.heads, it.buffers[step.input], it.buffers[step.output],
            it.threads);
    for (int64_t first = 0; first < it.tokens; first += TOKENS) {
        const int64_t tokens = it.tokens - first < TOKENS ? it.tokens - first : TOKENS;
        const auto function = step.kind == QKV ? qkv : step.kind == RESIDUAL ? residual : gate_up;
        if (!function(step, it, first, tokens)) return false;
    }
    return true;
}
