// Compute the parts of a decode step between its matrix products, in float32. Rows are computed one by one, so
// that no row's bits depend on the other rows.
//
// Compiled for one model: HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM (a multiple of 16), INTERMEDIATE, VOCAB and
// HAS_QK_NORM (0: queries and keys are rotated as they are) are macros.
//
// Axes: B active rows, P positions of the shared cache, L positions of the rows' private cache (P and L are multiples
// of 16), S = P + L, T positions of the token table, G query heads per key/value head.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

#define GROUP (NUM_HEADS / NUM_KV_HEADS)
#define QKV_SIZE ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
#define LANES 16
#define CHUNK 64

typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t lane_bits __attribute__((vector_size(4 * LANES)));

static inline lanes load(const float *x) {
    lanes value;
    memcpy(&value, x, sizeof value);
    return value;
}

// Sum by halves, not in order: otherwise each addition would wait for the one before.
static inline float sum_of(lanes x) {
    float sum[LANES];
    memcpy(sum, &x, sizeof sum);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) sum[i] += sum[i + width];
    return sum[0];
}

static inline float largest_of(lanes x) {
    float top[LANES];
    memcpy(top, &x, sizeof top);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) top[i] = top[i] > top[i + width] ? top[i] : top[i + width];
    return top[0];
}

static inline void rms_norm(const float *restrict x, const float *restrict weight, float *restrict out, int size, float eps) {
    const int full_lanes = size / LANES * LANES;
    lanes sums = {0};
    for (int i = 0; i < full_lanes; i += LANES) sums += load(x + i) * load(x + i);
    float sum = sum_of(sums);
    for (int i = full_lanes; i < size; i++) sum += x[i] * x[i];
    const float scale = 1.0f / sqrtf(sum / size + eps);
#pragma omp simd
    for (int i = 0; i < size; i++) out[i] = x[i] * scale * weight[i];
}

// x[b] becomes the embedding of row b's newest token, normed[b] its norm.
void embed(int num_rows, const int64_t *tokens_RT, int64_t T, const int64_t *position, const float *embedding, float *x,
           const float *norm_weight, float *normed, float eps) {
    for (int b = 0; b < num_rows; b++) {
        float *row = x + (int64_t)b * HIDDEN;
        memcpy(row, embedding + tokens_RT[b * T + position[b]] * HIDDEN, HIDDEN * sizeof(float));
        rms_norm(row, norm_weight, normed + (int64_t)b * HIDDEN, HIDDEN, eps);
    }
}

void norm(int num_rows, const float *x, const float *weight, float *out, float eps) {
#pragma omp parallel for if (num_rows * HIDDEN > 65536)
    for (int b = 0; b < num_rows; b++) rms_norm(x + (int64_t)b * HIDDEN, weight, out + (int64_t)b * HIDDEN, HIDDEN, eps);
}

// out = silu(gate) * up
void gate(int num_rows, const float *gate_up, float *out) {
#pragma omp parallel for if (num_rows * INTERMEDIATE > 65536)
    for (int b = 0; b < num_rows; b++) {
        const float *restrict g = gate_up + (int64_t)b * 2 * INTERMEDIATE, *restrict u = g + INTERMEDIATE;
        float *restrict o = out + (int64_t)b * INTERMEDIATE;
#pragma omp simd
        for (int i = 0; i < INTERMEDIATE; i++) {
            const float e = exp_of_nonpositive(-fabsf(g[i])); // the logistic function without overflow
            o[i] = g[i] * u[i] * (g[i] < 0 ? e : 1.0f) / (1.0f + e);
        }
    }
}

