// Runs a loop on torch's own OpenMP team. A second team would compete with it for the cores.
#pragma once
#include <atomic>
#include <cstdint>

typedef void (*GompParallel)(void (*)(void *), void *, unsigned, unsigned);
static GompParallel gomp_parallel = nullptr;

template <typename Body> struct Loop {
    std::atomic<int64_t> next;
    int64_t end, step;
    const Body *body;

    static void work(void *data) {
        Loop &loop = *(Loop *)data;
        for (int64_t i; (i = loop.next.fetch_add(loop.step)) < loop.end;)
            (*loop.body)(i, i + loop.step < loop.end ? i + loop.step : loop.end);
    }
};

// Calls body(begin, end) for parts of 0..end, on at most `threads` threads. Which thread takes which part is left open.
template <typename Body> static void parallel(int64_t end, int64_t step, int threads, const Body &body) {
    if (threads <= 1 || !gomp_parallel || end <= step) {
        if (end > 0) body((int64_t)0, end);
        return;
    }
    Loop<Body> loop{{0}, end, step, &body};
    const int64_t parts = (end + step - 1) / step;
    gomp_parallel(Loop<Body>::work, &loop, (unsigned)(parts < threads ? parts : threads), 0);
}
