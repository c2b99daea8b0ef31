// Multiply matrices of bfloat16 with float32 sums and a float32 result, by the processor's own instructions: AMX, or
// AVX512_BF16.
//
// Both operands are packed first: into blocks of 32 rows (left) or 32 columns (right), each of two tiles for every 32
// terms of the sums. A tile of the left side has 16 rows of 32 numbers; one of the right side has 16 pairs of rows of
// 16 columns. Packing pads with zeros, which add nothing.

#include <stdint.h>
#include <string.h>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#endif

#define TILE 512  // numbers of a tile
#define BLOCK 32
#define CEIL(x) (((x) + BLOCK - 1) / BLOCK)

// Return 2 if products run on AMX, 1 on AVX512_BF16, and 0 if this processor has neither, or may not use it.
int instructions(void) {
#if defined(HAS_AMX)
    static int has_permission = -1;
    // Linux grants the tiles' large registers on request: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    if (has_permission < 0) has_permission = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    if (has_permission) return 2;
#endif
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

static inline uint16_t rounded(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    // A NaN must not be carried into infinity by the rounding; its sign and a bit of its payload stay.
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40u);
    return (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); // to nearest, ties to even
}

static void round_floats(const float *x, int64_t size, uint16_t *out) {
    int64_t i = 0;
#if defined(__AVX512BF16__)
    for (; i + BLOCK <= size; i += BLOCK) {
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + i + 16), _mm512_loadu_ps(x + i));
        memcpy(out + i, &both, sizeof both);
    }
#endif
    for (; i < size; i++) out[i] = rounded(x[i]);
}

// Pack a left side [rows, terms] of float32, rounding it.
void pack_floats(int64_t rows, int64_t terms, const float *x, uint16_t *out) {
    const int64_t num_k = CEIL(terms);
#pragma omp parallel for if (rows * terms > 65536)
    for (int64_t m = 0; m < CEIL(rows) * BLOCK; m++)
        for (int64_t kb = 0; kb < num_k; kb++) {
            uint16_t *target = out + ((m / BLOCK * num_k + kb) * 2 + m % BLOCK / 16) * TILE + m % 16 * BLOCK;
            const int64_t size = m >= rows ? 0 : terms - kb * BLOCK < BLOCK ? terms - kb * BLOCK : BLOCK;
            round_floats(x + m * terms + kb * BLOCK, size, target);
            memset(target + size, 0, (BLOCK - size) * sizeof *target);
        }
}

// Copy up to 32 x 32 numbers, x[i * to_i + j * to_j], to square[i][j], with zeros beyond.
static inline void read_square(const uint16_t *x, int64_t height, int64_t width, int64_t to_i, int64_t to_j, uint16_t square[BLOCK][BLOCK]) {
    if (height < BLOCK || width < BLOCK) memset(square, 0, BLOCK * BLOCK * sizeof(uint16_t));
    height = height < BLOCK ? height : BLOCK;
    width = width < BLOCK ? width : BLOCK;
    if (to_j == 1)
        for (int64_t i = 0; i < height; i++) memcpy(square[i], x + i * to_i, width * sizeof(uint16_t));
    else if (height == BLOCK && to_i == 1) // whole rows of 32 at once, which the compiler turns into vectors
        for (int64_t j = 0; j < width; j++)
            for (int i = 0; i < BLOCK; i++) square[i][j] = x[j * to_j + i];
    else
        for (int64_t i = 0; i < height; i++)
            for (int64_t j = 0; j < width; j++) square[i][j] = x[i * to_i + j * to_j];
}

// Pack a left side [rows, terms] of bfloat16, with the distance from each row and each term to the next.
void pack_left(int64_t rows, int64_t terms, const uint16_t *x, int64_t to_row, int64_t to_term, uint16_t *out) {
    const int64_t num_k = CEIL(terms);
#pragma omp parallel for if (rows * terms > 65536)
    for (int64_t mb = 0; mb < CEIL(rows); mb++)
        for (int64_t kb = 0; kb < num_k; kb++) {
            const uint16_t *from = x + mb * BLOCK * to_row + kb * BLOCK * to_term;
            // Two tiles of 16 rows are one square of 32.
            uint16_t(*tiles)[BLOCK] = (uint16_t(*)[BLOCK])(out + (mb * num_k + kb) * 2 * TILE);
            read_square(from, rows - mb * BLOCK, terms - kb * BLOCK, to_row, to_term, tiles);
        }
}

