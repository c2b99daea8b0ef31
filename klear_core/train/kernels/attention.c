// Causal attention of a training step in float32 over a packed sequence, forward and backward. HEAD_DIM is a macro.
//
// Segment r is tokens cu_seqlens[r] .. cu_seqlens[r + 1]. Group g is segments group_bounds[g] .. group_bounds[g + 1],
// the first of which is a prefix that the others see in full. Queries, keys and values are [tokens][heads][HEAD_DIM];
// each key head serves equally many query heads. One unit of work is a group and a key head. No other unit writes to
// its gradients, so results do not depend on the number of threads.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "native.h"

#define LANES 16
#define BLOCK 8 // queries per block: their products with a vector of keys fill half of the registers
#define CHUNKS (HEAD_DIM / LANES)

typedef float vector __attribute__((vector_size(LANES * sizeof(float)), aligned(sizeof(float)), may_alias));

static inline vector load(const float *from) { return *(const vector *)from; }
static inline void store(float *to, vector x) { *(vector *)to = x; }

static int64_t round_up(int64_t count) { return (count + LANES - 1) / LANES * LANES; }

// The packed sequence and its heads.
typedef struct {
    const int32_t *cu_seqlens, *group_bounds;
    int64_t num_heads, num_kv_heads;
    float scale;
} shape;

// One segment: it sees `seen` tokens that lie at `prefix`, then its own.
typedef struct {
    int64_t prefix, seen, start, count;
} segment;

// Working memory of one unit. Columns are what a segment sees: the prefix, then its own tokens.
typedef struct {
    float *keys, *values;   // [HEAD_DIM][width]
    float *weights, *pulls; // [BLOCK][width]
    int64_t width;
} scratch;

static segment segment_of(const shape *s, int64_t g, int64_t r) {
    const int64_t prefix = s->group_bounds[g], is_prefix = r == prefix;
    const int32_t *starts = s->cu_seqlens;
    return (segment){starts[prefix], is_prefix ? 0 : starts[prefix + 1] - starts[prefix], starts[r], starts[r + 1] - starts[r]};
}

static scratch take(const shape *s, int64_t g) {
    int64_t width = 0;
    for (int64_t r = s->group_bounds[g]; r < s->group_bounds[g + 1]; r++) {
        const segment it = segment_of(s, g, r);
        width = it.seen + it.count > width ? it.seen + it.count : width;
    }
    width = round_up(width);
    float *all = calloc((2 * HEAD_DIM + 2 * BLOCK) * width, sizeof(float));
    return (scratch){all, all + HEAD_DIM * width, all + 2 * HEAD_DIM * width, all + (2 * HEAD_DIM + BLOCK) * width, width};
}

// Copy tokens of a head into columns at .. at + count.
static void transpose(const float *from, int64_t stride, int64_t count, float *columns, int64_t width, int64_t at) {
    for (int64_t t = 0; t < count; t++)
        for (int d = 0; d < HEAD_DIM; d++) columns[d * width + at + t] = from[t * stride + d];
}

// out[BLOCK][width] = block[BLOCK][HEAD_DIM] times columns[HEAD_DIM][width], for the first `count` columns, rounded up.
static void products(const float *restrict block, const float *restrict columns, int64_t width, int64_t count, float *restrict out) {
    for (int64_t k = 0; k < count; k += LANES) {
        vector sum[BLOCK] = {0};
        for (int d = 0; d < HEAD_DIM; d++) {
            const vector column = load(columns + d * width + k);
            for (int q = 0; q < BLOCK; q++) sum[q] += column * block[q * HEAD_DIM + d];
        }
        for (int q = 0; q < BLOCK; q++) store(out + q * width + k, sum[q]);
    }
}

// out[BLOCK][HEAD_DIM] += weights[BLOCK][count] times rows[count][HEAD_DIM]
static void combine(const float *restrict weights, int64_t width, const float *restrict rows, int64_t stride, int64_t count, float *restrict out) {
    for (int c = 0; c < CHUNKS; c++) {
        vector sum[BLOCK];
        for (int q = 0; q < BLOCK; q++) sum[q] = load(out + q * HEAD_DIM + c * LANES);
        for (int64_t k = 0; k < count; k++) {
            const vector row = load(rows + k * stride + c * LANES);
            for (int q = 0; q < BLOCK; q++) sum[q] += row * weights[q * width + k];
        }
        for (int q = 0; q < BLOCK; q++) store(out + q * HEAD_DIM + c * LANES, sum[q]);
    }
}

// rows[count][HEAD_DIM] += weights[BLOCK][count]^T times block[BLOCK][HEAD_DIM]
static void spread(const float *restrict weights, int64_t width, const float *restrict block, int64_t count, float *restrict rows, int64_t stride) {
    for (int c = 0; c < CHUNKS; c++) {
        vector part[BLOCK];
        for (int q = 0; q < BLOCK; q++) part[q] = load(block + q * HEAD_DIM + c * LANES);
        for (int64_t k = 0; k < count; k++) {
            vector sum = load(rows + k * stride + c * LANES);
            for (int q = 0; q < BLOCK; q++) sum += part[q] * weights[q * width + k];
            store(rows + k * stride + c * LANES, sum);
        }
    }
}