static inline void rotate(const float *restrict x, const float *restrict weight, const float *restrict cosine, const float *restrict sine,
                          float factor, float eps, float *restrict out) {
#if HAS_QK_NORM
    float normed[HEAD_DIM];
    rms_norm(x, weight, normed, HEAD_DIM, eps);
#else
    const float *restrict normed = x;
#endif
#pragma omp simd
    for (int d = 0; d < HEAD_DIM / 2; d++) { // the first half of the sine has rotate_half's minus sign
        const float a = normed[d], c = normed[d + HEAD_DIM / 2];
        out[d] = factor * (a * cosine[d] + c * sine[d]);
        out[d + HEAD_DIM / 2] = factor * (c * cosine[d + HEAD_DIM / 2] + a * sine[d + HEAD_DIM / 2]);
    }
}

static inline lanes larger(lanes a, lanes b) {
    const lane_bits is_first = a > b;
    return (lanes)(((lane_bits)a & is_first) | ((lane_bits)b & ~is_first));
}

// Write the attention scores of positions 0 .. n - 1 to scores[G][S], pad the last vector with -inf, and update the
// maxima in top[G]. The values of these positions are read ahead meanwhile. Returns the number of scores written for each head.
static inline int64_t score(const float (*q)[HEAD_DIM], const float *keys_DL, const float *values_LD, int64_t n, int64_t L, float *scores,
                            int64_t S, lanes *top) {
    static const float beyond[2 * LANES] = {[LANES ... 2 * LANES - 1] = -INFINITY};
    int64_t start = 0;
    for (; start < n; start += LANES) {
        lanes sum[GROUP] = {0};
        for (int d = 0; d < HEAD_DIM; d++) {
            const lanes key = load(keys_DL + d * L + start);
            __builtin_prefetch(values_LD + start * HEAD_DIM + d * LANES, 0, 2);
            for (int g = 0; g < GROUP; g++) sum[g] += key * q[g][d];
        }
        if (n - start < LANES)
            for (int g = 0; g < GROUP; g++) sum[g] += load(beyond + LANES - (n - start));
        for (int g = 0; g < GROUP; g++) {
            memcpy(scores + g * S + start, &sum[g], sizeof sum[g]);
            top[g] = larger(top[g], sum[g]);
        }
    }
    return start;
}

// Replace scores by their exponentials, up to a common factor (the softmax numerator); returns the sum. `size` is a
// multiple of LANES.
static inline float weigh(float *restrict scores, int64_t size, lanes tops) {
    const float top = largest_of(tops);
    lanes sum = {0};
    for (int64_t start = 0; start < size; start += LANES) {
#pragma omp simd simdlen(LANES)
        for (int i = 0; i < LANES; i++) scores[start + i] = exp_of_nonpositive(scores[start + i] - top);
        sum += load(scores + start);
    }
    return sum_of(sum);
}

// Add n values, at a stride of HEAD_DIM, times their weights. Each head has four partial sums, because additions to a
// single one would wait for each other.
static inline void mix(const float *weights, int64_t S, const float *value, int64_t n, lanes sum[GROUP][4]) {
    int64_t l = 0;
    for (; l + 3 < n; l += 4)
        for (int i = 0; i < 4; i++)
            for (int g = 0; g < GROUP; g++) sum[g][i] += load(value + (l + i) * HEAD_DIM) * weights[g * S + l + i];
    for (; l < n; l++)
        for (int g = 0; g < GROUP; g++) sum[g][0] += load(value + l * HEAD_DIM) * weights[g * S + l];
}