// Pack a right side [terms, columns] of bfloat16.
void pack_right(int64_t terms, int64_t columns, const uint16_t *x, int64_t to_term, int64_t to_column, uint16_t *out) {
    const int64_t num_k = CEIL(terms);
#pragma omp parallel for if (terms * columns > 65536)
    for (int64_t nb = 0; nb < CEIL(columns); nb++)
        for (int64_t kb = 0; kb < num_k; kb++) {
            const uint16_t *from = x + kb * BLOCK * to_term + nb * BLOCK * to_column;
            const int64_t height = terms - kb * BLOCK, width = columns - nb * BLOCK;
            uint16_t *target = out + (nb * num_k + kb) * 2 * TILE, square[BLOCK][BLOCK];
            if (to_term == 1) { // terms side by side: pairs stay together
                read_square(from, width, height, to_column, to_term, square);
                for (int n = 0; n < BLOCK; n++)
                    for (int pair = 0; pair < 16; pair++)
                        memcpy(target + n / 16 * TILE + pair * BLOCK + n % 16 * 2, &square[n][2 * pair], 2 * sizeof(uint16_t));
                continue;
            }
            read_square(from, height, width, to_term, to_column, square);
            for (int pair = 0; pair < 16; pair++)
                for (int n = 0; n < BLOCK; n++) {
                    uint16_t *place = target + n / 16 * TILE + pair * BLOCK + n % 16 * 2;
                    place[0] = square[2 * pair][n];
                    place[1] = square[2 * pair + 1][n];
                }
        }
}

// Begin to read `lines` cache lines, which are waited for only by what needs them. Returns the place of those that follow.
static inline const char *read_ahead(const char *from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++, from += 64) __builtin_prefetch(from, 0, 2);
    return from;
}

// Below, one block of rows times one of columns over num_k tiles of terms: added to sums[32][32], whose rows are `to_row`
// numbers apart. For each tile `lines` cache lines are read ahead.
#if defined(__AVX512BF16__)
// Groups of 8 rows from `height` on are left as they are: a decode step may have few rows.
static void block_on_vectors(const uint16_t *a, const uint16_t *b, int64_t num_k, float *sums, int64_t to_row, int64_t height, const char *ahead,
                             int64_t lines) {
    const int64_t num_groups = height < BLOCK ? (height + 7) / 8 : BLOCK / 8, group_lines = (lines + num_groups - 1) / num_groups;
    for (int first = 0; first < 8 * num_groups; first += 8) {
        __m512 sum[8][2];
        for (int i = 0; i < 8; i++)
            for (int t = 0; t < 2; t++) sum[i][t] = _mm512_loadu_ps(sums + (first + i) * to_row + t * 16);
        for (int64_t kb = 0; kb < num_k; kb++) {
            const uint16_t *left = a + (kb * 2 + first / 16) * TILE + first % 16 * BLOCK, *right = b + kb * 2 * TILE;
            ahead = read_ahead(ahead, group_lines);
            for (int pair = 0; pair < 16; pair++) {
                const __m512bh b0 = (__m512bh)_mm512_loadu_si512(right + pair * BLOCK);
                const __m512bh b1 = (__m512bh)_mm512_loadu_si512(right + TILE + pair * BLOCK);
                for (int i = 0; i < 8; i++) {
                    int32_t both;
                    memcpy(&both, left + i * BLOCK + pair * 2, sizeof both);
                    const __m512bh a0 = (__m512bh)_mm512_set1_epi32(both);
                    sum[i][0] = _mm512_dpbf16_ps(sum[i][0], a0, b0);
                    sum[i][1] = _mm512_dpbf16_ps(sum[i][1], a0, b1);
                }
            }
        }
        for (int i = 0; i < 8; i++)
            for (int t = 0; t < 2; t++) _mm512_storeu_ps(sums + (first + i) * to_row + t * 16, sum[i][t]);
    }
}
#endif