static void copy_block(const float *from, int64_t stride, int64_t count, float factor, float *block) {
    memset(block, 0, BLOCK * HEAD_DIM * sizeof(float));
    for (int64_t q = 0; q < count; q++)
        for (int d = 0; d < HEAD_DIM; d++) block[q * HEAD_DIM + d] = factor * from[q * stride + d];
}

// Hide the columns that a query does not see, up to `count` rounded up to full vectors.
static void hide(float *scores, int64_t seen, int64_t count) {
    for (int64_t k = seen; k < round_up(count); k++) scores[k] = -INFINITY;
}

// Replace a query's scores by exp(score - largest), which is 0 in hidden columns, and return their sum.
static float exponentials(float *restrict scores, int64_t count, float *largest) {
    float best[LANES], sums[LANES] = {0}, sum = 0;
    for (int i = 0; i < LANES; i++) best[i] = scores[i];
    for (int64_t k = LANES; k < count; k += LANES)
#pragma omp simd
        for (int i = 0; i < LANES; i++) best[i] = scores[k + i] > best[i] ? scores[k + i] : best[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) best[i] = best[i + half] > best[i] ? best[i + half] : best[i];
    *largest = best[0];
    for (int64_t k = 0; k < count; k += LANES)
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            scores[k + i] = exp_of_nonpositive(scores[k + i] - best[0]);
            sums[i] += scores[k + i];
        }
    for (int i = 0; i < LANES; i++) sum += sums[i];
    return sum;
}

// Replace scores by softmax weights P, and derivatives dP by the weights (pulls) by derivatives dS by the scores:
// dS = P (dP - mean), where mean = sum over the keys of P dP.
static void softmax_gradient(float *restrict scores, float *restrict pulls, float log_sum, float mean, int64_t count) {
    for (int64_t k = 0; k < count; k += LANES)
#pragma omp simd
        for (int i = 0; i < LANES; i++) {
            const float x = scores[k + i] - log_sum;
            scores[k + i] = exp_of_nonpositive(x > 0 ? 0 : x); // rounding can take x above 0
            pulls[k + i] = scores[k + i] * (pulls[k + i] - mean);
        }
}

static void forward_block(const shape *s, const segment *it, int64_t first, int64_t count, int64_t head, const scratch *w, const float *q,
                          const float *v, float *out, float *log_sums) {
    const int64_t stride = s->num_heads * HEAD_DIM, kv_stride = s->num_kv_heads * HEAD_DIM;
    const int64_t token = it->start + first, num_own = first + count, seen = it->seen + num_own;
    float block[BLOCK * HEAD_DIM], sum[BLOCK * HEAD_DIM] = {0}, sums[BLOCK], largest;
    // Scaled here, because there are fewer queries than scores.
    copy_block(q + token * stride + head * HEAD_DIM, stride, count, s->scale, block);
    products(block, w->keys, w->width, seen, w->weights);
    for (int64_t i = 0; i < count; i++) {
        hide(w->weights + i * w->width, it->seen + first + i + 1, seen);
        sums[i] = exponentials(w->weights + i * w->width, seen, &largest);
        log_sums[(token + i) * s->num_heads + head] = largest + logf(sums[i]);
    }
    combine(w->weights, w->width, v + it->prefix * kv_stride, kv_stride, it->seen, sum);
    combine(w->weights + it->seen, w->width, v + it->start * kv_stride, kv_stride, num_own, sum);
    // Normalised last: one division for each number of the output instead of one for each weight.
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < HEAD_DIM; d++) out[(token + i) * stride + head * HEAD_DIM + d] = sum[i * HEAD_DIM + d] / sums[i];
}

// out[tokens][heads][HEAD_DIM]; log_sums[tokens][heads] are for the backward pass.
void attention_forward(int64_t num_groups, int64_t num_heads, int64_t num_kv_heads, const int32_t *cu_seqlens, const int32_t *group_bounds,
                       float scale, const float *q, const float *k, const float *v, float *out, float *log_sums) {
    const shape s = {cu_seqlens, group_bounds, num_heads, num_kv_heads, scale};
    const int64_t heads_per_kv = num_heads / num_kv_heads, kv_stride = num_kv_heads * HEAD_DIM;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            const float *keys = k + kv * HEAD_DIM, *values = v + kv * HEAD_DIM;
            const scratch w = take(&s, g);
            for (int64_t r = group_bounds[g]; r < group_bounds[g + 1]; r++) {
                const segment it = segment_of(&s, g, r);
                transpose(keys + it.start * kv_stride, kv_stride, it.count, w.keys, w.width, it.seen);
                for (int64_t head = kv * heads_per_kv; head < (kv + 1) * heads_per_kv; head++)
                    for (int64_t first = 0; first < it.count; first += BLOCK) {
                        const int64_t count = it.count - first < BLOCK ? it.count - first : BLOCK;
                        forward_block(&s, &it, first, count, head, &w, q, values, out, log_sums);
                    }
            }
            free(w.keys);
        }
}