// Norm (if the family does) and rotate queries and keys, write key and value to the row's private cache, and attend to all positions up to
// the row's. The first start[b] positions are in row slot[b] of the shared caches, the others in row b of the private
// caches. Keys are [R, K, D, L], values [R, K, L, D].
void attend(int num_rows, const int64_t *position, const int64_t *start, const int64_t *slot, const float *qkv, const float *qk_norm,
            const float *cos_LD, const float *sin_LD, const float *shared_keys, const float *shared_values, int64_t P, float *keys,
            float *values, int64_t L, float eps, float *scratch_BGS, float *out) {
    const int64_t S = P + L;
#pragma omp parallel if (num_rows > 63)
    {
        float *scores = NULL; // a thread uses its first row's scratch for all its rows, which stays in the CPU cache
#pragma omp for schedule(static)
        for (int b = 0; b < num_rows; b++) {
            if (scores == NULL) scores = scratch_BGS + b * GROUP * S;
            const int64_t p = position[b], num_shared = start[b], num_private = p + 1 - start[b];
            const float *row = qkv + (int64_t)b * QKV_SIZE, *cosine = cos_LD + p * HEAD_DIM, *sine = sin_LD + p * HEAD_DIM;
            for (int k = 0; k < NUM_KV_HEADS; k++) {
                float q[GROUP][HEAD_DIM], key[HEAD_DIM];
                const float *shared_DP = shared_keys + (slot[b] * NUM_KV_HEADS + k) * HEAD_DIM * P;
                const float *shared_PD = shared_values + (slot[b] * NUM_KV_HEADS + k) * HEAD_DIM * P;
                float *keys_DL = keys + ((int64_t)b * NUM_KV_HEADS + k) * HEAD_DIM * L;
                float *values_LD = values + ((int64_t)b * NUM_KV_HEADS + k) * HEAD_DIM * L;
                for (int g = 0; g < GROUP; g++) {
                    const int h = k * GROUP + g;
                    rotate(row + h * HEAD_DIM, qk_norm + h * HEAD_DIM, cosine, sine, 1.0f / sqrtf(HEAD_DIM), eps, q[g]);
                }
                rotate(row + (NUM_HEADS + k) * HEAD_DIM, qk_norm + (NUM_HEADS + k) * HEAD_DIM, cosine, sine, 1.0f, eps, key);
                for (int d = 0; d < HEAD_DIM; d++) keys_DL[d * L + num_private - 1] = key[d];
                memcpy(values_LD + (num_private - 1) * HEAD_DIM, row + (NUM_HEADS + NUM_KV_HEADS + k) * HEAD_DIM, HEAD_DIM * sizeof(float));
                lanes top[GROUP];
                float total[GROUP];
                for (int g = 0; g < GROUP; g++) top[g] = (lanes){0} - INFINITY;
                const int64_t first_private = score(q, shared_DP, shared_PD, num_shared, P, scores, S, top);
                const int64_t size = first_private + score(q, keys_DL, values_LD, num_private, L, scores + first_private, S, top);
                for (int g = 0; g < GROUP; g++) total[g] = weigh(scores + g * S, size, top[g]);
                for (int d = 0; d < HEAD_DIM; d += LANES) {
                    lanes sum[GROUP][4] = {0};
                    mix(scores, S, shared_PD + d, num_shared, sum);
                    mix(scores + first_private, S, values_LD + d, num_private, sum);
                    for (int g = 0; g < GROUP; g++) {
                        const lanes mean = ((sum[g][0] + sum[g][1]) + (sum[g][2] + sum[g][3])) / total[g];
                        memcpy(out + ((int64_t)b * NUM_HEADS + k * GROUP + g) * HEAD_DIM + d, &mean, sizeof mean);
                    }
                }
            }
        }
    }
}

