/* The functions of llama.cpp's library that `weft bench offline --baseline llama.cpp` calls, without a model: the
 * logits of a sequence depend on all of its tokens and their positions. A wrong call ends in an error of llama_decode. */
#include <stdint.h>
#include <string.h>

enum { VOCAB = 97, MOST = 8, ROOM = 4096 };

struct model_params { int32_t layers[9]; };
struct context_params { uint32_t n_ctx, n_batch, n_ubatch, n_seq_max; int32_t rest[20]; };
struct batch {
    int32_t n_tokens, *token;
    float *embd;
    int32_t *pos, *n_seq_id, **seq_id;
    int8_t *logits;
};

static struct context_params made;
static int32_t tokens[512], pos[512], counts[512], ids[512], *id_of[512], threads;
static int8_t wanted[512];
static int32_t length[MOST], state[MOST];
static float logits[512][VOCAB];

struct model_params llama_model_default_params(void) { struct model_params p = {{7}}; return p; }
struct context_params llama_context_default_params(void) {
    struct context_params p = {512, 2048, 512, 1, {11}};
    return p;
}
void llama_log_set(void *callback, void *data) {}
void llama_backend_init(void) {}
void *llama_model_load_from_file(const char *path, struct model_params p) {
    return p.layers[0] == 7 && !strstr(path, "corrupt") ? &made : 0;
}
void *llama_init_from_model(void *model, struct context_params p) {
    made = p;
    return p.rest[0] == 11 && p.n_seq_max <= MOST && p.n_ctx <= ROOM ? &made : 0;
}
void llama_set_n_threads(void *context, int32_t n, int32_t batch) { threads = n; }
void *llama_model_get_vocab(void *model) { return &made; }
int32_t llama_vocab_n_tokens(void *vocab) { return VOCAB; }
void *llama_get_memory(void *context) { return state; }
_Bool llama_memory_seq_rm(void *memory, int32_t sequence, int32_t from, int32_t to) {
    length[sequence] = state[sequence] = 0;
    return 1;
}
struct batch llama_batch_init(int32_t n, int32_t embd, int32_t most) {
    struct batch b = {0, tokens, 0, pos, counts, id_of, wanted};
    for (int i = 0; i < n; i++) id_of[i] = &ids[i];
    memset(length, 0, sizeof length);
    memset(state, 0, sizeof state);
    return b;
}
int32_t llama_decode(void *context, struct batch b) {
    if (b.n_tokens > (int32_t)made.n_batch) return 2;
    for (int i = 0; i < b.n_tokens; i++) {
        int32_t s = b.seq_id[i][0];
        if (b.n_seq_id[i] != 1 || s >= (int32_t)made.n_seq_max || b.pos[i] != length[s]) return 3;
        if (++length[s] > (int32_t)(made.n_ctx / made.n_seq_max)) return 1;
        state[s] = (state[s] * 31 + b.token[i] + 1) % 1000003;
        for (int v = 0; v < VOCAB; v++) logits[i][v] = v == state[s] % VOCAB ? 1 : 0;
        if (!b.logits[i]) memset(logits[i], 0, sizeof logits[i]);
    }
    return 0;
}
float *llama_get_logits_ith(void *context, int32_t i) { return logits[i]; }
void llama_batch_free(struct batch b) {}
void llama_free(void *context) {}
void llama_model_free(void *model) {}
