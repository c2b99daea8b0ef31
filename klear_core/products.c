// Multiply matrices of bfloat16 with float32 sums and a float32 result, by the processor's own instructions: AMX, or
// AVX512_BF16.
//
// Both operands, of bfloat16 or of float32 to be rounded to it, are packed: into blocks of 32 rows (left) or 32 columns
// (right), each of two tiles for every 32 terms of the sums. A tile of the left side has 16 rows of 32 numbers; one of the
// right side has 16 pairs of rows of 16 columns. Packing pads with zeros, which add nothing.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if !defined(__AVX512BF16__)
int instructions(void) { return 0; } // then nothing else is called
#else
#include <immintrin.h>
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_AMX 1
#endif

#define TILE 512  // numbers of a tile
#define BLOCK 32
#define CEIL(x) (((x) + BLOCK - 1) / BLOCK)
#define CACHED 1024 // tiles of the shorter side, 2 KiB each, that are read again and again
#define SHORTEST 64 // tiles of a part of the sums: reading and writing the sums takes little beside them

// Return 2 if products run on AMX, and 1 if on AVX512_BF16, which every processor with AMX has, too.
int instructions(void) {
#if defined(HAS_AMX)
    static int has_permission = -1;
    // Linux grants the tiles' large registers on request: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA.
    if (has_permission < 0) has_permission = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    if (has_permission) return 2;
#endif
    return 1;
}

// Return the mask of the first `size` of `width` numbers.
static inline uint32_t first(int64_t size, int width) { return size >= width ? ~0u >> (32 - width) : size <= 0 ? 0 : ~0u >> (32 - size); }

// A side of a product: a matrix with the distance from each row and column to the next, one of which is 1.
typedef struct { const void *numbers; int is_float; int64_t rows, columns, to_row, to_column; } side;

