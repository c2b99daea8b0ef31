// RMS norm, rotation and gate of a training step in float32, forward and backward, each in one pass over memory. HEAD_DIM is a macro.
//
// N rows (tokens, or heads of tokens), C elements of a row. Sums over rows are returned as partial sums of PART rows
// each, so that neither the number of threads nor the length of a sum affects the result.

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "native.h"

#define PART 256
#define HALF (HEAD_DIM / 2)

static inline float scale_of(const float *restrict x, int64_t C, float eps) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < C; i++) sum += x[i] * x[i];
    return 1.0f / sqrtf(sum / C + eps);
}

// y = x * scale * weight  =>  dx = scale * (g - x * scale^2 * mean(g * x)) with g = dy * weight, dweight = sum of dy * x * scale
static inline void norm_gradient(const float *restrict dy, const float *restrict x, const float *restrict weight, int64_t C, float eps,
                                 float *restrict dx, float *restrict dweight) {
    const float scale = scale_of(x, C, eps);
    float dot = 0;
#pragma omp simd reduction(+ : dot)
    for (int64_t i = 0; i < C; i++) dot += dy[i] * weight[i] * x[i];
    const float pull = dot * scale * scale / C;
#pragma omp simd
    for (int64_t i = 0; i < C; i++) {
        dx[i] = scale * (dy[i] * weight[i] - x[i] * pull);
        dweight[i] += dy[i] * x[i] * scale;
    }
}

void norm_forward(int64_t N, int64_t C, const float *x, const float *weight, float eps, float *y) {
#pragma omp parallel for schedule(static) if (N * C > 32768)
    for (int64_t n = 0; n < N; n++) {
        const float *restrict row = x + n * C, scale = scale_of(row, C, eps);
        float *restrict out = y + n * C;
#pragma omp simd
        for (int64_t i = 0; i < C; i++) out[i] = row[i] * scale * weight[i];
    }
}

// The caller sets dweight[parts][C] to zero, because gradients are added to it.
void norm_backward(int64_t N, int64_t C, const float *dy, const float *x, const float *weight, float eps, float *dx, float *dweight) {
#pragma omp parallel for schedule(static) if (N * C > 32768)
    for (int64_t part = 0; part < (N + PART - 1) / PART; part++)
        for (int64_t n = part * PART; n < N && n < (part + 1) * PART; n++)
            norm_gradient(dy + n * C, x + n * C, weight, C, eps, dx + n * C, dweight + part * C);
}

// Normalise each head unless weight is NULL, then rotate it by the token's angles cosine[N][D], sine[N][D]. Tokens of x are
// `to_token` numbers apart, y is [N][heads][D].
void rotate_forward(int64_t N, int64_t heads, int64_t to_token, const float *x, const float *weight, const float *cosine,
                    const float *sine, float eps, float *y) {
#pragma omp parallel for schedule(static) if (N * heads * HEAD_DIM > 32768)
    for (int64_t n = 0; n < N; n++)
        for (int64_t h = 0; h < heads; h++) {
            const float *restrict row = x + n * to_token + h * HEAD_DIM;
            const float *restrict c = cosine + n * HEAD_DIM, *restrict s = sine + n * HEAD_DIM;
            float *restrict out = y + (n * heads + h) * HEAD_DIM, normed[HEAD_DIM];
            if (weight) {
                const float scale = scale_of(row, HEAD_DIM, eps);
#pragma omp simd
                for (int d = 0; d < HEAD_DIM; d++) normed[d] = row[d] * scale * weight[d];
            } else
                memcpy(normed, row, sizeof normed);
#pragma omp simd
            for (int d = 0; d < HALF; d++) {
                out[d] = normed[d] * c[d] - normed[d + HALF] * s[d];
                out[d + HALF] = normed[d + HALF] * c[d + HALF] + normed[d] * s[d + HALF];
            }
        }
}

// dy is [N][heads][D]; tokens of x and dx are `to_token` numbers apart. Without a weight, x and dweight are not used.
void rotate_backward(int64_t N, int64_t heads, int64_t to_token, const float *dy, const float *x, const float *weight, const float *cosine,
                     const float *sine, float eps, float *dx, float *dweight) {
#pragma omp parallel for schedule(static) if (N * heads * HEAD_DIM > 32768)
    for (int64_t part = 0; part < (N + PART - 1) / PART; part++)
        for (int64_t n = part * PART; n < N && n < (part + 1) * PART; n++)
            for (int64_t h = 0; h < heads; h++) {
                const float *restrict g = dy + (n * heads + h) * HEAD_DIM;
                const float *restrict c = cosine + n * HEAD_DIM, *restrict s = sine + n * HEAD_DIM;
                const int64_t at = n * to_token + h * HEAD_DIM;
                float back[HEAD_DIM]; // gradient by the normalised head: the transposed rotation, so sine changes its sign
#pragma omp simd
                for (int d = 0; d < HALF; d++) {
                    back[d] = g[d] * c[d] + g[d + HALF] * s[d + HALF];
                    back[d + HALF] = g[d + HALF] * c[d + HALF] - g[d] * s[d];
                }
                if (weight)
                    norm_gradient(back, x + at, weight, HEAD_DIM, eps, dx + at, dweight + part * HEAD_DIM);
                else
                    memcpy(dx + at, back, sizeof back);
            }
}

static inline float logistic(float x) {
    const float e = exp_of_nonpositive(-fabsf(x)); // exp of a number <= 0 cannot overflow
    return (x < 0 ? e : 1.0f) / (1.0f + e);
}

// y[N][C] = silu(gate) * up, with gate and up side by side in gate_up[N][2][C]
void gate_forward(int64_t N, int64_t C, const float *gate_up, float *y) {
#pragma omp parallel for schedule(static) if (N * C > 32768)
    for (int64_t n = 0; n < N; n++) {
        const float *restrict gate = gate_up + 2 * n * C, *restrict up = gate + C;
        float *restrict out = y + n * C;
#pragma omp simd
        for (int64_t i = 0; i < C; i++) out[i] = gate[i] * logistic(gate[i]) * up[i];
    }
}

void gate_backward(int64_t N, int64_t C, const float *dy, const float *gate_up, float *gradient) {
#pragma omp parallel for schedule(static) if (N * C > 32768)
    for (int64_t n = 0; n < N; n++) {
        const float *restrict gate = gate_up + 2 * n * C, *restrict up = gate + C, *restrict g = dy + n * C;
        float *restrict dgate = gradient + 2 * n * C, *restrict dup = dgate + C;
#pragma omp simd
        for (int64_t i = 0; i < C; i++) {
            const float s = logistic(gate[i]); // silu(x) = x s, and silu'(x) = s (1 + x (1 - s))
            dgate[i] = g[i] * up[i] * s * (1.0f + gate[i] * (1.0f - s));
            dup[i] = g[i] * gate[i] * s;
        }
    }
}