typedef struct {
    const float *q, *k, *v, *out, *log_sums, *dout;
    float *dq, *dk, *dv;
} tensors;

static void backward_block(const shape *s, const segment *it, int64_t first, int64_t count, int64_t head, const scratch *w, const tensors *t) {
    const int64_t stride = s->num_heads * HEAD_DIM, kv_stride = s->num_kv_heads * HEAD_DIM;
    const int64_t token = it->start + first, num_own = first + count, seen = it->seen + num_own, at = token * stride + head * HEAD_DIM;
    const int64_t kv = head / (s->num_heads / s->num_kv_heads) * HEAD_DIM;
    const int64_t prefix = it->prefix * kv_stride + kv, start = it->start * kv_stride + kv;
    float query[BLOCK * HEAD_DIM], pull[BLOCK * HEAD_DIM], sum[BLOCK * HEAD_DIM] = {0};
    copy_block(t->q + at, stride, count, s->scale, query);
    copy_block(t->dout + at, stride, count, 1, pull);
    products(query, w->keys, w->width, seen, w->weights);
    products(pull, w->values, w->width, seen, w->pulls);
    for (int64_t i = 0; i < BLOCK; i++) {
        float mean = 0;
        // sum over the keys of P dP = dout . out, which needs no pass over the keys (FlashAttention, arXiv 2205.14135)
        for (int d = 0; i < count && d < HEAD_DIM; d++) mean += pull[i * HEAD_DIM + d] * t->out[at + i * stride + d];
        const int64_t visible = i < count ? it->seen + first + i + 1 : 0; // rows that fill up the block see nothing
        const float log_sum = i < count ? t->log_sums[(token + i) * s->num_heads + head] : 0;
        hide(w->weights + i * w->width, visible, seen);
        softmax_gradient(w->weights + i * w->width, w->pulls + i * w->width, log_sum, mean, seen);
    }
    combine(w->pulls, w->width, t->k + prefix, kv_stride, it->seen, sum);
    combine(w->pulls + it->seen, w->width, t->k + start, kv_stride, num_own, sum);
    // S = scale q k: dq needs the factor here, dk has it from `query`, which was scaled above.
    for (int64_t i = 0; i < count; i++)
        for (int d = 0; d < HEAD_DIM; d++) t->dq[at + i * stride + d] = s->scale * sum[i * HEAD_DIM + d];
    spread(w->pulls, w->width, query, it->seen, t->dk + prefix, kv_stride);
    spread(w->pulls + it->seen, w->width, query, num_own, t->dk + start, kv_stride);
    spread(w->weights, w->width, pull, it->seen, t->dv + prefix, kv_stride);
    spread(w->weights + it->seen, w->width, pull, num_own, t->dv + start, kv_stride);
}

// The caller sets dk and dv to zero, because gradients are added to them.
void attention_backward(int64_t num_groups, int64_t num_heads, int64_t num_kv_heads, const int32_t *cu_seqlens, const int32_t *group_bounds,
                        float scale, const float *q, const float *k, const float *v, const float *out, const float *log_sums,
                        const float *dout, float *dq, float *dk, float *dv) {
    const shape s = {cu_seqlens, group_bounds, num_heads, num_kv_heads, scale};
    const tensors t = {q, k, v, out, log_sums, dout, dq, dk, dv};
    const int64_t heads_per_kv = num_heads / num_kv_heads, kv_stride = num_kv_heads * HEAD_DIM;
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (int64_t g = 0; g < num_groups; g++)
        for (int64_t kv = 0; kv < num_kv_heads; kv++) {
            const scratch w = take(&s, g);
            for (int64_t r = group_bounds[g]; r < group_bounds[g + 1]; r++) {
                const segment it = segment_of(&s, g, r);
                transpose(k + it.start * kv_stride + kv * HEAD_DIM, kv_stride, it.count, w.keys, w.width, it.seen);
                transpose(v + it.start * kv_stride + kv * HEAD_DIM, kv_stride, it.count, w.values, w.width, it.seen);
                for (int64_t head = kv * heads_per_kv; head < (kv + 1) * heads_per_kv; head++)
                    for (int64_t first = 0; first < it.count; first += BLOCK) {
                        const int64_t count = it.count - first < BLOCK ? it.count - first : BLOCK;
                        backward_block(&s, &it, first, count, head, &w, &t);
                    }
            }
            free(w.keys);
        }
}
