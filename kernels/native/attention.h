// Attention of one query per request, read straight from pages. A request's sums do not depend on the other requests.
#pragma once
#include "products.h"

constexpr int64_t KEYS = 32, WIDEST = 256, HEADS = 16; // keys at a time; limits on head_dim and heads per KV head

struct Pages { // [pages, layers, 2, page_size, kv_heads, head_dim]
    const void *data;
    int64_t layers, page_size, kv_heads, head_dim;
    int32_t brain;
};

struct Decodes { // R requests
    const int32_t *page_table; // [R, stride]
    const int32_t *kv_len;     // [R]
    int64_t count, stride;
};

struct Scores {
    int64_t window; // 0: all positions
    float scale, softcap;
    const float *sinks; // [heads], or null
};

INLINE Floats load_as(const void *from, int64_t at, bool brain) {
    return brain ? load_brain((const uint16_t *)from + at) : load<Floats>((const float *)from + at);
}
INLINE void store_as(void *to, int64_t at, bool brain, Floats v) {
    if (brain)
        store_brain((uint16_t *)to + at, v);
    else
        store((float *)to + at, v);
}

// The query heads of one KV head. FIXED = head_dim / 16, or 0: not known to the compiler.
template <int FIXED, bool BRAIN>
static void attend(
    const Pages &kv, int64_t layer, const Decodes &requests, const Scores &how, int64_t request, int64_t kv_head,
    int64_t group, const void *q, void *out) {
    constexpr int MOST_CHUNKS = FIXED ? FIXED : WIDEST / LANES;
    const int chunks = FIXED ? FIXED : (int)(kv.head_dim / LANES);
    const int64_t width = chunks * LANES;
    const int64_t length = requests.kv_len[request], heads = kv.kv_heads * group;
    const int64_t begin = how.window && length > how.window ? length - how.window : 0;
    const int64_t token = kv.kv_heads * width, plane = kv.page_size * token, page = kv.layers * 2 * plane;
    const int32_t *table = requests.page_table + request * requests.stride;
    const int64_t own = (request * heads + kv_head * group) * width;
    Floats query[HEADS][MOST_CHUNKS], sum[HEADS][MOST_CHUNKS];
    float most[HEADS], weight[HEADS], p[HEADS][KEYS];
    for (int64_t g = 0; g < group; g++) {
        for (int c = 0; c < chunks; c++) {
            query[g][c] = load_as(q, own + g * width + c * LANES, BRAIN) * how.scale;
            sum[g][c] = splat(0);
        }
        most[g] = how.sinks ? how.sinks[kv_head * group + g] : -__builtin_inff();
        weight[g] = how.sinks ? 1.0f : 0.0f;
    }
    for (int64_t first = begin; first < length; first += KEYS) {
        const int64_t count = length - first < KEYS ? length - first : KEYS;
        int64_t at[KEYS];
        for (int64_t j = 0; j < count; j++) {
            const int64_t position = first + j;
            at[j] = table[position / kv.page_size] * page + layer * 2 * plane +
                    position % kv.page_size * token + kv_head * width;
            Floats key[MOST_CHUNKS];
            for (int c = 0; c < chunks; c++) key[c] = load_as(kv.data, at[j] + c * LANES, BRAIN);
            for (int64_t g = 0; g < group; g++) {
                Floats dot = query[g][0] * key[0];
                for (int c = 1; c < chunks; c++) dot = multiply_add(query[g][c], key[c], dot);
                p[g][j] = total(dot);
            }
        }
        for (int64_t g = 0; g < group; g++) {
            for (int64_t j = count; j < KEYS; j++) p[g][j] = -__builtin_inff();
            Floats s[2] = {load<Floats>(p[g]), load<Floats>(p[g] + LANES)};
            if (how.softcap != 0)
                for (Floats &part : s) part = hyperbolic_tangent(part / how.softcap) * how.softcap;
            float now = largest(larger(s[0], s[1]));
            now = now > most[g] ? now : most[g];
            const float shrink = exponential(splat(most[g] - now))[0];
            s[0] = exponential(s[0] - now);
            s[1] = exponential(s[1] - now);
            store(p[g], s[0]);
            store(p[g] + LANES, s[1]);
            for (int64_t j = count; j < KEYS; j++) p[g][j] = 0;
            weight[g] = weight[g] * shrink + total(load<Floats>(p[g]) + load<Floats>(p[g] + LANES));
            most[g] = now;
            for (int c = 0; c < chunks; c++) sum[g][c] *= shrink;
        }
        for (int64_t j = 0; j < count; j++) {
            Floats value[MOST_CHUNKS];
            for (int c = 0; c < chunks; c++) value[c] = load_as(kv.data, at[j] + plane + c * LANES, BRAIN);
            for (int64_t g = 0; g < group; g++)
                for (int c = 0; c < chunks; c++) sum[g][c] = multiply_add(splat(p[g][j]), value[c], sum[g][c]);
        }
    }
    for (int64_t g = 0; g < group; g++)
        for (int c = 0; c < chunks; c++)
            store_as(out, own + g * width + c * LANES, BRAIN, sum[g][c] / weight[g]);
}

using Attend = void (*)(
    const Pages &, int64_t, const Decodes &, const Scores &, int64_t, int64_t, int64_t, const void *, void *);

static Attend choose_attend(int64_t head_dim, bool brain) {
    if (head_dim % LANES || head_dim > WIDEST) return nullptr;
    if (head_dim == 64) return brain ? attend<4, true> : attend<4, false>;
    if (head_dim == 128) return brain ? attend<8, true> : attend<8, false>;
    return brain ? attend<0, true> : attend<0, false>;
}

// q and out: [R or more, heads, head_dim] in the dtype of the pages.
static bool decode(
    const Pages &kv, int64_t layer, const Decodes &requests, const Scores &how, int64_t heads, const void *q, void *out,
    int threads) {
    const Attend function = choose_attend(kv.head_dim, kv.brain);
    const int64_t group = heads / kv.kv_heads;
    if (!function || group > HEADS) return false;
    int64_t keys = 0;
    for (int64_t r = 0; r < requests.count; r++) keys += requests.kv_len[r];
    const bool few = keys * heads * kv.head_dim < (1 << 16);
    parallel(requests.count * kv.kv_heads, 1, few ? 1 : threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++)
            function(kv, layer, requests, how, i / kv.kv_heads, i % kv.kv_heads, group, q, out);
    });
    return true;
}