// Return a number in [0, 1) by splitmix64 (Steele, Lea and Flood 2014), 52 bits; the same as `uniforms` in sampling.py.
static double uniform(int64_t key, int64_t position) {
    uint64_t z = (uint64_t)key + (uint64_t)(position + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return (double)((z ^ (z >> 31)) >> 12) * 0x1p-52;
}

// Return the first token at which the cumulative weight exceeds `threshold`; its weight is never zero.
static int64_t find(const float *weight, const double *chunk_sum, double threshold) {
    const int num_chunks = (VOCAB + CHUNK - 1) / CHUNK;
    double before = 0;
    int64_t last = 0;
    for (int c = 0; c < num_chunks; c++) {
        if (before + chunk_sum[c] > threshold) {
            for (int64_t i = (int64_t)c * CHUNK; i < VOCAB && i < (int64_t)(c + 1) * CHUNK; i++) {
                before += weight[i];
                if (weight[i] > 0) last = i;
                if (before > threshold) return i;
            }
            return last; // the chunk's sum was rounded up
        }
        before += chunk_sum[c];
    }
    for (int64_t i = VOCAB - 1; i > 0; i--)
        if (weight[i] > 0) return i;
    return 0;
}

// Draw a token from a row of logits, which are overwritten. Returns 0 if any of them is neither finite nor -inf.
//
// Greedy takes the largest logit, the first of equal ones. It compares logits, because different logits may have
// exponentials that round to one number. For the same reason the largest is subtracted before the division: that is
// exact near it, and cannot overflow at a small temperature.
static int draw_row(float *restrict z, int64_t key, int64_t position, float temperature, int64_t *token, float *logp) {
    const int is_greedy = temperature == 0;
    const float divisor = is_greedy ? 1.0f : temperature;
    float top = -INFINITY;
#pragma omp simd reduction(max : top)
    for (int i = 0; i < VOCAB; i++) top = z[i] > top ? z[i] : top;
    if (!isfinite(top)) return 0;
    int64_t chosen = 0;
    if (is_greedy)
        while (z[chosen] != top) chosen++;
    double chunk_sum[(VOCAB + CHUNK - 1) / CHUNK], total = 0;
    for (int start = 0, c = 0; start < VOCAB; start += CHUNK, c++) {
        const int size = VOCAB - start < CHUNK ? VOCAB - start : CHUNK;
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int i = start; i < start + size; i++) {
            z[i] = exp_of_nonpositive((z[i] - top) / divisor);
            sum += z[i];
        }
        chunk_sum[c] = sum;
        total += chunk_sum[c];
    }
    if (!isfinite(total)) return 0;
    if (!is_greedy) chosen = find(z, chunk_sum, uniform(key, position) * total);
    *token = chosen;
    *logp = (float)(log(z[chosen]) - log(total));
    return 1;
}

// Draw and append a token for every row, and advance its position. ended[i] is the i-th row that is done,
// has_stopped[i] whether an end token ended it. Returns how many of the first num_running rows are done, or -1 - b if
// the logits of row b are not finite.
int draw(int num_rows, int num_running, float *logits, const int64_t *keys, const float *temperature, int64_t *position,
         const int64_t *end, int64_t T, int64_t *tokens_RT, float *logps_RT, const int64_t *stop_ids, int num_stop_ids, int64_t *ended,
         int64_t *has_stopped) {
    int bad = 0;
#pragma omp parallel for reduction(max : bad) if (num_rows > 63)
    for (int b = 0; b < num_rows; b++) {
        const int64_t next = position[b] + 1;
        if (!draw_row(logits + (int64_t)b * VOCAB, keys[b], position[b], temperature[b], tokens_RT + b * T + next, logps_RT + b * T + next))
            bad = b + 1 > bad ? b + 1 : bad;
        position[b] = next;
    }
    if (bad) return -bad;
    int count = 0;
    for (int b = 0; b < num_running; b++) {
        int is_stop = 0;
        for (int i = 0; i < num_stop_ids; i++) is_stop |= tokens_RT[b * T + position[b]] == stop_ids[i];
        if (is_stop || position[b] + 1 >= end[b]) {
            ended[count] = b;
            has_stopped[count++] = is_stop;
        }
    }
    return count;
}

// Copy the first `used` of `stride` bytes in each of `parts` equal pieces of a row.
void move_rows(int count, const int64_t *source, const int64_t *target, char *base, int64_t parts, int64_t stride, int64_t used) {
    for (int i = 0; i < count; i++)
        for (int64_t part = 0; part < parts; part++)
            memcpy(base + (target[i] * parts + part) * stride, base + (source[i] * parts + part) * stride, (size_t)used);
}
