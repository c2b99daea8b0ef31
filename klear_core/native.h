// Define what the C sources share.

#pragma once

#include <stdint.h>
#include <string.h>

// Return exp(x) for x <= 0, and 0 where that is below the normal numbers. Cody and Waite's reduction, then the Taylor
// series; relative error 1e-7.
static inline float exp_of_nonpositive(float x) {
    const float clamped = x < -87.0f ? -87.0f : x;
    const float shifted = clamped * 1.44269504f + 12582912.0f; // 1.5 * 2^23: rounds to an integer
    const float n = shifted - 12582912.0f;
    const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f; // ln 2 in two parts
    float p = 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return x < -87.0f ? 0.0f : p * scale;
}