// Read `size` numbers and zeros beyond, up to 32; float32 is rounded to nearest, ties to even.
static inline __m512i read_line(const side *x, int64_t at, int64_t size) {
    if (!x->is_float) return _mm512_maskz_loadu_epi16(first(size, BLOCK), (const uint16_t *)x->numbers + at);
    const float *from = (const float *)x->numbers + at;
    const __m512 low = _mm512_maskz_loadu_ps(first(size, 16), from), high = _mm512_maskz_loadu_ps(first(size - 16, 16), from + 16);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// Read the 32 rows from `row` on, of the 32 columns from `column` on; or, if the numbers of a column lie side by side, the
// columns in place of the rows.
static inline void read_lines(const side *x, int64_t row, int64_t column, __m512i line[BLOCK]) {
    const int by_rows = x->to_column == 1;
    const int64_t at = row * x->to_row + column * x->to_column, to_line = by_rows ? x->to_row : x->to_column;
    const int64_t height = x->rows - row, width = x->columns - column;
    const int64_t num_lines = by_rows ? height : width, size = by_rows ? width : height;
    for (int i = 0; i < BLOCK; i++) line[i] = i < num_lines ? read_line(x, at + i * to_line, size) : _mm512_setzero_si512();
}

// Transpose 16 rows of 16 pairs: within quarters of registers, then the quarters.
static inline void transpose(__m512i row[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) t[i] = _mm512_unpacklo_epi32(row[i], row[i + 1]), t[i + 1] = _mm512_unpackhi_epi32(row[i], row[i + 1]);
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            row[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            row[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        const __m512i even = _mm512_shuffle_i32x4(row[i], row[i + 4], 0x88), odd = _mm512_shuffle_i32x4(row[i], row[i + 4], 0xdd);
        const __m512i even_8 = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0x88), odd_8 = _mm512_shuffle_i32x4(row[i + 8], row[i + 12], 0xdd);
        row[i] = _mm512_shuffle_i32x4(even, even_8, 0x88);
        row[i + 4] = _mm512_shuffle_i32x4(odd, odd_8, 0x88);
        row[i + 8] = _mm512_shuffle_i32x4(even, even_8, 0xdd);
        row[i + 12] = _mm512_shuffle_i32x4(odd, odd_8, 0xdd);
    }
}

// Make two tiles of 32 rows: in each 16 pairs of rows, which stand side by side, of 16 columns.
static inline void pair_rows(const __m512i row[BLOCK], __m512i tile[2][16]) {
    uint16_t places[2][BLOCK]; // of the first row's numbers 0 to 31, of the second row's 32 to 63
    for (int i = 0; i < BLOCK; i++) places[0][i] = i / 2 + i % 2 * BLOCK, places[1][i] = places[0][i] + 16;
    for (int half = 0; half < 2; half++) {
        const __m512i from = _mm512_loadu_si512(places[half]);
        for (int p = 0; p < 16; p++) tile[half][p] = _mm512_permutex2var_epi16(row[2 * p], from, row[2 * p + 1]);
    }
}

// Pack the left side's block of rows `mb`, of num_k tiles of terms from `begin` on.
static void pack_left(const side *x, int64_t mb, int64_t begin, int64_t num_k, uint16_t *out) {
    for (int64_t kb = 0; kb < num_k; kb++, out += 2 * TILE) {
        __m512i line[BLOCK], tile[2][16];
        read_lines(x, mb * BLOCK, (begin + kb) * BLOCK, line);
        if (x->to_column == 1) {
            memcpy(out, line, sizeof line);
            continue;
        }
        pair_rows(line, tile);
        transpose(tile[0]), transpose(tile[1]);
        memcpy(out, tile, sizeof tile);
    }
}

// Pack a right side [terms, columns].
void pack_right(int64_t terms, int64_t columns, const void *numbers, int is_float, int64_t to_term, int64_t to_column, uint16_t *out) {
    const side x = {numbers, is_float, terms, columns, to_term, to_column};
    const int64_t num_k = CEIL(terms);
#pragma omp parallel for if (terms * columns > 65536)
    for (int64_t nb = 0; nb < CEIL(columns); nb++)
        for (int64_t kb = 0; kb < num_k; kb++) {
            __m512i line[BLOCK], tile[2][16];
            read_lines(&x, kb * BLOCK, nb * BLOCK, line);
            if (to_column == 1)
                pair_rows(line, tile);
            else {
                memcpy(tile, line, sizeof tile);
                transpose(tile[0]), transpose(tile[1]);
            }
            memcpy(out + (nb * num_k + kb) * 2 * TILE, tile, sizeof tile);
        }
}

// Begin to read `lines` cache lines, which are waited for only by what needs them. Returns the place of those that follow.
static inline const char *read_ahead(const char *from, int64_t lines) {
    for (int64_t i = 0; i < lines; i++, from += 64) __builtin_prefetch(from, 0, 2);
    return from;
}

// Below, one block of rows times one of columns over num_k tiles of terms: sums[32][32], whose rows are `to_row` numbers
// apart, or added to them with `adds`. For each tile `lines` cache lines are read ahead.

// Groups of 8 rows from `height` on are left as they are: a decode step may have few rows.
static void block_on_vectors(const uint16_t *a, const uint16_t *b, int64_t num_k, float *sums, int64_t to_row, int adds, int64_t height,
                             const char *ahead, int64_t lines) {
    const int64_t num_groups = height < BLOCK ? (height + 7) / 8 : BLOCK / 8, group_lines = (lines + num_groups - 1) / num_groups;
    for (int start = 0; start < 8 * num_groups; start += 8) {
        __m512 sum[8][2];
        for (int i = 0; i < 8; i++)
            for (int t = 0; t < 2; t++) sum[i][t] = adds ? _mm512_loadu_ps(sums + (start + i) * to_row + t * 16) : _mm512_setzero_ps();
        for (int64_t kb = 0; kb < num_k; kb++) {
            const uint16_t *left = a + (kb * 2 + start / 16) * TILE + start % 16 * BLOCK, *right = b + kb * 2 * TILE;
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
            for (int t = 0; t < 2; t++) _mm512_storeu_ps(sums + (start + i) * to_row + t * 16, sum[i][t]);
    }
}

#if defined(HAS_AMX)
static void configure_tiles(void) {
    struct __attribute__((aligned(64))) { uint8_t palette, start, unused[14]; uint16_t row_bytes[16]; uint8_t rows[16]; } tiles = {.palette = 1};
    for (int i = 0; i < 8; i++) tiles.row_bytes[i] = 64, tiles.rows[i] = 16;
    _tile_loadconfig(&tiles);
}

static inline void block_on_tiles(const uint16_t *a, const uint16_t *b, int64_t num_k, float *sums, int64_t to_row, int adds, const char *ahead,
                                  int64_t lines) {
    const int64_t stride = to_row * sizeof(float);
    float *below = sums + 16 * to_row;
    if (adds) {
        _tile_loadd(0, sums, stride);
        _tile_loadd(1, sums + 16, stride);
        _tile_loadd(2, below, stride);
        _tile_loadd(3, below + 16, stride);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
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

// Return room for a number of tiles of both halves of a block.
static uint16_t *room(int64_t num_k) { return aligned_alloc(64, num_k * 2 * TILE * sizeof(uint16_t)); }

// Set out[rows, columns] to the product of the left side [rows, terms] and a packed right side, or add it with `adds`. Each
// result is one sum in the order of its terms, whatever the other rows and columns are.
void multiply(int64_t rows, int64_t columns, int64_t terms, const void *numbers, int is_float, int64_t to_row, int64_t to_term,
              const uint16_t *right, float *out, int adds) {
    const side x = {numbers, is_float, rows, terms, to_row, to_term};
    const int64_t num_k = CEIL(terms), high = CEIL(rows), wide = CEIL(columns);
    // The shorter side stays in the cache while the longer one is read once.
    const int is_wide = high < wide;
    const int64_t shorter = is_wide ? high : wide, block_size = num_k * 2 * TILE;
    // A block of columns is 32 lines for each tile. Each of its products reads a part of the next block ahead: with few of
    // them, as in a decode step, computing would wait for memory for a quarter of the time.
    const int64_t lines = is_wide && shorter <= BLOCK / 4 ? (BLOCK + shorter - 1) / shorter : 0;
    // Long sums are computed in parts, so that the shorter side's tiles still fit in the cache.
    const int64_t most = CACHED / shorter > SHORTEST ? CACHED / shorter : SHORTEST, num_parts = (num_k + most - 1) / most;
    const int64_t part = (num_k + num_parts - 1) / num_parts;
    // A left side that is read for every block of columns is packed once; otherwise each block of rows just before its use.
    uint16_t *whole = is_wide ? room(high * num_k) : NULL;
#if defined(HAS_AMX)
    const int kind = instructions();
#endif
#pragma omp parallel if (rows * columns * terms > 1048576)
    {
#if defined(HAS_AMX)
        if (kind == 2) configure_tiles();
#endif
        uint16_t *own = is_wide ? NULL : room(part);
        if (is_wide) {
#pragma omp for schedule(static)
            for (int64_t mb = 0; mb < high; mb++) pack_left(&x, mb, 0, num_k, whole + mb * block_size);
        }
        for (int64_t begin = 0; begin < num_k; begin += part) {
            const int64_t size_k = num_k - begin < part ? num_k - begin : part;
            const int adds_here = adds || begin > 0;
            int64_t packed = -1;
            // Static: a block of results is the same thread's in all parts, so that none waits for another.
#pragma omp for schedule(static) nowait
            for (int64_t i = 0; i < high * wide; i++) {
                const int64_t mb = is_wide ? i % shorter : i / shorter, nb = is_wide ? i / shorter : i % shorter;
                if (!is_wide && mb != packed) {
                    pack_left(&x, mb, begin, size_k, own);
                    packed = mb;
                }
                const uint16_t *a = is_wide ? whole + mb * block_size + begin * 2 * TILE : own;
                const uint16_t *b = right + nb * block_size + begin * 2 * TILE;
                const int64_t num_lines = nb + 1 < wide ? lines : 0;
                const char *ahead = (const char *)(b + (num_lines ? block_size : 0)) + i % shorter * lines * size_k * 64;
                const int64_t height = rows - mb * BLOCK, width = columns - nb * BLOCK;
                float *target = out + mb * BLOCK * columns + nb * BLOCK, edge[BLOCK * BLOCK];
                const int is_whole = height >= BLOCK && width >= BLOCK;
                const size_t size = (width < BLOCK ? width : BLOCK) * sizeof(float);
                for (int64_t r = 0; adds_here && !is_whole && r < BLOCK && r < height; r++) memcpy(edge + r * BLOCK, target + r * columns, size);
                float *sums = is_whole ? target : edge;
                const int64_t to_next = is_whole ? columns : BLOCK;
#if defined(HAS_AMX)
                if (kind == 2)
                    block_on_tiles(a, b, size_k, sums, to_next, adds_here, ahead, num_lines);
                else
#endif
                    block_on_vectors(a, b, size_k, sums, to_next, adds_here, height, ahead, num_lines);
                for (int64_t r = 0; !is_whole && r < BLOCK && r < height; r++) memcpy(target + r * columns, edge + r * BLOCK, size);
            }
        }
        free(own);
#if defined(HAS_AMX)
        if (kind == 2) _tile_release();
#endif
    }
    free(whole);
}
#endif