#if defined(HAS_AMX)
static void configure_tiles(void) {
    struct __attribute__((aligned(64))) { uint8_t palette, start, unused[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;
    _tile_loadconfig(&tiles);
}

static inline void block_on_tiles(const uint16_t *a, const uint16_t *b, int64_t num_k, float *sums, int64_t to_row, const char *ahead,
                                  int64_t lines) {
    const int64_t stride = to_row * sizeof(float);
    float *below = sums + 16 * to_row;
    _tile_loadd(0, sums, stride);
    _tile_loadd(1, sums + 16, stride);
    _tile_loadd(2, below, stride);
    _tile_loadd(3, below + 16, stride);
    for (int64_t kb = 0; kb < num_k; kb++) {
        ahead = read_ahead(ahead, lines);
        _tile_loadd(4, a + kb * 2 * TILE, 64);
        _tile_loadd(5, a + (kb * 2 + 1) * TILE, 64);
        _tile_loadd(6, b + kb * 2 * TILE, 64);
        _tile_loadd(7, b + (kb * 2 + 1) * TILE, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, stride);
    _tile_stored(1, sums + 16, stride);
    _tile_stored(2, below, stride);
    _tile_stored(3, below + 16, stride);
}
#endif

static inline void block(int kind, const uint16_t *a, const uint16_t *b, int64_t num_k, float *sums, int64_t to_row, int64_t height,
                         const char *ahead, int64_t lines) {
#if defined(HAS_AMX)
    if (kind == 2) block_on_tiles(a, b, num_k, sums, to_row, ahead, lines);
#endif
#if defined(__AVX512BF16__)
    if (kind == 1) block_on_vectors(a, b, num_k, sums, to_row, height, ahead, lines);
#endif
}

// Set out[rows, columns] to the product of packed sides, or add it with `adds`. Each result is one sum in the order of
// its terms, whatever the other rows and columns are.
void multiply(int64_t rows, int64_t columns, int64_t terms, const uint16_t *left, const uint16_t *right, float *out, int adds) {
    const int64_t num_k = CEIL(terms), high = CEIL(rows), wide = CEIL(columns), shorter = high < wide ? high : wide;
    const int kind = instructions();
    // A block of the longer side is 32 lines for each tile. Each of its `shorter` products reads a part of the next block
    // ahead: with few of them, as in a decode step, computing would wait for memory for a quarter of the time.
    const int64_t block_size = num_k * 2 * TILE, lines = shorter > BLOCK / 4 ? 0 : (BLOCK + shorter - 1) / shorter;
    const uint16_t *longer = high < wide ? right : left;
#pragma omp parallel if (rows * columns * terms > 1048576)
    {
#if defined(HAS_AMX)
        if (kind == 2) configure_tiles();
#endif
        // The shorter side stays in the cache while the longer one is read once.
#pragma omp for schedule(static)
        for (int64_t i = 0; i < high * wide; i++) {
            const int64_t mb = high < wide ? i % shorter : i / shorter, nb = high < wide ? i / shorter : i % shorter;
            const uint16_t *a = left + mb * block_size, *b = right + nb * block_size;
            const int64_t next = i / shorter + 1, is_last = next * shorter == high * wide;
            const char *ahead = (const char *)(longer + (is_last ? 0 : next) * block_size) + i % shorter * lines * num_k * 64;
            const int64_t height = rows - mb * BLOCK, width = columns - nb * BLOCK;
            float *target = out + mb * BLOCK * columns + nb * BLOCK, edge[BLOCK * BLOCK];
            const int is_whole = height >= BLOCK && width >= BLOCK;
            float *sums = is_whole ? target : edge;
            const int64_t to_row = is_whole ? columns : BLOCK;
            const size_t size = (width < BLOCK ? width : BLOCK) * sizeof(float);
            for (int64_t r = 0; r < BLOCK; r++) {
                if (!adds || !is_whole) memset(sums + r * to_row, 0, BLOCK * sizeof(float));
                if (adds && !is_whole && r < height) memcpy(edge + r * BLOCK, target + r * columns, size);
            }
            block(kind, a, b, num_k, sums, to_row, height, ahead, is_last ? 0 : lines);
            for (int64_t r = 0; !is_whole && r < BLOCK && r < height; r++) memcpy(target + r * columns, edge + r * BLOCK, size);
        }
#if defined(HAS_AMX)
        if (kind == 2) _tile_release();
#endif
    }
}
